"""Tensors that turned to nothing but NaN and infinity: a run that publishes them is lost.

One NaN among other values is legal, and so is a tensor that was so from the start (a mask of
-inf); the sign of a ruined step is a whole tensor that had finite values in the last version.
Refuses to look further than the first finite element, so healthy tensors cost nothing.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from farcast.delta import AnyBits
from farcast.delta.bits import Bytes
from farcast.errors import PoisonError

MIN_ELEMENTS = 2
"""A scalar that is NaN is a single NaN element."""

_BLOCK = 1 << 16


class _Exponent(NamedTuple):
    """An element is NaN or infinite when all bits of `mask` are set in one of its `words`."""

    word: type[np.unsignedinteger[Any]]
    mask: int
    words: int = 1

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return np.dtype(self.word).itemsize * self.words

    def without_finite(self, part: Bytes) -> bool:
        mask = self.word(self.mask)
        elements = part.view(self.word).reshape(-1, self.words)
        return bool(((elements & mask) == mask).any(axis=1).all())


_EXPONENTS = {
    "F64": _Exponent(np.uint64, 0x7FF0_0000_0000_0000),
    "C128": _Exponent(np.uint64, 0x7FF0_0000_0000_0000, words=2),
    "F32": _Exponent(np.uint32, 0x7F80_0000),
    "C64": _Exponent(np.uint32, 0x7F80_0000, words=2),
    "F16": _Exponent(np.uint16, 0x7C00),
    "BF16": _Exponent(np.uint16, 0x7F80),
    "F8_E5M2": _Exponent(np.uint8, 0x7C),
    "F8_E4M3": _Exponent(np.uint8, 0x7F),
    "F8_E8M0": _Exponent(np.uint8, 0xFF),
}


def check_poison(base: Mapping[str, AnyBits], target: Mapping[str, AnyBits]) -> None:
    """Raise `PoisonError` for tensors of `target` that lost every finite value since `base`."""
    poisoned = [
        name
        for name, bits in target.items()
        if name in base and is_poison(bits) and not is_poison(base[name])
    ]
    if poisoned:
        more = f" and {len(poisoned) - 3} more" if len(poisoned) > 3 else ""
        raise PoisonError(
            f"Every value of {', '.join(map(repr, poisoned[:3]))}{more} turned NaN or infinite; "
            "go back to a checkpoint, or publish with allow_poison=True if it is meant."
        )


def is_poison(bits: AnyBits) -> bool:
    """Whether a floating tensor of at least two elements holds no finite value."""
    exponent = _EXPONENTS.get(bits.dtype)
    if exponent is None:
        return False
    count = bits.nbytes // exponent.width
    if count < MIN_ELEMENTS:
        return False
    ends = [0, 1, *range(_BLOCK, count, _BLOCK), count]
    spans = (slice(lo * exponent.width, hi * exponent.width) for lo, hi in pairwise(ends))
    return all(exponent.without_finite(bits.part(span)) for span in spans)
