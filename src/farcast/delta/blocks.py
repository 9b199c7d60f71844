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
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from farcast.delta.bits import Bytes, Words, as_words
from farcast.delta.coding import decode_full, encode_full
from farcast.delta.conditioned import Classes, Field, Parameters, Table, checked_classes
from farcast.delta.container import MAX_BLOCK_WORDS, MAX_TABLES
from farcast.errors import FormatError, IntegrityError

BLOCK_WORDS = MAX_BLOCK_WORDS
"""Words of a block, where the writer was not asked for smaller ones."""

SAME, PLANES, RAW, DENSE = 252, 253, 254, 255
FITTED_CHANGES = 1 << 14
"""Changes that a common table is fitted to, of blocks taken at equal distances: all of half a
million give files within 0.05 % of these, some larger, in thirty times as long."""

WEIGHED_TABLES = 8
"""The newest tables that a writer weighs for a block: neighbours resemble each other most."""

MAX_CHANGE_BYTES = 48
"""Four numbers of at most 94 bits and a sign."""

SPARE = 104
"""Bytes that the kernels may run past what they are asked for."""

ANOTHER_BASE = (
    "A delta's changes do not fit the base: it is another version; rebuild from an anchor."
)

Ranks: TypeAlias = npt.NDArray[np.uint32]
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


def words_in(part: Bytes, bits: int, room: int = 0) -> Words:
    """The words of a block, each in a word of its own: a view, or codes unpacked into one of the
    thread's two rooms, where they stay until it is used again."""
    if bits != 4:
        return _constant(part, bits)
    codes = _scratch().codes[room][: 2 * part.size]
    _kernels().unpack(part, codes)
    return _constant(codes, 8)


class Survey(NamedTuple):
    """What changed in one block, by class, and the parameters that suit it best."""

    bounds: npt.NDArray[np.int64]
    gap: npt.NDArray[np.uint32]
    size: npt.NDArray[np.uint64]
    own: Table

    changed: int
    dense: bool = False
    """So much changed that the events were not kept."""


def survey(old: Bytes, new: Bytes, bits: int, classes: Classes) -> Survey:
    """Find the changes of one block, given its bytes."""
    held = _scratch()
    before, after = words_in(old, bits, 0), words_in(new, bits, 1)
    own = np.zeros((classes.number, 5), np.uint8)
    found = int(
        _kernels().survey(
            before, after, bits, *classes.arguments,
            *held.events, held.bounds, held.gap, held.size, own,
        )
    )  # fmt: skip
    if found <= 0:
        return Survey(_EMPTY_BOUNDS, held.gap[:0], held.size[:0], own, -found, found < 0)
    gap, size = held.gap[:found].copy(), held.size[:found].copy()
    return Survey(held.bounds.copy(), gap, size, own, found)


def arranged(
    event_class: npt.NDArray[np.uint8], ranks: Ranks, changes: Changes, bits: int, classes: Classes
) -> Survey:
    """The survey of a block whose changes were found elsewhere, in ascending position."""
    bounds, own = np.zeros(257, np.int64), np.zeros((classes.number, 5), np.uint8)
    gap, size = np.empty(ranks.size, np.uint32), np.empty(ranks.size, np.uint64)
    if ranks.size:
        kernels = _kernels()
        kernels.arrange(ranks.size, event_class, ranks, changes, bits, bounds, gap, size)
        kernels.fit(classes.number, bounds, gap, size, own)
    return Survey(bounds, gap, size, own, ranks.size)


def dense_survey(changed: int, classes: Classes) -> Survey:
    """The survey of a block of which only the number of changes was kept."""
    none = np.empty(0, np.uint64)
    own = np.zeros((classes.number, 5), np.uint8)
    return Survey(_EMPTY_BOUNDS, none.astype(np.uint32), none, own, changed, changed > 0)


def dense_from() -> int:
    """A block of which more than one word in so many changed is dense."""
    return int(_kernels().DENSE_FROM)


_EMPTY_BOUNDS = np.zeros(257, np.int64)


def block_cost(found: Survey) -> int:
    """Bits of a block with its own parameters, about."""
    if found.dense:
        return 8 * found.changed
    return _costs(found, [found.own])[0] + found.changed


def _costs(found: Survey, tables: list[Table]) -> list[int]:
    """Bits of a block under each of several tables of the same classes, signs left out."""
    costs = np.empty(len(tables), np.int64)
    _kernels().costs_of(*found[:3], np.array(tables), costs)
    counted: list[int] = costs.tolist()
    return counted


_NO_ROWS = np.empty((0, 5), np.uint8)


