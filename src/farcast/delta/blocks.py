"""The changes of a tensor, block by block: found, written, read and applied. Pure.

    blob    u32 length of every block but the last | the blocks
    block   u8 kind | body
    kind    0 .. 239   a sparse block, coded with that table of parameters
            252        nothing changed
            253        the new words as byte planes
            254        the new words as they are
            255        a dense block: u8 first class | u8 last class | a symbol for every word

Blocks decode alone. Refuses to leave a tensor half changed: what was written before a block
turned out malformed, or made for another base, is taken back.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from farcast.delta.bits import Bytes, Words, as_words
from farcast.delta.coding import decode_full, encode_full
from farcast.delta.conditioned import PLAIN, Classes, Field, Parameters, Table, checked_classes
from farcast.delta.container import MAX_BLOCK_WORDS, MAX_TABLES
from farcast.errors import FormatError, IntegrityError

BLOCK_WORDS = MAX_BLOCK_WORDS
"""Words of a block, where the writer was not asked for smaller ones."""

SAME, PLANES, RAW, DENSE = 252, 253, 254, 255
WEIGHED_TABLES = 8
"""The newest tables that a writer weighs for a block: neighbours resemble each other most."""

DENSE_FROM = 4
"""A block of which one word in so many changed is also coded densely: below, gaps are smaller."""

MAX_CHANGE_BYTES = 48
"""Four numbers of at most 94 bits and a sign."""

SPARE = 104
"""Bytes that the kernels may run past what they are asked for."""

Places: TypeAlias = npt.NDArray[np.int64]
Changes: TypeAlias = npt.NDArray[np.uint64]


@cache
def _kernels() -> ModuleType:
    from farcast.delta import kernels

    return kernels


@cache
def _chosen() -> npt.NDArray[np.uint8]:
    """[r, byte]: index of the set bit number r of a byte; 0 where there is none."""
    table = np.zeros((8, 256), np.uint8)
    for byte in range(256):
        for rank, bit in enumerate(bit for bit in range(8) if byte >> bit & 1):
            table[rank, byte] = bit
    return table


@dataclass(frozen=True)
class Layout:
    """How the words of a tensor lie in its bytes (`bits` wide, two in a byte if 4), and how many
    make a block."""

    bits: int
    words: int
    block: int

    @classmethod
    def of(cls, nbytes: int, bits: int, block: int = 0) -> "Layout":
        return cls(bits, nbytes * 8 // bits, block or BLOCK_WORDS)

    @property
    def count(self) -> int:
        return -(-self.words // self.block)

    def bounds(self, index: int) -> tuple[int, int]:
        """First word of a block and the one after its last."""
        return index * self.block, min(self.words, (index + 1) * self.block)

    def span(self, index: int) -> slice:
        """A block's bytes."""
        lo, hi = self.bounds(index)
        return slice(lo * self.bits // 8, hi * self.bits // 8)


class _Scratch:
    """What a thread needs for one block, reused from block to block."""

    def __init__(self) -> None:
        self.events = (
            np.empty(MAX_BLOCK_WORDS, np.uint8),
            np.empty(MAX_BLOCK_WORDS, np.uint32),
            np.empty(MAX_BLOCK_WORDS, np.uint64),
        )
        self.bounds = np.empty(257, np.int64)
        self.gap = np.empty(MAX_BLOCK_WORDS, np.uint32)
        self.size = np.empty(MAX_BLOCK_WORDS, np.uint64)
        self.codes = np.empty((2, MAX_BLOCK_WORDS), np.uint8)
        self._room = np.empty(1 << 16, np.uint8)

    def room(self, nbytes: int) -> Bytes:
        if self._room.size < nbytes:
            self._room = np.empty(nbytes, np.uint8)
        return self._room[:nbytes]


class _PerThread(threading.local):
    scratch: _Scratch | None = None


_threads = _PerThread()


def _scratch() -> _Scratch:
    if _threads.scratch is None:
        _threads.scratch = _Scratch()
    return _threads.scratch


def _constant(data: Bytes, bits: int) -> Words:
    """A read-only view, so that the kernels are compiled once and not once for each kind."""
    view = as_words(data, bits // 8).view()
    view.flags.writeable = False
    return view


class _View(NamedTuple):
    """The words of one block: `words[lo:hi]`, each in a word of its own."""

    words: Words
    lo: int
    hi: int


def _view(data: Bytes, layout: Layout, index: int, room: int) -> _View:
    lo, hi = layout.bounds(index)
    if layout.bits != 4:
        return _View(_constant(data, layout.bits), lo, hi)
    codes = _scratch().codes[room]
    _kernels().unpack(data, lo, hi, codes)
    return _View(_constant(codes, 8), 0, hi - lo)


class Survey(NamedTuple):
    """What changed in one block, by class, and the parameters that suit it best."""

    bounds: npt.NDArray[np.int64]
    gap: npt.NDArray[np.uint32]
    size: npt.NDArray[np.uint64]
    own: Table

    @property
    def changed(self) -> int:
        return self.gap.size


def survey(old: Bytes, new: Bytes, layout: Layout, index: int, classes: Classes) -> Survey:
    """Find the changes of one block."""
    held = _scratch()
    before, after = _view(old, layout, index, 0), _view(new, layout, index, 1)
    own = np.zeros((classes.number, 5), np.uint8)
    found = int(
        _kernels().survey(
            before.words, after.words, before.lo, before.hi, layout.bits, *classes.arguments,
            *held.events, held.bounds, held.gap, held.size, own,
        )
    )  # fmt: skip
    if not found:
        return Survey(_EMPTY_BOUNDS, held.gap[:0], held.size[:0], own)
    return Survey(held.bounds.copy(), held.gap[:found].copy(), held.size[:found].copy(), own)


_EMPTY_BOUNDS = np.zeros(257, np.int64)


def block_cost(found: Survey) -> int:
    """Bits of a block with its own parameters."""
    cost = int(_kernels().cost_of(len(found.own), *found[:3], found.own))
    return cost + found.changed


_NO_ROWS = np.empty((0, 5), np.uint8)


class Tables:
    """The tables of a container in the making. What a new one saves depends on those before it,
    so blocks are offered in order."""

    def __init__(self) -> None:
        self._kept: list[tuple[Classes, Parameters]] = []

    def packed(self) -> tuple[bytes, ...]:
        return tuple(parameters.pack() for _, parameters in self._kept)

    def rows(self, index: int) -> Table:
        """Parameters of a table; none of `RAW`."""
        return _NO_ROWS if index == RAW else self._kept[index][1].rows

    def add_common(self, blocks: list[Survey], classes: Classes) -> None:
        """A table that suits several blocks together."""
        changed = [found.changed for found in blocks]
        total = sum(changed)
        row = np.zeros((classes.number, 5), np.uint8)
        _kernels().pool(
            classes.number,
            np.stack([found.bounds for found in blocks]),
            np.cumsum([0, *changed[:-1]]),
            np.concatenate([found.gap for found in blocks]),
            np.concatenate([found.size for found in blocks]),
            np.empty(257, np.int64), np.empty(total, np.uint32), np.empty(total, np.uint64), row,
        )  # fmt: skip
        self._kept.append((classes, Parameters(classes.first, classes.last, row)))

    def choose(self, found: Survey, classes: Classes) -> int:
        """The table for a block: one of the newest, or its own if that saves more than it takes."""
        cost_of, events = _kernels().cost_of, (classes.number, *found[:3])
        likely = [i for i, (kind, _) in enumerate(self._kept) if kind == classes]
        costs = [(int(cost_of(*events, self.rows(i))), i) for i in likely[-WEIGHED_TABLES:]]
        own = Parameters(classes.first, classes.last, found.own)
        if costs:
            cost, best = min(costs)
            saved = cost - int(cost_of(*events, found.own))
            if saved <= 8 * own.nbytes or len(self._kept) == MAX_TABLES:
                return best
        if len(self._kept) == MAX_TABLES:
            return RAW
        self._kept.append((classes, own))
        return len(self._kept) - 1


def write_block(
    found: Survey, table: int, rows: Table, old: Bytes, new: Bytes, layout: Layout,
    index: int, classes: Classes,
) -> bytes:  # fmt: skip
    """One block in its smallest form: never over a byte larger than its words."""
    lo, hi = layout.bounds(index)
    span = layout.span(index)
    raw = span.stop - span.start
    best: bytes | None = None
    if table != RAW:
        room = _scratch().room(min(raw, MAX_CHANGE_BYTES * found.changed + 64 * len(rows)) + SPARE)
        room[0] = table
        end = int(_kernels().write(len(rows), *found[:3], rows, room, 1))
        best = room[:end].tobytes() if 0 < end <= raw else None
    if best is None or found.changed * DENSE_FROM > hi - lo:
        dense = _write_dense(old, new, layout, index, classes)
        if dense is not None and (best is None or len(dense) < len(best)):
            best = dense
    return best if best is not None else bytes((RAW,)) + new[span].tobytes()


def _write_dense(
    old: Bytes, new: Bytes, layout: Layout, index: int, classes: Classes
) -> bytes | None:
    before, after = _view(old, layout, index, 0), _view(new, layout, index, 1)
    span = layout.span(index)
    raw = span.stop - span.start
    held = _scratch()
    room = held.room(raw + SPARE)
    room[:3] = DENSE, classes.first, classes.last
    end = int(
        _kernels().write_dense(
            before.words, after.words, before.lo, before.hi, layout.bits, *classes.arguments,
            held.events[0], room, 3,
        )
    )  # fmt: skip
    return room[:end].tobytes() if 0 < end <= raw else None


def join(blocks: list[bytes]) -> bytes:
    """The blob of a tensor."""
    lengths = np.array([len(block) for block in blocks[:-1]], "<u4")
    return b"".join([lengths.tobytes(), *blocks])


def split(data: Bytes, start: int, end: int, count: int) -> list[tuple[int, int]]:
    """Where the blocks of the blob `data[start:end]` lie."""
    at = start + 4 * (count - 1)
    if count < 1 or at > end:
        raise FormatError("A delta ends inside its table of blocks; fetch it again.")
    ends = at + np.cumsum(data[start:at].copy().view("<u4"), dtype=np.int64)
    edges = [at, *ends.tolist(), end]
    spans = list(pairwise(edges))
    if any(a >= b for a, b in spans):
        raise FormatError("A delta's blocks do not fill their tensor; fetch it again.")
    return spans


class Applied:
    """Changes made to a tensor in place, and the way back."""

    def __init__(self, buffer: Bytes, layout: Layout) -> None:
        self._buffer, self.layout = buffer, layout
        self._sparse: list[tuple[Places, Changes]] = []
        self._whole: list[tuple[slice, Bytes]] = []
        self.changed = 0

    def add(self, place: Places, change: Changes) -> None:
        self._move(place, change, back=False)
        self._sparse.append((place, change))
        self.changed += place.size

    def overwrite(self, index: int, new: Bytes, changed: int | None = None) -> None:
        span = self.layout.span(index)
        old = self._buffer[span].copy()
        self._whole.append((span, old))
        self._buffer[span] = new
        self.changed += self._differing(old, new) if changed is None else changed

    def _differing(self, old: Bytes, new: Bytes) -> int:
        if self.layout.bits == 4:
            both = old ^ new
            return int(np.count_nonzero(both & 15) + np.count_nonzero(both >> 4))
        width = self.layout.bits // 8
        return int(np.count_nonzero(as_words(old, width) != as_words(new, width)))

    def undo(self) -> None:
        """Give the buffer its old bits again."""
        for place, change in self._sparse:
            self._move(place, change, back=True)
        for span, old in self._whole:
            self._buffer[span] = old
        self._sparse, self._whole, self.changed = [], [], 0

    def _move(self, place: Places, change: Changes, *, back: bool) -> None:
        if self.layout.bits == 4:
            _kernels().add_codes(self._buffer, place, change, -1 if back else 1)
            return
        words = as_words(self._buffer, self.layout.bits // 8)
        steps = change.astype(words.dtype)
        words[place] += (~steps + steps.dtype.type(1)) if back else steps


@dataclass(frozen=True)
class Blob:
    """The blocks of one tensor inside a container's bytes, ready to be applied."""

    data: Bytes
    spans: list[tuple[int, int]]
    layout: Layout
    field: Field
    tables: list[Parameters]

    def apply(self, buffer: Bytes, changed: int) -> Applied:
        """Change the whole tensor in `buffer`, in place, or leave it as it was and raise."""
        applied = Applied(buffer, self.layout)
        with self._undone_on_error(applied):
            for index in range(len(self.spans)):
                self._apply_block(index, index, applied, buffer, changed - applied.changed)
            if applied.changed != changed:
                raise FormatError(
                    "A delta has another number of changes than it says; fetch it again."
                )
        return applied

    def apply_range(self, first: int, last: int, buffer: Bytes) -> Applied:
        """Apply the blocks `first <= index < last` to a buffer that holds just their words."""
        lo = self.layout.bounds(first)[0]
        part = Layout(self.layout.bits, self.layout.bounds(last - 1)[1] - lo, self.layout.block)
        applied = Applied(buffer, part)
        with self._undone_on_error(applied):
            for index in range(first, last):
                self._apply_block(index, index - first, applied, buffer, self.layout.words)
        return applied

    @contextmanager
    def _undone_on_error(self, applied: Applied) -> Iterator[None]:
        try:
            yield
        except BaseException:
            applied.undo()
            raise

    def _apply_block(self, index: int, at: int, applied: Applied, buffer: Bytes, most: int) -> None:
        """Apply block `index`, of at most `most` changes, which is block `at` of the buffer."""
        start, end = self.spans[index]
        kind = int(self.data[start])
        if end + 8 > self.data.size:
            raise FormatError("A delta ends inside its tensors; fetch it again.")
        if kind == SAME:
            if end - start != 1:
                raise FormatError("A delta's block has a wrong size; fetch it again.")
        elif kind == DENSE:
            self._apply_dense(start + 1, end, at, applied, buffer)
        elif kind in (RAW, PLANES):
            new = whole_block(self.data[start:end], applied.layout, at, self.field != PLAIN)
            applied.overwrite(at, new)
        elif kind < len(self.tables):
            self._apply_sparse(self.tables[kind], start + 1, end, at, applied, buffer, most)
        else:
            raise FormatError("A delta lacks the table of a block; refuse its source.")

    def _apply_dense(self, start: int, end: int, at: int, applied: Applied, buffer: Bytes) -> None:
        if start + 2 > end:
            raise FormatError("A delta's block is malformed; fetch it again or refuse its source.")
        classes = checked_classes(self.field, int(self.data[start]), int(self.data[start + 1]))
        layout = applied.layout
        view = _view(buffer, layout, at, 0)
        new = np.empty(view.hi - view.lo, view.words.dtype)
        changed = int(
            _kernels().read_dense(
                self.data, start + 2, end, view.words, new, view.lo, view.hi,
                layout.bits, *classes.arguments,
            )
        )  # fmt: skip
        if changed < 0:
            raise FormatError("A delta's block is malformed; fetch it again or refuse its source.")
        out = new.view(np.uint8)
        if layout.bits == 4:
            out = np.empty(new.size // 2, np.uint8)
            _kernels().pack(new, out, 0, new.size)
        applied.overwrite(at, out, changed)

    def _apply_sparse(
        self, table: Parameters, start: int, end: int, at: int, applied: Applied,
        buffer: Bytes, most: int,
    ) -> None:  # fmt: skip
        view = _view(buffer, applied.layout, at, 0)
        held = _scratch()
        room = max(0, min(most, view.hi - view.lo))
        places = np.empty(room, np.int64)
        _, ranks, changes = held.events
        found = int(
            _kernels().place_all(
                self.data, start, end, view.words, view.lo, view.hi,
                *table.classes(self.field).arguments, table.rows,
                held.bounds, ranks[:room], changes[:room], places, _chosen(),
            )
        )  # fmt: skip
        if found == _kernels().OTHER_BASE:
            raise IntegrityError(
                "A delta's changes do not fit the base: it is another version; rebuild from an "
                "anchor."
            )
        if found < 0:
            raise FormatError("A delta's block is malformed; fetch it again or refuse its source.")
        places = places[:found]
        if applied.layout.bits == 4:
            places += applied.layout.bounds(at)[0]
        applied.add(places, changes[:found].copy())


def whole_block(data: Bytes, layout: Layout, index: int, signed: bool) -> Bytes:
    """The new bytes of a block that needs no base."""
    span = layout.span(index)
    size = span.stop - span.start
    kind, body = int(data[0]), data[1:]
    if kind == PLANES:
        return decode_full(body.data, size, max(1, layout.bits // 8), signed=signed)
    if kind != RAW or body.size != size:
        raise FormatError("A delta's block has a wrong kind or size; fetch it again.")
    return body


def write_whole(new: Bytes, layout: Layout, index: int, signed: bool) -> bytes:
    """A block that needs no base: byte planes, or the words where those are not smaller."""
    part = new[layout.span(index)]
    planes = encode_full(part, max(1, layout.bits // 8), signed=signed)
    return bytes((PLANES,)) + planes if len(planes) < part.size else bytes((RAW,)) + part.tobytes()
