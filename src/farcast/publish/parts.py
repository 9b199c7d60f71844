"""A version as a series of objects of bounded size, encoded one after the other.

Objects are cut at tensor borders in the order of names, so the same tensors give the same
objects on every machine. Each part is handed on as soon as it is made: while one is on its
way to the store, the next is encoded.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from farcast.delta import AnyBits, EncodedDelta, encode_bits
from farcast.types import TensorEntry

PART_BYTES = 512 << 20
"""Raw tensor bytes encoded into one object: bounds the memory of one encode and of one put, and
at the usual 1 % of change gives objects of a few MB, large enough for any store."""

MAX_PARTS = 1024
"""Beyond this the parts grow instead of becoming more: a manifest has room for 4096, and cutting
at tensor borders can double the count."""

OnChange = Callable[[Mapping[str, AnyBits], Mapping[str, AnyBits]], None]


@dataclass
class Tally:
    """What encoding found: entries of the whole target, elements, changed ones, seconds spent
    on so many threads."""

    entries: dict[str, TensorEntry] = field(default_factory=dict)
    elements: int = 0
    changed: int = 0
    seconds: float = 0.0
    threads: int = 1


def anchor_parts(
    target: Mapping[str, AnyBits], tally: Tally, *, part_bytes: int
) -> Iterator[bytes]:
    """The objects that hold `target` in full."""
    for names in split(target, part_bytes=part_bytes):
        yield encode_part({}, {name: target[name] for name in names}, {}, tally).data


def delta_parts(
    base: Mapping[str, AnyBits],
    base_entries: Mapping[str, TensorEntry],
    target: Mapping[str, AnyBits],
    tally: Tally,
    *,
    part_bytes: int,
    on_change: OnChange | None = None,
) -> Iterator[bytes]:
    """The objects that turn `base` into `target`; none for parts in which nothing changed.

    `tally` is complete when the iterator is exhausted. `on_change` sees the two sides of every
    part that did change.
    """
    gone = [name for name in base if name not in target]
    for names in split(target, part_bytes=part_bytes):
        before = {name: base[name] for name in (*names, *gone) if name in base}
        known = {name: base_entries[name] for name in before}
        after = {name: target[name] for name in names}
        encoded = encode_part(before, after, known, tally)
        if encoded.entries != known:
            if on_change is not None:
                on_change(before, after)
            yield encoded.data
        gone = []


def split(target: Mapping[str, AnyBits], *, part_bytes: int) -> Iterator[list[str]]:
    """The names in order, cut where a part would pass its size; a larger tensor stands alone."""
    sizes = {name: bits.nbytes for name, bits in target.items()}
    return split_sizes(sizes, part_bytes=part_bytes)


def split_sizes(sizes: Mapping[str, int], *, part_bytes: int) -> Iterator[list[str]]:
    """Like `split`, from the tensors' sizes in bytes."""
    limit = max(part_bytes, -(-sum(sizes.values()) // MAX_PARTS))
    names: list[str] = []
    size = 0
    for name in sorted(sizes):
        if names and size + sizes[name] > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += sizes[name]
    yield names


def encode_part(
    base: Mapping[str, AnyBits],
    target: Mapping[str, AnyBits],
    base_entries: Mapping[str, TensorEntry],
    tally: Tally,
) -> EncodedDelta:
    """One object's worth of change, counted in `tally`."""
    started = time.perf_counter()
    encoded = encode_bits(base, target, base_entries=base_entries, threads=tally.threads)
    tally.seconds += time.perf_counter() - started
    tally.entries.update(encoded.entries)
    tally.elements += encoded.elements
    tally.changed += encoded.changed
    return encoded
