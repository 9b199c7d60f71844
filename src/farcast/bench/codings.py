"""What the benchmark measures: one interface for farcast and for the codings it is compared with.

A coding turns a change into bytes and applies them in place. Decoders of other codings are told
names, dtypes and shapes for free, and carry no digests: both favour them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

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
    threads: int | None = None
    """How many threads it works on; None where it knows of none, and others divide the tensors."""
    own_threads = False
    """It starts threads itself, so that one core is not what its speed is for."""

    def on(self, threads: int) -> Self:
        """The same coding on so many threads."""
        other = copy(self)
        other.threads = threads
        return other

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
    threads: int = 1

    def __init__(self, change: Change) -> None:
        self._base = _entries(change.base)

    def encode(self, change: Change) -> Encoded:
        data = encode_bits(
            change.base, change.target, base_entries=self._base, threads=self.threads
        ).data
        return Encoded(data, len(data))

    def decode(self, encoded: Encoded, buffers: Buffers) -> None:
        patch = Patch.open(encoded.payload, threads=self.threads)
        patch.apply_all(buffers, verify=self.digests, threads=self.threads)


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
            change.base,
            change.target,
            base_entries=self._base,
            target_entries=self._target,
            threads=self.threads,
        ).data
        return Encoded(data, len(data))


def _entries(tensors: Mapping[str, TensorBits]) -> dict[str, TensorEntry]:
    return {name: entry_of(bits) for name, bits in tensors.items()}
