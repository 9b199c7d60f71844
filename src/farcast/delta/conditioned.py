"""The change of one tensor, coded under the condition of what the reader holds. Pure.

A reader has the old words, so their class - the exponent field of a float - is free context: a
step of the optimiser crosses a rounding boundary with a chance that halves with each exponent.
Positions are therefore counted among the words of one class, which makes the gaps nearly
geometric, and Rice codes with one parameter a class come within a few per cent of the entropy.

    table   u8 first | u8 last | 3 bytes a class, `first` to `last`, low bits first: 5 bits each for
            gap, run of zero gaps (31 = none), run of ones, larger difference; 4 for the count
    block   for each class: Rice(number of changes), then for each change in order of position
            gap, difference, sign

Blocks hold `BLOCK_WORDS` words and decode alone. Nothing is written before every block of a
tensor has been read and every change has found its word.
"""

from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from farcast.delta.bits import Bytes, as_words, word_bytes
from farcast.errors import FormatError, IntegrityError

BLOCK_WORDS = 1 << 20
"""Words of a block: 2 MiB of bf16 stay in a core's cache, and the counts that open a block (about
16 bytes) are 1 % of what a block of a sparse update takes."""

MAX_CLASSES = 20
NO_RUNS = 31
"""The run parameter of a class whose zero gaps are coded like any other."""


Table = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]

_PLACES = (0, 5, 10, 15, 20)


class Field(NamedTuple):
    """Where a word keeps what its chance of changing depends on."""

    shift: int
    mask: int


PLAIN = Field(0, 0)
FIELDS = {
    "BF16": Field(7, 0xFF),
    "F16": Field(10, 0x1F),
    "F32": Field(23, 0xFF),
    "F8_E4M3": Field(3, 0xF),
    "F8_E4M3FNUZ": Field(3, 0xF),
    "F8_E5M2": Field(2, 0x1F),
    "F8_E5M2FNUZ": Field(2, 0x1F),
}
"""dtypes not named here have one class: their gaps count all words."""


@cache
def _kernels() -> ModuleType:
    from farcast.delta import kernels

    return kernels


@dataclass(frozen=True)
class Parameters:
    """One table: classes are `first` .. `last` of the field, what lies outside is clamped."""

    first: int
    last: int
    rows: Table

    @property
    def classes(self) -> int:
        return self.last - self.first + 1

    @property
    def nbytes(self) -> int:
        return 2 + 3 * len(self.rows)

    def pack(self) -> bytes:
        words = [sum(int(p) << s for p, s in zip(row, _PLACES, strict=True)) for row in self.rows]
        return bytes((self.first, self.last)) + b"".join(w.to_bytes(3, "little") for w in words)

    @classmethod
    def unpack(cls, data: bytes) -> "Parameters":
        if len(data) < 5 or data[0] > data[1] or len(data) != 2 + 3 * (data[1] - data[0] + 1):
            raise FormatError("A delta's table of parameters is malformed; refuse its source.")
        words = [int.from_bytes(data[i : i + 3], "little") for i in range(2, len(data), 3)]
        rows = np.array([[word >> s & 31 for s in _PLACES] for word in words], np.uint8)
        rows[:, 4] &= 15
        if (
            rows[:, 0].max() > 30
            or rows[:, [2, 3]].max() > 24
            or ((rows[:, 1] > 24) & (rows[:, 1] != 31)).any()
        ):
            raise FormatError("A delta's parameter is over its limit of 24; refuse its source.")
        return cls(data[0], data[1], rows)


@dataclass
class Scratch:
    """Arrays of one block, reused from tensor to tensor. One a thread."""

    classes: npt.NDArray[np.uint8]
    ranks: npt.NDArray[np.uint32]
    places: npt.NDArray[np.int64]

    @classmethod
    def of(cls, words: int) -> "Scratch":
        return cls(np.empty(words, np.uint8), np.empty(words, np.uint32), np.empty(words, np.int64))


class Block(NamedTuple):
    """Changes of one block, by class: gaps in the class, size of the difference, its sign."""

    bounds: npt.NDArray[np.int64]
    gap: npt.NDArray[np.int64]
    size: npt.NDArray[np.uint64]
    negative: npt.NDArray[np.uint8]

    @property
    def changed(self) -> int:
        return int(self.bounds[-1])


