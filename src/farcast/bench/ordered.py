"""Words as integers in the order of the numbers they stand for. Pure.

A float's bits are sign and magnitude; here a set sign gives the complement of the magnitude, so
that neighbours differ by one and -0.0 stays apart from 0.0. Other dtypes are taken as they are.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from farcast.delta import Words, word_bytes

Integers = npt.NDArray[np.int64]


class FloatField(NamedTuple):
    """Where a float keeps its exponent."""

    shift: int
    mask: int


EXPONENTS = {
    "BF16": FloatField(7, 0xFF),
    "F16": FloatField(10, 0x1F),
    "F32": FloatField(23, 0xFF),
    "F64": FloatField(52, 0x7FF),
    "F8_E4M3": FloatField(3, 0xF),
    "F8_E5M2": FloatField(2, 0x1F),
}


def to_ordered(words: Words, dtype: str) -> Integers:
    """Arithmetic on the result is modulo 2^64, so that it can be undone for every dtype."""
    integers: Integers = words.astype(np.uint64).view(np.int64)
    if dtype not in EXPONENTS:
        return integers
    sign = _sign(dtype)
    if sign == 1 << 63:
        return np.where(integers < 0, ~(integers & np.int64(sign - 1)), integers)
    return np.where(integers & sign, ~(integers & (sign - 1)), integers)


def from_ordered(integers: Integers, dtype: str) -> Words:
    """The words behind `to_ordered`."""
    width = word_bytes(dtype)
    if dtype in EXPONENTS:
        magnitude = np.where(integers < 0, ~integers, integers).view(np.uint64)
        words = np.where(integers < 0, magnitude | np.uint64(_sign(dtype)), magnitude)
        return words.astype(f"<u{width}")
    return integers.view(np.uint64).astype(f"<u{width}")


def _sign(dtype: str) -> int:
    return 1 << (8 * word_bytes(dtype) - 1)
