"""What the benchmark measures: one interface for farcast and for the codings it is compared with.

A coding turns a change into bytes and applies them in place. Decoders of other codings are told
names, dtypes and shapes for free, and carry no digests: both favour them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from farcast.bench.data import Change
from farcast.delta import Patch, TensorBits, encode_bits, entry_of
from farcast.delta.bits import Bytes
from farcast.types import TensorEntry

Buffers = Mapping[str, Bytes]
"""The receiver's tensors: base bits before, target bits after."""


@dataclass(frozen=True)
class Encoded:
    """What one coding made of a change; `nbytes` is what would travel."""

    payload: Any
    nbytes: int


class Coding(ABC):
    """One way to code a change. `encode` and `decode` may run in several threads at once."""

    name: str
    origin: str
    """Where it is from: "own", "reimplemented from its published description", "package"."""
    digests = False
    """Whether the new bits are hashed by the writer and verified by the reader."""
    anchors = False
    """Whether it can code whole tensors without a base."""
    own_threads = False
    """It starts threads itself, so that one core is not what its speed is for."""

    @abstractmethod
    def encode(self, change: Change) -> Encoded: ...

    @abstractmethod
    def decode(self, encoded: Encoded, buffers: Buffers) -> None: ...


class Farcast(Coding):
    """`farcast.delta` as publisher and replica use it: the base's identities are known, tensors
    that changed are hashed, the reader verifies them."""

    name = "farcast"
    origin = "own"
    digests = True
    anchors = True

    def __init__(self, change: Change) -> None:
        self._base = _entries(change.base)

    def encode(self, change: Change) -> Encoded:
        data = encode_bits(change.base, change.target, base_entries=self._base).data
        return Encoded(data, len(data))

    def decode(self, encoded: Encoded, buffers: Buffers) -> None:
        patch = Patch.open(encoded.payload)
        for name in patch.entries:
            patch.apply_into(name, buffers[name], verify=self.digests)


class FarcastAlone(Farcast):
    """The same bytes with digests of the tensors at hand: what the coding itself costs. The
    digest over the patch is still made and verified."""

    name = "farcast, digests apart"
    digests = False

    def __init__(self, change: Change) -> None:
        super().__init__(change)
        self._target = _entries(change.target)

    def encode(self, change: Change) -> Encoded:
        data = encode_bits(
            change.base, change.target, base_entries=self._base, target_entries=self._target
        ).data
        return Encoded(data, len(data))


def _entries(tensors: Mapping[str, TensorBits]) -> dict[str, TensorEntry]:
    return {name: entry_of(bits) for name, bits in tensors.items()}