def field_of(dtype: str) -> Field:
    return FIELDS.get(dtype, PLAIN)


def _constant(data: Bytes, dtype: str) -> npt.NDArray[np.unsignedinteger]:
    """A read-only view, so that the kernels are compiled once and not once for each kind."""
    view = as_words(data, word_bytes(dtype)).view()
    view.flags.writeable = False
    return view


def class_range(dtype: str, samples: list[npt.NDArray[np.unsignedinteger]]) -> tuple[int, int]:
    """The classes worth telling apart: the `MAX_CLASSES` up to where a thousandth lies above."""
    field = field_of(dtype)
    if field == PLAIN:
        return 0, 0
    seen = np.zeros(256, np.int64)
    step = max(1, sum(words.size for words in samples) >> 14)
    for words in samples:
        picked = words[::step].astype(np.uint64)
        codes = (picked >> np.uint64(field.shift)) & np.uint64(field.mask)
        seen += np.bincount(codes.astype(np.int64), minlength=256)
    above = np.cumsum(seen[::-1])[::-1]
    over = np.flatnonzero(above * 1000 > above[0])
    last = int(over[-1]) if over.size else field.mask
    return max(0, last - MAX_CLASSES + 1), last


def find_changes(
    old: Bytes, new: Bytes, dtype: str, first: int, last: int, scratch: Scratch
) -> list[Block]:
    """The changed words of a tensor, block by block; `changed` is the sum of their bounds."""
    kernels = _kernels()
    field = field_of(dtype)
    a, b = _constant(old, dtype), _constant(new, dtype)
    args = (np.uint64(field.shift), np.uint8(field.mask), np.uint8(first), np.uint8(last - first))
    cut = int(kernels.sample(a, *args))
    blocks = []
    for lo in range(0, a.size, BLOCK_WORDS):
        hi = min(a.size, lo + BLOCK_WORDS)
        events = (scratch.classes, scratch.ranks, scratch.places)
        found = int(kernels.find(a, b, lo, hi, *args, cut, *events))
        block = Block(
            np.empty(257, np.int64),
            np.empty(found, np.int64),
            np.empty(found, np.uint64),
            np.empty(found, np.uint8),
        )
        kernels.arrange(a, b, found, *events, *block)
        blocks.append(block)
    return blocks


MAX_CHANGE_BYTES = 48
"""Four numbers of at most 94 bits and a sign."""

BUCKETS = 16 + 28 * 8
"""Up to 2^32; larger numbers share the last bucket, as no parameter suits them."""