class Tables:
    """The tables of a container in the making. What a new one saves depends on those before it,
    so blocks are offered in order."""

    def __init__(self) -> None:
        self._kept: list[tuple[Classes, Parameters]] = []

    def packed(self) -> tuple[bytes, ...]:
        return tuple(parameters.pack() for _, parameters in self._kept)

    def rows(self, index: int) -> Table:
        """Parameters of a table; none of `DENSE`."""
        return _NO_ROWS if index == DENSE else self._kept[index][1].rows

    def add_common(self, blocks: list[Survey], classes: Classes) -> None:
        """A table that suits several blocks together."""
        most = -(-sum(found.changed for found in blocks) // FITTED_CHANGES)
        step = min(most, len(blocks))
        blocks = blocks[step // 2 :: step]
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
        """The table for a block: one of the newest, or its own if that saves more than it takes;
        `DENSE` for a block that needs none, or when there are too many."""
        if found.dense:
            return DENSE
        likely = [i for i, (kind, _) in enumerate(self._kept) if kind == classes][-WEIGHED_TABLES:]
        own = Parameters(classes.first, classes.last, found.own)
        if likely:
            *costs, least = _costs(found, [*map(self.rows, likely), found.own])
            cost, best = min(zip(costs, likely, strict=True))
            if cost - least <= 8 * own.nbytes or len(self._kept) == MAX_TABLES:
                return best
        if len(self._kept) == MAX_TABLES:
            return DENSE
        self._kept.append((classes, own))
        return len(self._kept) - 1


def write_sparse(found: Survey, table: int, rows: Table, size: int) -> bytes | None:
    """One block of `size` bytes by its changes; None where it is dense, or would grow."""
    if table >= MAX_TABLES:
        return None
    most = min(size, MAX_CHANGE_BYTES * found.changed + 64 * len(rows))
    room = _scratch().room(most + SPARE)
    room[0] = table
    end = int(_kernels().write(len(rows), *found[:3], rows, room, 1))
    return room[:end].tobytes() if 0 < end <= size else None


def write_block(
    found: Survey, table: int, rows: Table, old: Bytes, new: Bytes, bits: int, classes: Classes
) -> bytes:
    """One block, given its bytes; never over a byte larger than they are."""
    sparse = write_sparse(found, table, rows, new.size)
    if sparse is not None:
        return sparse
    dense = _write_dense(old, new, bits, classes)
    return dense if dense is not None else bytes((RAW,)) + new.tobytes()


def _write_dense(old: Bytes, new: Bytes, bits: int, classes: Classes) -> bytes | None:
    before, after = words_in(old, bits, 0), words_in(new, bits, 1)
    held = _scratch()
    room = held.room(new.size + SPARE)
    room[:3] = DENSE, classes.first, classes.last
    end = int(
        _kernels().write_dense(before, after, bits, *classes.arguments, held.events[0], room, 3)
    )
    return room[:end].tobytes() if 0 < end <= new.size else None


def write_whole(part: Bytes, width: int, signed: bool) -> bytes:
    """A block that needs no base: byte planes, or the words where those are not smaller."""
    planes = encode_full(part, width, signed=signed)
    return bytes((PLANES,)) + planes if len(planes) < part.size else bytes((RAW,)) + part.tobytes()


def read_whole(block: Bytes, size: int, width: int, signed: bool) -> Bytes:
    """The `size` new bytes of a block that needs no base."""
    kind, body = int(block[0]), block[1:]
    if kind == PLANES:
        return decode_full(body.data, size, width, signed=signed)
    if kind != RAW or body.size != size:
        raise FormatError("A delta's block has a wrong kind or size; fetch it again.")
    return body


class Events(NamedTuple):
    """The changes of a sparse block as they are read: `bounds[k]:bounds[k + 1]` are those of class
    k. Views of the thread's scratch: valid until the next block."""

    bounds: npt.NDArray[np.int64]
    ranks: Ranks
    changes: Changes


def read_events(
    data: Bytes, start: int, end: int, words: int, table: Parameters, most: int
) -> Events:
    """Read the body `data[start:end]` of a sparse block of `words` with at most `most` changes;
    at least 8 bytes follow it in `data`."""
    held = _scratch()
    _, ranks, changes = held.events
    room = max(0, min(most, words))
    ranks, changes = ranks[:room], changes[:room]
    found = int(
        _kernels().parse(
            data, start, end, words, len(table.rows), table.rows, held.bounds, ranks, changes
        )
    )
    if found < 0:
        raise FormatError("A delta's block is malformed; fetch it again or refuse its source.")
    return Events(held.bounds, ranks[:found], changes[:found])


def place(events: Events, old: Bytes, bits: int, classes: Classes) -> Places:
    """Which words of a block, whose old bytes are given, the events change."""
    words = words_in(old, bits)
    places = np.empty(events.ranks.size, np.int64)
    found = _kernels().place(
        words, *classes.arguments, events.bounds, events.ranks, _chosen(), places
    )
    if found < 0:
        raise IntegrityError(ANOTHER_BASE)
    return places


def read_dense(
    data: Bytes, start: int, end: int, old: Bytes, bits: int, field: Field
) -> tuple[Bytes, int]:
    """The new bytes of a dense block whose old bytes are given, and how many words changed."""
    if start + 2 > end:
        raise FormatError("A delta's block is malformed; fetch it again or refuse its source.")
    classes = checked_classes(field, int(data[start]), int(data[start + 1]))
    words = words_in(old, bits)
    new = np.empty(words.size, words.dtype)
    changed = int(_kernels().read_dense(data, start + 2, end, words, new, bits, *classes.arguments))
    if changed < 0:
        raise FormatError("A delta's block is malformed; fetch it again or refuse its source.")
    if bits != 4:
        return new.view(np.uint8), changed
    packed = np.empty(old.size, np.uint8)
    _kernels().pack(new, packed)
    return packed, changed


def add(part: Bytes, bits: int, places: Places, changes: Changes) -> None:
    """`move` forward, at the places that `place` found."""
    if bits == 4:
        move(part, bits, places, changes)
    else:
        _kernels().add(as_words(part, bits // 8), places, changes)


def move(part: Bytes, bits: int, places: Places, changes: Changes, *, back: bool = False) -> None:
    """Add the changes to words of a block, or take them back."""
    if bits == 4:
        _kernels().add_codes(part, places, changes, -1 if back else 1)
        return
    words = as_words(part, bits // 8)
    steps = changes.astype(words.dtype)
    words[places] += (~steps + steps.dtype.type(1)) if back else steps


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
