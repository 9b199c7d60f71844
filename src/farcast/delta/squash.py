"""Several consecutive deltas as one. Pure.

With the base of the first, the result is byte for byte what a writer who held both versions would
have made; only tensors that some delta names are looked at. Without it only what the deltas say by
themselves can be joined:

- a tensor that one of them holds whole (or removes): what was before does not matter;
- planes, which count positions among all words: their differences add up.

Blocks count positions among the words of a class, which the old words decide: squashing them
takes the base, and is refused without it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from farcast.delta.bits import AnyBits, TensorBits, Words, all_held, word_bytes
from farcast.delta.blocks import Changes, Layout, Places, join
from farcast.delta.coding import encode_changes
from farcast.delta.container import Header, Row, write_container
from farcast.delta.crew import Crew, threads_for
from farcast.delta.patch import Patch
from farcast.delta.writing import EncodedDelta, whole_block, write_delta
from farcast.errors import FormatError
from farcast.types import Digest, TensorEntry


def squash(
    deltas: Iterable[bytes | memoryview],
    base: Mapping[str, Any] | None = None,
    *,
    threads: int = 1,
) -> bytes:
    """One delta that does what `deltas` do one after the other.

    With `base`, the tensors that the first of them starts from, the bytes are those of
    `encode(base, new)`. Without it, `FormatError` where a change cannot be told without old words.
    """
    patches = [Patch.open(data) for data in deltas]
    if base is None:
        return _without_base(patches, threads)
    return squash_bits(patches, all_held(base), threads=threads).data


def squash_bits(
    patches: Sequence[Patch],
    base: Mapping[str, AnyBits],
    *,
    base_entries: Mapping[str, TensorEntry] | None = None,
    threads: int = 1,
    shards: int = 1,
) -> EncodedDelta:
    """`squash` on bits; `threads` and `shards` as in `encode_bits`, and so `base_entries`. The
    result's entries are those of tensors that some patch names, and of `base_entries`.

    Takes memory for the tensors that some patch names. Every one is verified after the last.
    """
    lines = _lines(patches)

    def finish(name: str) -> AnyBits | None:
        return _finished(name, lines[name], base.get(name))

    target, entries = dict(base), dict(base_entries or {})
    with Crew(threads_for(base.values(), threads)) as crew:
        for name, bits in zip(lines, crew.each(finish, lines), strict=True):
            target.pop(name, None)
            entries.pop(name, None)
            last = lines[name][-1]
            if bits is not None and last is not None:
                target[name], entries[name] = bits, last.entries[name].entry
    return write_delta(
        base, target, base_entries or {}, entries,
        threads=threads, shards=shards, hash_unchanged=False,
    )  # fmt: skip


def _lines(patches: Sequence[Patch]) -> dict[str, list[Patch | None]]:
    """What each tensor goes through; None where it is removed."""
    lines: dict[str, list[Patch | None]] = {}
    for patch in patches:
        for name in patch.entries:
            lines.setdefault(name, []).append(patch)
        for name in patch.removed:
            lines.setdefault(name, []).append(None)
    return lines


def _since_reset(name: str, line: Sequence[Patch | None]) -> Sequence[Patch | None]:
    """From the last patch on that needs nothing before it; all, where each does."""
    for index in reversed(range(len(line))):
        patch = line[index]
        if patch is None or patch.entries[name].kind == "full":
            return line[index:]
    return line


def _finished(name: str, line: Sequence[Patch | None], base: AnyBits | None) -> AnyBits | None:
    """A tensor after its last patch, verified; None if that removes it."""
    bits, owned = base, False
    for patch in _since_reset(name, line):
        if patch is None:
            bits, owned = None, False
            continue
        bits = patch.turned(name, bits, owned=owned, verify=patch is line[-1])
        owned = True
    return bits


# --- without a base ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Squashed:
    """One tensor of the result."""

    row: Row
    digest: Digest
    blob: bytes


def _without_base(patches: Sequence[Patch], threads: int) -> bytes:
    lines = _lines(patches)
    with Crew(threads) as crew:
        made = crew.each(lambda name: _squashed(name, lines[name]), sorted(lines, key=str.encode))
        found = [one for one in made if one is not None]
    removed = sorted((name for name, line in lines.items() if line[-1] is None), key=str.encode)
    header = Header(tuple(removed), (), tuple(one.row for one in found))
    return write_container(header, [one.digest for one in found], [one.blob for one in found])


def _squashed(name: str, line: Sequence[Patch | None]) -> _Squashed | None:
    """What a tensor's patches do together; None where it is removed, or is what it was."""
    since = _since_reset(name, line)
    last = since[-1]
    if last is None:
        return None
    entry = last.entries[name]
    first = since[0]
    if first is None or first.entries[name].kind == "full":
        bits = _finished(name, line, None)
        if not isinstance(bits, TensorBits):
            raise FormatError(f"A delta changes {name[:80]!r} after another removed it.")
        layout = Layout.of(bits.nbytes, 8 * word_bytes(bits.dtype))
        blob = join([whole_block(bits, layout, index) for index in range(layout.count)])
        block = layout.block if bits.nbytes else 0
        row = Row(name, entry.dtype, entry.shape, "full", block, layout.words, len(blob))
        return _Squashed(row, entry.digest, blob)
    patches = [patch for patch in since if patch is not None]
    if len({(p.entries[name].dtype, p.entries[name].shape) for p in patches}) > 1:
        raise FormatError(f"The deltas change {name[:80]!r} in several shapes; do not use them.")
    places, changes = _sum([patch.moves(name) for patch in patches], word_bytes(entry.dtype))
    if not places.size:
        return None
    blob = encode_changes(places, changes)
    row = Row(name, entry.dtype, entry.shape, "planes", 0, places.size, len(blob))
    return _Squashed(row, entry.digest, blob)


def _sum(moves: Sequence[tuple[Places, Changes]], width: int) -> tuple[Places, Words]:
    """Changes of words of so many bytes, one after the other, as one; none that add up to 0."""
    every = np.concatenate([places for places, _ in moves])
    places, which = np.unique(every, return_inverse=True)
    sums = np.zeros(places.size, np.uint64)
    np.add.at(sums, which, np.concatenate([changes for _, changes in moves]))
    changes = sums.astype(f"<u{width}")  # modulo the width
    kept = changes != 0
    return places[kept], changes[kept]
