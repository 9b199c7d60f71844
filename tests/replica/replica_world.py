"""What tests of replicas share: a run with a publisher, and targets of every kind."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from farcast.publish import Publisher
from farcast.replica import CheckpointDirectory, MemoryTarget, Subscriber, Target, TorchModule
from farcast.store import MemoryStore
from farcast.store.testing import FaultStore
from farcast.types import VersionRef
from version_world import RUN, Tensors, plain

Bits = dict[str, tuple[str, tuple[int, ...], bytes]]

SHAPES: Mapping[str, tuple[type, tuple[int, ...]]] = {
    "embed.weight": (np.uint16, (50, 8)),
    "layer.weight": (np.float32, (16, 16)),
    "layer.bias": (np.float32, (16,)),
    "scale": (np.float32, ()),
    "table": (np.int64, (5,)),
}


def weights(version: int, *, seed: int = 3) -> Tensors:
    """Tensors of the shapes above; a few elements of most of them change with each version."""
    rng = np.random.default_rng(seed)
    made: Tensors = {}
    for name, (dtype, shape) in SHAPES.items():
        made[name] = np.array(rng.integers(1, 1 << 15, shape)).astype(dtype)
    for step in range(1, version + 1):
        for name in ("embed.weight", "layer.weight", "scale"):
            flat = made[name].reshape(-1)
            flat[(step * 7) % flat.size] += 1
            flat[(step * 11) % flat.size] += 3
    return made


@dataclass
class World:
    """A store with one run in it; `refs[v]` is version v."""

    store: FaultStore = field(default_factory=lambda: FaultStore(MemoryStore()))
    anchor_every: int = 20
    refs: list[VersionRef] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.publisher = Publisher(self.store, RUN, anchor_every=self.anchor_every)

    def publish(self, tensors: Mapping[str, Any] | None = None) -> VersionRef:
        """The next version: `tensors`, or `weights` of its number."""
        number = len(self.refs)
        made = weights(number) if tensors is None else tensors
        self.refs.append(self.publisher.publish(made, step=number))
        return self.refs[-1]

    def subscriber(self, target: Target, **options: Any) -> Subscriber:
        return Subscriber(self.store, RUN, target, **options)


class Box(torch.nn.Module):
    """A module whose parameters are given; dots in names make submodules."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        super().__init__()
        for name, value in tensors.items():
            owner: torch.nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, torch.nn.Module())
                owner = getattr(owner, part)
            tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
            owner.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))


def blank() -> Tensors:
    return {name: np.zeros(shape, dtype) for name, (dtype, shape) in SHAPES.items()}


def held(target: Target) -> Bits:
    """The bits of all tensors that the target's version has, as the target shows them."""
    return plain({name: target.read(name) for name in target.entries})


def make_memory(_: Path) -> Target:
    return MemoryTarget()


def make_module(_: Path) -> Target:
    return TorchModule(Box(blank()))


def make_single(folder: Path) -> Target:
    return CheckpointDirectory(folder / "model")


def make_sharded(folder: Path) -> Target:
    return CheckpointDirectory(folder / "model", max_shard_bytes=600)


TARGETS: dict[str, Callable[[Path], Target]] = {
    "memory": make_memory,
    "module": make_module,
    "directory-single": make_single,
    "directory-sharded": make_sharded,
}
