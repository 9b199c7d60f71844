"""What the change of a word depends on, and the parameters that are fitted to it. Pure.

A reader has the old words, so their class - the exponent field of a float, a packed 4-bit code
itself - is free context: a step of the optimiser crosses a rounding boundary with a chance that
halves with each exponent. Positions are therefore counted among the words of one class, which
makes the gaps nearly geometric, and Golomb codes with one parameter a class come within a few per
cent of the entropy.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from farcast.delta.bits import Words
from farcast.errors import FormatError

USED_CLASSES = 20
"""A writer tells this many classes apart: below a millionth of the largest exponents' step lies
one word in ten thousand."""

MAX_CLASSES = 32
NO_RUNS = 31
"""The parameter of a class whose zero gaps, or differences of one, are coded like any other."""

MAX_GOLOMB = 30
"""A step of 2^15, for gaps of ten changes in a block of a million words: 24 ones and the 17 bits
after them fit the 57 bits that one unaligned load always gives."""

Table = npt.NDArray[np.uint8]

_PLACES = (0, 5, 10, 15, 20)


class Field(NamedTuple):
    """Where a word keeps what its chance of changing depends on."""

    shift: int
    mask: int


PLAIN = Field(0, 0)
CODES = Field(0, 0xF)
"""Of packed 4-bit words: the code is its own class."""

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


class Classes(NamedTuple):
    """class = clamp(((word >> shift) & mask) - first, 0, last - first)."""

    field: Field
    first: int
    last: int

    @property
    def number(self) -> int:
        return self.last - self.first + 1

    @property
    def arguments(self) -> tuple[np.uint64, np.uint8, np.uint8, np.uint8]:
        """shift, mask, first, last class, as the kernels take them."""
        field = self.field
        return (
            np.uint64(field.shift),
            np.uint8(field.mask),
            np.uint8(self.first),
            np.uint8(self.last - self.first),
        )


@dataclass(frozen=True)
class Parameters:
    """One table: of each class from `first` to `last`, what lies outside is clamped, the
    parameters of gaps, runs of zero gaps, distances of larger differences, larger differences
    and the number of changes."""

    first: int
    last: int
    rows: Table

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
        if data[1] - data[0] >= MAX_CLASSES:
            raise FormatError("A delta's table has over 32 classes; refuse its source.")
        words = [int.from_bytes(data[i : i + 3], "little") for i in range(2, len(data), 3)]
        rows = np.array([[word >> s & 31 for s in _PLACES] for word in words], np.uint8)
        if rows[:, [0, 3]].max() > MAX_GOLOMB or rows[:, 4].max() > 15:
            raise FormatError("A delta's parameter is over its limit; refuse its source.")
        return cls(data[0], data[1], rows)

    def classes(self, field: Field) -> Classes:
        return checked_classes(field, self.first, self.last)


def checked_classes(field: Field, first: int, last: int) -> Classes:
    """Classes that a delta names for words of `field`."""
    if not first <= last <= field.mask or last - first >= MAX_CLASSES:
        raise FormatError("A delta's classes do not fit its tensor; refuse its source.")
    return Classes(field, first, last)


def field_of(dtype: str) -> Field:
    return FIELDS.get(dtype, PLAIN)


def classes_of(field: Field, samples: list[Words]) -> Classes:
    """The classes worth telling apart: the `USED_CLASSES` up to where a fiftieth lies above.

    `samples` are words of the base."""
    if field == PLAIN:
        return Classes(field, 0, 0)
    words = np.concatenate(samples) if samples else np.empty(0, np.uint8)
    codes = (words.astype(np.uint64) >> np.uint64(field.shift)) & np.uint64(field.mask)
    seen = np.bincount(codes.astype(np.int64), minlength=256)
    above = np.cumsum(seen[::-1])[::-1]
    over = np.flatnonzero(above * 50 > above[0])
    last = int(over[-1]) if over.size else field.mask
    return Classes(field, max(0, last - USED_CLASSES + 1), last)
