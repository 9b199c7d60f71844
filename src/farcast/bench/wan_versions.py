"""What travels in `farcast bench wan`: changes of a real model, and a long chain of small ones.

Recorded hops are taken as they are. Without a recording the changes are made by the rule of
`synthetic` on SmolLM2-135M, at the density that was recorded from it.

The chain is AdamW simulated on masters behind real weights: gradients are noise around a constant
direction `SIGNAL` times as large, so a weight near a rounding boundary goes back and forth, as
recorded ones do. Of recorded GRPO hops of SmolLM2-135M (AdamW, 1e-6, steps 28 to 34) one delta
over 2 steps takes 0.84, over 6 steps 0.62 and over the first 28 steps 0.41 of the bytes of the
single ones; the simulation gives 0.83, 0.62 and 0.38.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

import numpy as np

from farcast.bench.data import Change, Recording
from farcast.bench.derived import Floats, to_bf16
from farcast.bench.synthetic import masters_of, synthetic
from farcast.bench.wan_ways import DENSITY
from farcast.delta import TensorBits
from farcast.errors import ConfigError
from farcast.replica.shards import plan_shard, read_shard
from farcast.types import TensorEntry

SIGNAL = 0.3
LEARNING_RATE = 1e-6
BETAS = (0.9, 0.99)
WARM_STEPS = 28
"""Steps before the chain begins: the first ones of Adam are all of full size."""

Tensors = Mapping[str, TensorBits]


def read_weights(path: Path) -> dict[str, TensorBits]:
    """All tensors of a safetensors file."""
    shard = read_shard(path)
    return {name: shard.read(name) for name in sorted(shard.spans)}


def write_weights(path: Path, tensors: Tensors) -> None:
    """A safetensors file that `read_weights` reads."""
    entries = {name: TensorEntry(b.dtype, b.shape, "0" * 64) for name, b in tensors.items()}
    header, spans = plan_shard(entries, {})
    with path.open("wb") as file:
        file.write(header)
        for name in sorted(spans, key=lambda name: spans[name].start):
            tensors[name].data.tofile(file)


def recorded(folder: Path, most: int) -> Iterator[Change]:
    """The first `most` hops of the recording's last run."""
    recording = Recording(folder)
    yield from islice(recording.walk(recording.runs[-1]), most)


def made(base: Tensors, most: int, *, density: float = DENSITY) -> Iterator[Change]:
    """`most` synthetic changes, each from where the last one led."""
    held = base
    for number in range(most):
        change = synthetic(held, density, seed=number + 1)
        yield Change(
            data="synthetic", hop=f"{number}-{number + 1}", base=held, target=change.target
        )
        held = change.target


def cut(base: Tensors, elements: int) -> dict[str, TensorBits]:
    """Whole bf16 matrices of `base`, those of the layers first, of about so many elements."""
    chosen: dict[str, TensorBits] = {}
    held = 0
    for name in sorted(base, key=lambda name: ("layers" not in name, name)):
        size = base[name].data.nbytes // 2
        if base[name].dtype != "BF16" or held + size > elements:
            continue
        chosen[name] = base[name]
        held += size
    if not chosen:
        raise ConfigError("The recording has no small bf16 tensors; record a run served in bf16.")
    return chosen


class Drift:
    """A model under simulated AdamW; `tensors` are the served bits now."""

    def __init__(self, base: Tensors, *, seed: int = 1) -> None:
        self._random = np.random.default_rng(seed)
        self._shapes = {name: bits.shape for name, bits in base.items()}
        self._masters = {name: masters_of(name, bits, seed) for name, bits in base.items()}
        self._signals = {
            name: SIGNAL * self._random.standard_normal(m.size, np.float32)
            for name, m in self._masters.items()
        }
        self._means = {name: np.zeros_like(m) for name, m in self._masters.items()}
        self._squares = {name: np.zeros_like(m) for name, m in self._masters.items()}
        self._steps = 0
        for _ in range(WARM_STEPS):
            self.step()

    @property
    def tensors(self) -> dict[str, TensorBits]:
        return {
            name: TensorBits("BF16", shape, to_bf16(self._masters[name]).view(np.uint8))
            for name, shape in self._shapes.items()
        }

    def step(self) -> None:
        """One optimizer step."""
        self._steps += 1
        first, second = (1 - beta**self._steps for beta in BETAS)
        rate = np.float32(LEARNING_RATE / first * second**0.5)
        for name, masters in self._masters.items():
            gradient: Floats = self._random.standard_normal(masters.size, np.float32)
            gradient += self._signals[name]
            mean, square = self._means[name], self._squares[name]
            mean += np.float32(1 - BETAS[0]) * (gradient - mean)
            square += np.float32(1 - BETAS[1]) * (gradient * gradient - square)
            masters -= rate * mean / np.sqrt(square)
