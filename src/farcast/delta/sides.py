"""One side of a change: a tensor of the base or of the target, wherever its bits are. Pure."""

from typing import Protocol, Self

import numpy as np

from farcast.delta.bits import Bytes, TensorBits, Words, as_words, word_bytes
from farcast.delta.blocks import Layout, Survey, survey
from farcast.delta.conditioned import Classes
from farcast.delta.identity import entry_of
from farcast.types import TensorEntry


class Side(Protocol):
    """What a writer asks of a tensor."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    def part(self, span: slice) -> Bytes:
        """Some of its bytes, on the host."""
        ...

    def sample(self, step: int) -> Words:
        """Every `step`-th word."""
        ...

    def entry(self) -> TensorEntry: ...

    def survey(self, old: Self, layout: Layout, index: int, classes: Classes) -> Survey:
        """How block `index` differs from that of `old`. Asked for once a block, in any order."""
        ...

    def moved(self, old: Self) -> int:
        """Words that differ from those of `old`."""
        ...


class HostSide:
    """Bits in host memory."""

    def __init__(self, bits: TensorBits) -> None:
        self.bits = bits
        self.dtype, self.shape, self.nbytes = bits.dtype, bits.shape, bits.data.size

    def part(self, span: slice) -> Bytes:
        return self.bits.data[span]

    def sample(self, step: int) -> Words:
        return self._words[::step]

    def entry(self) -> TensorEntry:
        return entry_of(self.bits)

    def survey(self, old: Self, layout: Layout, index: int, classes: Classes) -> Survey:
        span = layout.span(index)
        return survey(old.part(span), self.part(span), layout.bits, classes)

    def moved(self, old: Self) -> int:
        return int(np.count_nonzero(self._words != old._words))

    @property
    def _words(self) -> Words:
        return as_words(self.bits.data, word_bytes(self.dtype))
