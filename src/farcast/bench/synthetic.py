"""Changes of any density on real weights, by the rule that makes real ones sparse. Pure.

Each served bf16 word stands for a master weight somewhere in its rounding cell. One step, of the
same size for all give or take a half, moves every master up or down, and those that cross a
rounding boundary change. So the chance is |step| / ulp(w), as after a step of Adam; the step's size
is searched for the density. At 100 % words that even a large step leaves alone are moved to their
neighbour.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from farcast.bench.data import Change
from farcast.bench.derived import Floats, floats_of, to_bf16
from farcast.delta import TensorBits, words_of
from farcast.errors import ConfigError

SAMPLE = 1 << 21
"""Words the step's size is searched on. Below a density of 1e-5 they hold too few changes."""

SEARCHES = 40

MOST = 0.99
"""The density a step is searched for at most: the last per cent are the largest weights, and a
step that moved them too would leave nothing of the others."""


class _Masters(NamedTuple):
    """Served words, where their masters lie, and each one's step in units of the common size."""

    words: npt.NDArray[np.uint16]
    masters: Floats
    steps: Floats

    def moved(self, step: float) -> npt.NDArray[np.uint16]:
        return to_bf16(self.masters + self.steps * np.float32(step))


def has_bf16(base: Mapping[str, TensorBits]) -> bool:
    """Whether there is a word that `synthetic` could change."""
    return any(bits.dtype == "BF16" and bits.nbytes for bits in base.values())


def synthetic(base: Mapping[str, TensorBits], density: float, *, seed: int = 1) -> Change:
    """A change of `density` (0 .. 1) of the bf16 words of `base`; other tensors stay."""
    if not has_bf16(base):
        raise ConfigError("Changes are made of BF16 weights, and there are none; use others.")
    step = _step_for(base, min(density, MOST), seed)
    target = {
        name: bits if bits.dtype != "BF16" else _moved(name, bits, step, seed, density >= 1)
        for name, bits in base.items()
    }
    return Change(data="synthetic", hop=f"{100 * density:g} %", base=base, target=target)


def masters_of(name: str, bits: TensorBits, seed: int) -> Floats:
    """Where the masters behind served bf16 words may lie: flat, one for each word."""
    return _masters(bits, _generator(name, seed)).masters


def _moved(name: str, bits: TensorBits, step: float, seed: int, everywhere: bool) -> TensorBits:
    held = _masters(bits, _generator(name, seed))
    words = held.moved(step)
    if everywhere:
        words = np.where(words == held.words, words ^ 1, words)
    return TensorBits(bits.dtype, bits.shape, words.astype("<u2").view(np.uint8))


def _masters(bits: TensorBits, random: np.random.Generator) -> _Masters:
    words = words_of(bits)
    numbers = floats_of(bits)
    if numbers is None:
        raise ValueError(f"{bits.dtype} has no masters")
    exponent = np.maximum((words >> 7) & 0xFF, 1).astype(np.int32)
    ulp = np.ldexp(np.float32(1), exponent - 127 - 7).astype(np.float32)
    place = random.random(words.size, np.float32) - np.float32(0.5)
    # Below a power of two the cell is half as wide: stay inside it.
    place = np.where((words & 0x7F) == 0, np.abs(place), place) * np.float32(0.998)
    steps = random.random(words.size, np.float32) + np.float32(0.5)
    steps *= random.integers(0, 2, words.size, dtype=np.int8) * np.float32(2) - np.float32(1)
    flat = numbers.reshape(-1)
    return _Masters(words, flat + np.copysign(ulp, flat) * place, steps)


def _step_for(base: Mapping[str, TensorBits], density: float, seed: int) -> float:
    """The step's size, by bisection of its logarithm on a sample of the words."""
    words = np.concatenate([words_of(b) for b in base.values() if b.dtype == "BF16"])
    sample = np.ascontiguousarray(words[:: max(1, words.size // SAMPLE)])
    bits = TensorBits("BF16", (sample.size,), sample.view(np.uint8))
    held = _masters(bits, _generator("", seed))
    low, high = -120.0, 0.0
    for _ in range(SEARCHES):
        middle = (low + high) / 2
        reached = np.mean(held.moved(2.0**middle) != sample) >= density
        low, high = (low, middle) if reached else (middle, high)
    return float(2.0**high)


def _generator(name: str, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, *name.encode()])
