"""How few bits a change can take when each element is coded by itself. Pure.

    independent   positions cost N * H(n / N): every element changes with the same chance
    conditioned   positions cost the sum over contexts c of N_c * H(n_c / N_c), where the context
                  is what the receiver holds: the old word's exponent field for floats, the old
                  code for bytes and packed 4-bit codes, nothing for other integers

Both add the entropy of the new values given the same context, as differences of ordered
integers. Probabilities are those of the very data (pooled over the tensors of one dtype), so a
coder has to send them or learn them too: the bounds are a little low, and much too low where
changes are so few or so dense that most differences occur once.
"""

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from farcast.bench.data import Change
from farcast.bench.ordered import EXPONENTS, Integers, to_ordered
from farcast.delta import TensorBits, Words, words_of

Floats = npt.NDArray[np.float64]
Kind = tuple[str, bool]
"""dtype, and whether its words are pairs of 4-bit codes."""


class Bounds(NamedTuple):
    """Elements are counted one by one, two in a byte of packed codes. Bounds are bits in all."""

    elements: int
    changed: int
    independent: float
    conditioned: float


def bounds_of(change: Change) -> Bounds:
    """Of a delta; of an anchor, the entropy of exponents plus the raw bits beside them."""
    if change.is_anchor:
        return _anchor_bounds(change)
    pools: dict[Kind, _Pool] = defaultdict(_Pool)
    for name, new in change.target.items():
        kind = (new.dtype, is_packed(change, name))
        pools[kind].add(change.base[name], new, packed=kind[1])
    elements = sum(int(pool.seen.sum()) for pool in pools.values())
    changed = sum(int(pool.moved.sum()) for pool in pools.values())
    values = sum(pool.value_bits() for pool in pools.values())
    together = sum(pool.position_bits() for pool in pools.values())
    alone = float(elements * _binary_entropy(np.array([changed / max(1, elements)]))[0])
    return Bounds(elements, changed, alone + values, together + values)


def is_packed(change: Change, name: str) -> bool:
    return change.target[name].dtype == "F4" or name in change.packed


def codes_of(words: Words, *, packed: bool) -> Words:
    """Elements: the words themselves, or both halves of each byte, low half first."""
    if not packed:
        return words
    return np.stack((words & 15, words >> 4), axis=-1).reshape(-1)


def contexts_of(codes: Words, dtype: str) -> Integers:
    field = EXPONENTS.get(dtype)
    if field is not None:
        return (codes.astype(np.int64) >> field.shift) & field.mask
    return codes.astype(np.int64) if codes.itemsize == 1 else np.zeros(codes.size, np.int64)


class _Pool:
    """What the tensors of one dtype have in common."""

    def __init__(self) -> None:
        self.seen = np.zeros(1 << 11, np.int64)
        self.moved = np.zeros(1 << 11, np.int64)
        self._contexts: list[Integers] = []
        self._differences: list[Integers] = []

    def add(self, old: TensorBits, new: TensorBits, *, packed: bool) -> None:
        before, after = (codes_of(words_of(bits), packed=packed) for bits in (old, new))
        moved = np.flatnonzero(before != after)
        contexts = contexts_of(before, new.dtype)
        self.seen += np.bincount(contexts, minlength=self.seen.size)
        self.moved += np.bincount(contexts[moved], minlength=self.seen.size)
        self._contexts.append(contexts[moved])
        kind = "U8" if packed else new.dtype
        self._differences.append(to_ordered(after[moved], kind) - to_ordered(before[moved], kind))

    def position_bits(self) -> float:
        used = self.seen > 0
        seen = self.seen[used]
        return float((seen * _binary_entropy(self.moved[used] / seen)).sum())

    def value_bits(self) -> float:
        contexts, differences = map(np.concatenate, (self._contexts, self._differences))
        order = np.argsort(contexts, kind="stable")
        edges = np.flatnonzero(np.diff(contexts[order])) + 1
        parts = np.split(differences[order], edges)
        return sum(_entropy_bits(np.unique(part, return_counts=True)[1]) for part in parts)


def _anchor_bounds(change: Change) -> Bounds:
    bits, elements = 0.0, 0
    pools: dict[Kind, Integers] = {}
    for name, new in change.target.items():
        kind = (new.dtype, is_packed(change, name))
        codes = codes_of(words_of(new), packed=kind[1])
        counts = np.bincount(contexts_of(codes, new.dtype), minlength=1 << 11)
        pools[kind] = pools.get(kind, np.zeros(1 << 11, np.int64)) + counts
        field = EXPONENTS.get(new.dtype)
        beside = 8 * codes.itemsize - (field.mask.bit_length() if field else 0)
        if field is not None or codes.itemsize > 1:
            bits += codes.size * beside
        elements += codes.size
    bits += sum(_entropy_bits(counts[counts > 0]) for counts in pools.values())
    return Bounds(elements, elements, bits, bits)


def _binary_entropy(chance: Floats) -> Floats:
    """In bits; 0 at 0 and at 1."""
    inside = (chance > 0) & (chance < 1)
    p = np.where(inside, chance, 0.5)
    return np.where(inside, -(p * np.log2(p) + (1 - p) * np.log2(1 - p)), 0.0)


def _entropy_bits(counts: Integers) -> float:
    """Bits for all of the values whose counts are given (none is 0)."""
    total = counts.sum()
    return float(-(counts * np.log2(counts / total)).sum()) if total else 0.0
