"""An engine of several members in this process: a model that is fused, sharded and padded as
inference engines do it, with its own loader, under farcast's real tracing and residents.

Checkpoint                           each of N members holds
    embed.weight      [V, H]         its rows of V rounded up to a multiple of N, zeros behind
    q, k, v .weight   [H, H]         its rows of each, in one `qkv`
    out.weight        [H, H]         its columns
    gate, up .weight  [F, H]         its rows of each, in one `gate_up`
    norm.weight       [H]            all of it
    head.weight       (may be left out: it is the embedding then)
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from farcast.delta import TensorBits, from_bits
from farcast.engines.http_engine import UNKNOWN, MemberLayout, Receipt, Whole, label_of
from farcast.engines.vllm_plugin.resident import Resident
from farcast.errors import EngineRefusedError, TargetError
from farcast.replica import Place
from farcast.types import VersionRef

V, H, F = 10, 8, 12
SHAPES: Mapping[str, tuple[int, ...]] = {
    "embed.weight": (V, H),
    "q.weight": (H, H),
    "k.weight": (H, H),
    "v.weight": (H, H),
    "out.weight": (H, H),
    "gate.weight": (F, H),
    "up.weight": (F, H),
    "norm.weight": (H,),
}


def weights(version: int, *, seed: int = 5, **shapes: tuple[int, ...]) -> dict[str, TensorBits]:
    """bf16 tensors of those shapes; a few words of most of them change with each version."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in {**SHAPES, **shapes}.items():
        words = rng.integers(1, 1 << 15, shape).astype(np.uint16)
        for step in range(1, version + 1):
            if name != "norm.weight":
                flat = words.reshape(-1)
                flat[(step * 7) % flat.size] ^= 1
                flat[(step * 11 + 3) % flat.size] ^= 2
        made[name] = TensorBits("BF16", shape, words.reshape(-1).view(np.uint8))
    return made


def as_torch(bits: Mapping[str, TensorBits]) -> list[tuple[str, torch.Tensor]]:
    like = torch.empty(0)
    return [(name, from_bits(tensor, like)) for name, tensor in bits.items()]


class Shard(torch.nn.Module):
    """One member's part of the model."""

    def __init__(self, member: int, members: int) -> None:
        super().__init__()
        self.member, self.members = member, members
        self.rows = -(-V // members)
        for name, shape in {
            "embed": (self.rows, H),
            "qkv": (3 * H // members, H),
            "out": (H, H // members),
            "gate_up": (2 * F // members, H),
            "norm": (H,),
            "packed": (H,),
        }.items():
            value = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), False)
            self.register_parameter(name, value)
        self.register_buffer("scale", torch.tensor(0.0188), persistent=False)

    def load_weights(self, loaded: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in loaded:
            kind = name.removesuffix(".weight")
            if kind in ("q", "k", "v"):
                self._load_rows(self.qkv.data, tensor, "qkv".index(kind), 3)
            elif kind in ("gate", "up"):
                self._load_rows(self.gate_up.data, tensor, ("gate", "up").index(kind), 2)
            elif kind == "out":
                width = H // self.members
                self._copy(self.out.data, tensor.narrow(1, self.member * width, width))
            elif kind == "norm":
                self._copy(self.norm.data, tensor)
            elif kind == "embed":
                start = self.member * self.rows
                part = tensor.narrow(0, start, min(self.rows, V - start))
                self._copy(self.embed[: part.shape[0]].data, part)
                self.embed[part.shape[0] :].data.fill_(0)
            elif kind == "packed":
                self._copy(self.packed.data, tensor.float().sum(0).to(torch.bfloat16))
            elif kind != "head":
                raise ValueError(f"There is no module or parameter named {name!r}.")

    def _load_rows(self, fused: torch.Tensor, tensor: torch.Tensor, part: int, parts: int) -> None:
        rows = fused.shape[0] // parts
        source = tensor.narrow(0, self.member * rows, rows)
        self._copy(fused.narrow(0, part * rows, rows), source)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.shape == source.shape
        target.copy_(source)


class GroupEngine:
    """Implements `InPlaceEngine`. `calls` are what it was asked to do, in order; `faults` names
    members whose write fails; `lies` lets all writes do nothing."""

    name = "group"
    guarded_routes: tuple[str, ...] = ()
    salt_field = "salt"

    def __init__(self, members: int, bits: Mapping[str, TensorBits]) -> None:
        self.shards = [Shard(member, members) for member in range(members)]
        for shard in self.shards:
            shard.load_weights(as_torch(bits))
        self.residents = [
            Resident(shard, member, shard.load_weights) for member, shard in enumerate(self.shards)
        ]
        self.calls: list[str] = []
        self.faults: set[int] = set()
        self.lies = self.keeps_caches = self.paused = False
        self.absent: set[int] = set()
        self._label = UNKNOWN

    def fingerprint(self) -> list[bytes]:
        """All memory of all members: what an answer depends on."""
        tensors = [t for shard in self.shards for t in (*shard.parameters(), *shard.buffers())]
        return [t.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]

    def check_health(self) -> None:
        """In this process, so it is there."""

    def pause(self) -> None:
        self.calls.append("pause")
        self.paused = True

    def resume(self) -> None:
        self.calls.append("resume")
        self.paused = False

    def drop_caches(self) -> bool:
        self.calls.append("drop_caches")
        return not self.keeps_caches

    def label(self) -> str:
        return self._label

    def salt(self, ref: VersionRef) -> Mapping[str, Any]:
        return {self.salt_field: label_of(ref)}

    def attach(self, places: Mapping[str, Place]) -> Sequence[MemberLayout]:
        return [r.attach(places, {"BF16": torch.bfloat16}) for r in self.residents]

    def stage(self, words: Path, digest: str, label: str, whole: Whole | None = None) -> None:
        for resident in self.residents:
            resident.begin_stage(words, digest, label, whole)
        for resident in self.residents:
            resident._join()
            assert resident.stage_state(label) == "ready"

    def open_update(self) -> None:
        self.calls.append("open_update")

    def close_update(self) -> None:
        self.calls.append("close_update")

    def write(self, label: str) -> None:
        assert self.paused
        self.calls.append("write")
        for member, resident in enumerate(self.residents):
            if member in self.faults:
                raise TargetError(f"Member {member} fails because a test wants it.")
            if self.lies:
                resident._exchange = lambda _: None  # type: ignore[method-assign]
            resident.write(label)

    def undo(self, label: str) -> None:
        assert self.paused
        self.calls.append("undo")
        for resident in self.residents:
            resident.undo(label)

    def name_weights(self, label: str) -> None:
        self.calls.append("name_weights")
        self._label = label

    def drop(self, label: str) -> None:
        for resident in self.residents:
            resident.drop(label)

    def receipts(self, names: Sequence[str] = ()) -> Sequence[Receipt]:
        found = [r.receipt(names) for m, r in enumerate(self.residents) if m not in self.absent]
        if len(found) != len(self.residents):
            raise EngineRefusedError("A member did not answer.")
        return found
