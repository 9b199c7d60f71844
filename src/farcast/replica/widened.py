"""`WidenedModule`: a live module that computes in float32 and serves bf16.

A bf16 value is the upper half of the float32 with the same value, so widening loses nothing and
the live weights still say which version they are: the lower half of every word must be zero, and
the upper half is the served bits. For CPUs without bf16 instructions, which compute several times
faster in float32, so the float32 tensors of a module on a device are read through the host.

Refuses a float32 tensor that holds anything but bf16 values.
"""

from collections.abc import Mapping
from typing import cast

import numpy as np

from farcast.delta import AnyBits, TensorBits, to_bits
from farcast.errors import TensorMismatchError
from farcast.replica.live import Place
from farcast.replica.torch_module import TorchModule
from farcast.replica.words import Positions, Words

_WIDE, _SERVED = "F32", "BF16"


class WidenedModule(TorchModule):
    """As `TorchModule`; its float32 tensors stand for bf16 ones of the same shape."""

    def read(self, name: str) -> AnyBits:
        bits = super().read(name)
        if bits.dtype != _WIDE:
            return bits
        bits = to_bits(bits)
        words = self._narrowed(name, cast(Words, bits.data.view(np.uint32)))
        return TensorBits(_SERVED, bits.shape, words.view(np.uint8))

    def place_of(self, name: str) -> AnyBits | None:
        return super().place_of(name) if self.holds(name) and not self._is_wide(name) else None

    def _places(self) -> Mapping[str, Place]:
        return {
            name: place._replace(dtype=_SERVED) if place.dtype == _WIDE else place
            for name, place in super()._places().items()
        }

    def _peek(self, name: str, positions: Positions | None) -> Words:
        words = super()._peek(name, positions)
        return self._narrowed(name, words) if self._is_wide(name) else words

    def _poke(self, name: str, positions: Positions | None, words: Words) -> None:
        if self._is_wide(name):
            words = words.astype(np.uint32) << np.uint32(16)
        super()._poke(name, positions, words)

    def _is_wide(self, name: str) -> bool:
        return self._slots[name].place.dtype == _WIDE

    def _narrowed(self, name: str, words: Words) -> Words:
        # One pass and no copy of the words: this runs inside the pause of a commit.
        if np.bitwise_or.reduce(words) & np.uint32(0xFFFF):
            raise TensorMismatchError(
                f"{name[:80]!r} holds float32 values that are no bf16 ones; round the module to "
                "bf16 before it is widened."
            )
        return np.ascontiguousarray(words.view("<u2")[1::2])
