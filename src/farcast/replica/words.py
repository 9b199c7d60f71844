"""A tensor's bits as unsigned integers, so that equal words mean equal bits."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from farcast.delta import TensorBits, word_bytes

Words: TypeAlias = npt.NDArray[np.unsignedinteger]
Positions: TypeAlias = npt.NDArray[np.intp]

_BY_SIZE: dict[int, type[np.unsignedinteger]] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
}


def words_of(bits: TensorBits) -> Words:
    """A view of the bits: one word an element, two for C128, one for each two packed F4 codes."""
    return bits.data.view(_BY_SIZE[word_bytes(bits.dtype)])
