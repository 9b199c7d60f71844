"""From two sets of tensors to the bytes of a container, on as many threads as asked. Pure.

Blocks are surveyed and written in any order; tables of parameters are chosen in the order of
names, because what one saves depends on those before it. So the bytes are the same for every
number of threads.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np

from farcast.delta.bits import AnyBits, TensorBits, to_bits, word_bytes, words_of
from farcast.delta.blocks import (
    DENSE,
    SAME,
    Layout,
    Survey,
    Tables,
    block_cost,
    dense_survey,
    join,
    survey,
    write_block,
    write_sparse,
    write_whole,
)
from farcast.delta.coding import changed_positions, encode_sparse
from farcast.delta.conditioned import CODES, FIELDS, Classes, Table, classes_of, field_of
from farcast.delta.container import PACKED, Header, Row, in_order, write_container
from farcast.delta.crew import Crew, shares, threads_for
from farcast.delta.identity import entry_of
from farcast.types import TensorEntry

_Coding = Literal["blocks", "codes", "planes", "full"]

SMALL_WORDS = 1 << 16
"""A target of fewer words in all is coded in planes: the kernels, whose import takes most of a
second, would save less than a packet."""

UNIT_BYTES = 1 << 23
"""Raw bytes that one task looks at: far more than handing it over costs, while what it holds
until its turn comes is at most six times that."""

DEVICE_UNIT_BYTES = 1 << 26
"""Of tensors on a device: it wants millions of words at once, and hands over changes alone."""

POOLED_CHANGES = 1 << 20
"""Changes that are held until a common table was made of them: in memory 24 MiB."""

WHOLE_FROM = 8
"""Where a change takes over an eighth of the raw tensor, the whole tensor is coded too."""

WORTH_A_TASK = 1 << 15
"""Changes that another thread takes longer to write than to wake up for."""

SAMPLED_WORDS = 1 << 14
"""Words of the base that the range of classes is taken from."""

MOST_PIECES = 256
"""Ways tried to cut a shard into equal blocks of an even number of words."""


@dataclass(frozen=True)
class EncodedDelta:
    """A delta's bytes; what every tensor of the target is; how many elements changed, of how many.

    Codes packed into integers count as the integers they are in."""

    data: bytes
    entries: dict[str, TensorEntry]
    changed: int
    elements: int


@dataclass(frozen=True)
class _Tensor:
    """One tensor to look at; `old` is None where it is coded whole."""

    name: str
    new: AnyBits
    old: AnyBits | None
    coding: _Coding
    layout: Layout
    classes: Classes

    def look(self, blocks: range) -> Sequence[Survey | None]:
        """What changed in each block; None where there is nothing to compare it with."""
        new, old, layout = self.new, self.old, self.layout
        if old is None:
            return [None] * len(blocks)
        if new is old:
            return [dense_survey(0, self.classes)] * len(blocks)
        if not isinstance(new, TensorBits):
            from farcast.delta.placed import surveys

            return surveys(old, new, layout, self.classes, blocks)
        spans = map(layout.span, blocks)
        return [survey(old.data[s], new.data[s], layout.bits, self.classes) for s in spans]

    def write(self, index: int, found: Survey, table: int, rows: Table) -> bytes:
        span, old = self.layout.span(index), self.old
        if old is None:
            raise LookupError(self.name)
        if not isinstance(self.new, TensorBits):  # most blocks need no side of theirs
            sparse = write_sparse(found, table, rows, span.stop - span.start)
            if sparse is not None:
                return sparse
            table = DENSE
        sides = (old.part(span), self.new.part(span))
        return write_block(found, table, rows, *sides, self.layout.bits, self.classes)


class _Part(NamedTuple):
    """One block, and what a task found in it."""

    tensor: _Tensor
    block: int
    found: Survey | None


_Task = Callable[[], bytes]
"""What writes one block."""


@dataclass
class _Body:
    """A tensor as it is coded: its blocks, or which of the results of a task each will be."""

    name: str
    coding: _Coding
    block: int
    changed: int = 0
    blocks: "list[bytes | tuple[Future[list[bytes]], int]]" = field(default_factory=list)

    def blob(self) -> bytes:
        done = [
            part if isinstance(part, bytes) else part[0].result()[part[1]] for part in self.blocks
        ]
        return done[0] if self.coding == "planes" else join(done)


def write_delta(
    base: Mapping[str, AnyBits],
    target: Mapping[str, AnyBits],
    base_entries: Mapping[str, TensorEntry],
    target_entries: Mapping[str, TensorEntry],
    *,
    threads: int,
    shards: int,
    hash_unchanged: bool = True,
) -> EncodedDelta:
    """See `encode_bits`. A tensor whose bits are the same object on both sides is not looked at;
    without `hash_unchanged` the entries of unchanged tensors are those that were known."""
    base, target = _together(base, target)
    names = in_order(target)
    writer = _Writer(base, target, shards)
    threads = threads_for(target.values(), threads)
    with Crew(threads) as crew:
        found = writer.bodies(names, crew)
        bodies = {body.name: body for body in found if body.changed or body.coding == "full"}
        entries = dict(target_entries)
        for name in names:
            if name not in bodies and name in base_entries:
                entries.setdefault(name, base_entries[name])
        wanted = names if hash_unchanged else list(bodies)
        entries |= _hashed({name: target[name] for name in wanted if name not in entries}, crew)
        blobs = list(crew.each(writer.smallest, bodies.values()))
    rows = tuple(
        Row(name, target[name].dtype, target[name].shape, body.coding, body.block, body.changed, n)
        for (name, body), n in zip(bodies.items(), map(len, blobs), strict=True)
    )
    removed = tuple(in_order(set(base) - set(target)))
    header = Header(removed, writer.tables.packed(), rows)
    digests = [entries[name].digest for name in bodies]
    data = write_container(header, digests, blobs, threads=threads)
    elements = sum(map(writer.elements, names))
    changed = sum(map(writer.changed, bodies.values()))
    known = {name: entries[name] for name in names if name in entries}
    return EncodedDelta(data, known, changed, elements)


class _Writer:
    """What one container has in common: classes of each dtype, tables of parameters."""

    def __init__(
        self, base: Mapping[str, AnyBits], target: Mapping[str, AnyBits], shards: int
    ) -> None:
        self._base, self._target, self._shards = base, target, shards
        self._classes: dict[str, Classes] = {}
        self.tables = Tables()
        words = sum(bits.nbytes // word_bytes(bits.dtype) for bits in target.values())
        self._small = words < SMALL_WORDS

    def bodies(self, names: list[str], crew: Crew) -> "list[_Body]":
        """Every tensor, coded; those that did not change have no blocks."""
        bodies: dict[str, _Body] = {}
        large = []
        for name in names:
            tensor = self._tensor(name)
            bodies[name] = _Body(
                name, tensor.coding, tensor.layout.block if tensor.new.nbytes else 0
            )
            if tensor.coding == "planes":
                _code_small(tensor, bodies[name])
            else:
                large.append(tensor)
        for parts in self._with_tables(crew.each(_look, _units(large))):
            self._code(parts, bodies, crew)
        return list(bodies.values())

    def smallest(self, body: _Body) -> bytes:
        """The blob of a tensor; where its change takes much of it, it may be coded whole."""
        blob, new = body.blob(), self._target[body.name]
        if body.coding == "full" or WHOLE_FROM * len(blob) <= new.nbytes:
            return blob
        layout = self._layout(new, 8 * word_bytes(new.dtype))
        whole = join([whole_block(new, layout, index) for index in range(layout.count)])
        if len(whole) >= len(blob):
            return blob
        body.coding, body.block = "full", layout.block
        body.changed = self._moved(body.name)
        return whole

    def elements(self, name: str) -> int:
        """Elements of a tensor: words, or both codes of each byte of F4."""
        bits = self._target[name]
        return bits.nbytes // word_bytes(bits.dtype) * (2 if bits.dtype == "F4" else 1)

    def changed(self, body: _Body) -> int:
        """Elements that changed. Codes packed into integers count as the integers they are in."""
        if body.coding == "codes" and self._target[body.name].dtype != "F4":
            return self._moved(body.name)
        return body.changed

    def _moved(self, name: str) -> int:
        """Words that differ from those of the base."""
        return differing(self._base[name], self._target[name])

    def _with_tables(self, looked: Iterator[list[_Part]]) -> Iterator[list[_Part]]:
        """What was looked at, after a common table was made of the first of each kind."""
        first: list[list[_Part]] = []
        events = 0
        for parts in looked:
            first.append(parts)
            events += sum(part.found.gap.size for part in parts if part.found is not None)
            if events > POOLED_CHANGES:
                break
        kinds: dict[Classes, list[Survey]] = {}
        for part in chain.from_iterable(first):
            if part.found is not None and part.found.gap.size:
                kinds.setdefault(part.tensor.classes, []).append(part.found)
        for classes, blocks in kinds.items():
            self.tables.add_common(blocks, classes)
        yield from first
        yield from looked

    def _code(self, parts: list[_Part], bodies: dict[str, _Body], crew: Crew) -> None:
        """Choose the tables of some blocks, and have them written by one task."""
        tasks = [(body := bodies[part.tensor.name], self._task(part, body)) for part in parts]
        if sum(map(_weight, parts)) < WORTH_A_TASK:
            for body, task in tasks:
                body.blocks.append(task())
            return
        written = crew.start(_all_of, [task for _, task in tasks])
        for index, (body, _) in enumerate(tasks):
            body.blocks.append((written, index))

    def _task(self, part: _Part, body: _Body) -> _Task:
        """What writes a block."""
        tensor, index, found = part
        if found is None:
            lo, hi = tensor.layout.bounds(index)
            body.changed += hi - lo
            return partial(whole_block, tensor.new, tensor.layout, index)
        if not found.changed:
            return _same
        body.changed += found.changed
        table = self.tables.choose(found, tensor.classes)
        return partial(tensor.write, index, found, table, self.tables.rows(table))

    def _tensor(self, name: str) -> _Tensor:
        new, old = self._target[name], self._base.get(name)
        if old is not None and (old.dtype, old.shape) != (new.dtype, new.shape):
            old = None
        layout = self._layout(new, 8 * word_bytes(new.dtype))
        classes = self._classes_of(new.dtype)
        if old is None:
            return _Tensor(name, new, None, "full", layout, classes)
        if self._small:
            return _Tensor(name, new, old, "planes", layout, classes)
        plain = _Tensor(name, new, old, "blocks", layout, classes)
        if new.dtype not in PACKED or not new.nbytes:
            return plain
        layout = self._layout(new, 4)
        coded = _Tensor(name, new, old, "codes", layout, Classes(CODES, 0, CODES.mask))
        return coded if new.dtype == "F4" else min((plain, coded), key=_first_cost)

    def _layout(self, bits: AnyBits, width: int) -> Layout:
        """Blocks of the usual size, or such that a shard of rows is whole blocks."""
        layout = Layout.of(bits.nbytes, width)
        rows = bits.shape[0] if bits.shape else 1
        if self._shards == 1 or rows % self._shards or not layout.words:
            return layout
        share = layout.words // self._shards
        least = -(-share // layout.block)
        for pieces in range(least, least + MOST_PIECES):
            if share % (2 * pieces) == 0:
                return Layout.of(bits.nbytes, width, share // pieces)
        return layout

    def _classes_of(self, dtype: str) -> Classes:
        if dtype not in self._classes:
            same = [bits for bits in self._base.values() if bits.dtype == dtype]
            words = sum(bits.nbytes for bits in same) // word_bytes(dtype)
            samples = [bits.sample(max(1, words // SAMPLED_WORDS)) for bits in same]
            self._classes[dtype] = classes_of(field_of(dtype), samples)
        return self._classes[dtype]


def _together(
    base: Mapping[str, AnyBits], target: Mapping[str, AnyBits]
) -> tuple[Mapping[str, AnyBits], Mapping[str, AnyBits]]:
    """Both sides of a tensor lie in one place."""
    sides = (*base.values(), *target.values())
    if all(isinstance(bits, TensorBits) for bits in sides):
        return base, target
    from farcast.delta.placed import together

    return together(base, target)


def differing(old: AnyBits, new: AnyBits) -> int:
    """Words that differ between two versions of a tensor that lie in one place."""
    if isinstance(old, TensorBits) and isinstance(new, TensorBits):
        return int(np.count_nonzero(words_of(new) != words_of(old)))
    from farcast.delta.placed import differing

    return differing(old, new)


def _same() -> bytes:
    return bytes((SAME,))


def _weight(part: _Part) -> int:
    """Changes of a block; all its words where it is written by these."""
    lo, hi = part.tensor.layout.bounds(part.block)
    return hi - lo if part.found is None or part.found.dense else part.found.changed


def _all_of(tasks: Iterable[_Task]) -> list[bytes]:
    return [task() for task in tasks]


def _hashed(tensors: Mapping[str, AnyBits], crew: Crew) -> dict[str, TensorEntry]:
    """What each tensor is."""
    sizes = {name: bits.nbytes for name, bits in tensors.items()}
    large, batches = shares(sizes, crew.threads)
    out = {name: entry_of(tensors[name], threads=crew.threads) for name in large}
    for entries in crew.each(lambda names: [(n, entry_of(tensors[n])) for n in names], batches):
        out.update(entries)
    return out


def whole_block(new: AnyBits, layout: Layout, index: int) -> bytes:
    """A block of a tensor, coded without a base."""
    signed = new.dtype in FIELDS
    return write_whole(new.part(layout.span(index)), word_bytes(new.dtype), signed)


def _code_small(tensor: _Tensor, body: _Body) -> None:
    width = word_bytes(tensor.new.dtype)
    if tensor.old is not None and tensor.new.nbytes:
        old, new = to_bits(tensor.old).data, to_bits(tensor.new).data
        places = changed_positions(old, new, width)
        body.block, body.changed = 0, places.size
        body.blocks.append(encode_sparse(old, new, places, width))


def _first_cost(tensor: _Tensor) -> int:
    """Bits of the first block that changed: a guess at which words the tensor's bytes are."""
    for index in range(tensor.layout.count):
        (found,) = tensor.look(range(index, index + 1))
        if found is not None and found.changed:
            return block_cost(found)
    return 0


def _units(tensors: Iterable[_Tensor]) -> Iterator[list[tuple[_Tensor, range]]]:
    """Blocks in order, in tasks of about `UNIT_BYTES`."""
    unit: list[tuple[_Tensor, range]] = []
    size = 0
    for tensor in tensors:
        layout, count = tensor.layout, tensor.layout.count
        most = UNIT_BYTES if isinstance(tensor.new, TensorBits) else DEVICE_UNIT_BYTES
        start = 0
        while start < count:
            block = layout.span(start).stop - layout.span(start).start
            stop = min(count, start + max(1, -(-(most - size) // block)))
            unit.append((tensor, range(start, stop)))
            size += layout.span(stop - 1).stop - layout.span(start).start
            start = stop
            if size >= UNIT_BYTES:
                yield unit
                unit, size = [], 0
    if unit:
        yield unit


def _look(unit: list[tuple[_Tensor, range]]) -> list[_Part]:
    return [
        _Part(tensor, index, found)
        for tensor, blocks in unit
        for index, found in zip(blocks, tensor.look(blocks), strict=True)
    ]