@cache
def _cost_tables() -> tuple[Floats, Floats]:
    """Bits that a number of each bucket takes under each Rice and each Golomb parameter."""
    low = np.arange(16, dtype=np.float64)
    high = [(8 + i) * 2.0 ** (length - 3) for length in range(4, 32) for i in range(8)]
    middle = np.array(high) * (1 + 1 / 34)  # less than half of a bucket's width off
    values = np.concatenate([low, np.floor(middle)])[:, None]
    parameters = np.arange(31)
    rice = np.minimum(values // 2.0**parameters, 64) + 1 + parameters
    rice[:, 25:] = 1 << 30  # no parameter of a Rice code
    low_bits = parameters >> 1
    threes = values // 2.0**low_bits
    thirds = np.minimum(threes // 3, 64) + 2 + (threes % 3 > 0) + low_bits
    even = np.minimum(threes, 64) + 1 + low_bits
    return rice, np.where(parameters & 1, thirds, even)


class Statistics:
    """What each parameter would cost a tensor, class by class, to a part in sixteen.

    Whole numbers in float64, so the sums are exact and the same on every machine.
    """

    def __init__(self, blocks: list[Block], classes: int) -> None:
        seen = np.zeros((6, classes, BUCKETS))
        for block in blocks:
            _kernels().measure(classes, block.bounds, block.gap, block.size, seen)
        used = int(np.flatnonzero(seen.sum(axis=(0, 1))).max(initial=0)) + 1
        rice, golomb = (table[:used] for table in _cost_tables())
        seen = seen[:, :, :used]
        self.costs = np.stack([seen[i] @ (golomb if i in (0, 2) else rice) for i in range(6)])

    def best(self, first: int, last: int) -> Parameters:
        choice = self.costs.argmin(axis=2)
        least = self.costs.min(axis=2)
        runs = least[1] + least[2] < least[0]
        rows = np.empty((last - first + 1, 5), np.uint8)
        rows[:, 0] = np.where(runs, choice[2], choice[0])
        rows[:, 1] = np.where(runs, choice[1], NO_RUNS)
        rows[:, 2], rows[:, 3] = choice[3], choice[4]
        rows[:, 4] = np.minimum(choice[5], 15)
        return Parameters(first, last, rows)

    def bits(self, parameters: Parameters) -> int:
        """Bits of the blocks under a table, signs left out."""
        rows = parameters.rows.astype(np.int64)
        each = np.arange(len(rows))
        runs = rows[:, 1] != NO_RUNS
        gaps = np.where(
            runs,
            self.costs[1, each, np.minimum(rows[:, 1], 24)] + self.costs[2, each, rows[:, 0]],
            self.costs[0, each, rows[:, 0]],
        )
        sizes = self.costs[3, each, rows[:, 2]] + self.costs[4, each, rows[:, 3]]
        return int(gaps.sum() + sizes.sum() + self.costs[5, each, rows[:, 4]].sum())


def write_blocks(blocks: list[Block], parameters: Parameters, limit: int) -> bytes | None:
    """u32 length of each block but the last, then the blocks; None if over `limit` bytes."""
    at = 4 * (len(blocks) - 1)
    most = at + sum(MAX_CHANGE_BYTES * block.changed + 16 * parameters.classes for block in blocks)
    out = np.zeros(min(limit, most) + 96, np.uint8)
    if at > limit:
        return None
    lengths = out[:at].view("<u4")
    for index, block in enumerate(blocks):
        end = int(_kernels().write(parameters.classes, *block, parameters.rows, out, at))
        if end < 0 or end > limit:
            return None
        if index + 1 < len(blocks):
            lengths[index] = end - at
        at = end
    return out[:at].tobytes()


def read_blocks(
    data: Bytes, start: int, end: int, buffer: Bytes, dtype: str, changed: int, table: Parameters
) -> None:
    """Apply the blocks in `data[start:end]` to `buffer`, in place; 8 bytes follow them in `data`.

    Before the first write, `FormatError` when the bytes are malformed, `IntegrityError` when the
    buffer holds too few words of a class: it is another base.
    """
    kernels = _kernels()
    field = field_of(dtype)
    if end + 8 > data.size or table.first > table.last or table.last > field.mask:
        raise FormatError("A delta's table does not fit its tensor; refuse its source.")
    words, constant = as_words(buffer, word_bytes(dtype)), _constant(buffer, dtype)
    args = (
        np.uint64(field.shift),
        np.uint8(field.mask),
        np.uint8(table.first),
        np.uint8(table.last - table.first),
    )
    lengths, at = _lengths(data, start, end, words.size)
    cut = int(kernels.sample(constant, *args))
    ranks, places = np.empty(changed, np.uint32), np.empty(changed, np.int64)
    deltas, bounds = np.empty(changed, np.uint64), np.empty(257, np.int64)
    done = 0
    for index, length in enumerate(lengths):
        lo = index * BLOCK_WORDS
        hi = min(words.size, lo + BLOCK_WORDS)
        found = int(
            kernels.parse(
                data, at, at + length, hi - lo, table.classes, table.rows,
                done, bounds, ranks, deltas,
            )
        )  # fmt: skip
        if found < 0:
            raise FormatError("A delta's block is malformed; fetch it again or refuse its source.")
        if kernels.locate(constant, lo, hi, *args, cut, bounds, ranks, places) < 0:
            raise IntegrityError(
                "A delta's changes do not fit the base: it is another version; rebuild from an "
                "anchor."
            )
        at += length
        done += found
    if done != changed:
        raise FormatError("A delta has another number of changes than it says; fetch it again.")
    kernels.add(words, places, deltas, words.itemsize * 8)


def _lengths(data: Bytes, start: int, end: int, words: int) -> tuple[list[int], int]:
    blocks = -(-words // BLOCK_WORDS)
    first = start + 4 * (blocks - 1)
    if not blocks or first > end:
        raise FormatError("A delta ends inside its table of blocks; fetch it again.")
    lengths: list[int] = data[start:first].copy().view("<u4").tolist()
    last = end - first - sum(lengths)
    if last < 0:
        raise FormatError("A delta's blocks do not fill their tensor; fetch it again.")
    return [*lengths, last], first
