"""What a trajectory costs on its way home: bytes against usual codings, and rates.

The trajectories are sampled by a model here, so ids and log-probs are as a replica sends them.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zstandard

from farcast.config import SamplingConfig, TaskConfig
from farcast.engines.chat import ChatCodec
from farcast.engines.decoding import decode
from farcast.engines.modules import load_module
from farcast.store.memory import MemoryStore
from farcast.train.models import prepare_model
from farcast.trajectory import Trajectory, TrajectoryReceiver, TrajectorySender, Turn, encode_batch
from farcast.trajectory.encoding import ZSTD_LEVEL
from farcast.types import PolicySpan, VersionRef

RUN = "wire"
MEMBERS = 8
ROOT = "0" * 64
NOW = 1.75e9
QUESTIONS = (
    "Explain in a few sentences how a bridge carries a load.",
    "Write a short story about a lighthouse keeper who finds a letter.",
)


class WireReport(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per token, prompt tokens counted too; trajectories per second through one process."""

    wire_model: str
    wire_tokens: int
    """Of one trajectory, on average."""
    bytes_per_token: float
    """A group of eight as one batch, headers and digests included."""
    bytes_per_token_json: float
    bytes_per_token_msgpack_zstd: float
    submit_per_s: float
    consume_per_s: float
    submit_tokens_per_s: float
    consume_tokens_per_s: float


def measure_wire(
    model: str, cache: Path, *, tokens: int, repeats: int, say: Callable[[str], None]
) -> WireReport:
    """Sample groups, encode them each way, and send them `repeats` times through a store in
    memory."""
    say(f"wire: sampling {tokens} tokens a trajectory from {model}")
    groups = sample_groups(prepare_model(model, cache), tokens)
    total = sum(len(member.token_ids) for group in groups for member in group)
    say("wire: sending and reading")
    submitted, consumed = _rates(groups, repeats)
    mean = total / (MEMBERS * len(groups))
    return WireReport(
        wire_model=model,
        wire_tokens=round(mean),
        bytes_per_token=sum(len(_own(group)) for group in groups) / total,
        bytes_per_token_json=sum(len(_json(group)) for group in groups) / total,
        bytes_per_token_msgpack_zstd=sum(len(_msgpack(group)) for group in groups) / total,
        submit_per_s=submitted,
        consume_per_s=consumed,
        submit_tokens_per_s=submitted * mean,
        consume_tokens_per_s=consumed * mean,
    )


def sample_groups(folder: Path, tokens: int) -> list[list[Trajectory]]:
    """A group of answers to each of a few questions."""
    codec = ChatCodec.from_folder(folder, TaskConfig())
    module = load_module(folder).to(torch.float32)
    prompts = [tuple(codec.encode_prompt(question)) for question in QUESTIONS]
    rows = decode(
        module,
        [prompt for prompt in prompts for _ in range(MEMBERS)],
        SamplingConfig(max_new_tokens=tokens),
        eos_ids=frozenset(codec.eos_ids),
        pad_id=codec.pad_id,
        seed=0,
        step=_same_version,
    )
    return [
        [_trajectory(prompts[g], rows[g * MEMBERS + m], f"g{g}", m) for m in range(MEMBERS)]
        for g in range(len(prompts))
    ]


class _SameVersion:
    """The gate of an engine that never switches."""

    def __enter__(self) -> VersionRef:
        return VersionRef(RUN, 0, ROOT)

    def __exit__(self, *_: object) -> None:
        return None


def _same_version() -> _SameVersion:
    return _SameVersion()


def _trajectory(prompt: tuple[int, ...], row: Any, group: str, member: int) -> Trajectory:
    start, count = len(prompt), len(row.token_ids)
    return Trajectory(
        id=f"3f2a9c01d4e7-{group}-{member}",
        group_id=f"3f2a9c01d4e7-{group}",
        group_size=MEMBERS,
        worker_id="r1",
        token_ids=(*prompt, *row.token_ids),
        logprobs=(*(0.0,) * start, *row.logprobs),
        loss_mask=(*(False,) * start, *(True,) * count),
        spans=(PolicySpan(start, start + count, 0, ROOT),),
        turns=(
            Turn(role="user", start=0, end=start, started=NOW, ended=NOW),
            Turn(role="model", start=start, end=start + count, started=NOW, ended=NOW + 9.25),
        ),
        reward=0.5,
        finish_reason="stop" if row.ended else "length",
        task="letters",
    )


def _own(group: Sequence[Trajectory]) -> bytes:
    return encode_batch(group, run_id=RUN, sequence=0)


def _json(group: Sequence[Trajectory]) -> bytes:
    """Log-probs with as many digits as a float32 needs."""
    plain = msgspec.to_builtins(group)
    for trajectory in plain:
        trajectory["logprobs"] = [float(str(np.float32(v))) for v in trajectory["logprobs"]]
    return msgspec.json.encode(plain)


def _msgpack(group: Sequence[Trajectory]) -> bytes:
    """At the level that farcast's own batches are compressed with."""
    packed = msgspec.msgpack.encode(group)
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(packed)


def _rates(groups: Sequence[Sequence[Trajectory]], repeats: int) -> tuple[float, float]:
    """Trajectories per second: submitted group by group, and consumed."""
    todo = [
        [msgspec.structs.replace(m, id=f"{m.id}-{i}", group_id=f"{m.group_id}-{i}") for m in group]
        for i in range(repeats)
        for group in groups
    ]
    store, count = MemoryStore(), sum(map(len, todo))
    sender = TrajectorySender(store, RUN, "r1")
    began = time.perf_counter()
    for group in todo:
        sender.submit_many(group)
    submitted = time.perf_counter() - began
    receiver, seen = TrajectoryReceiver(store, RUN), 0
    began = time.perf_counter()
    while seen < count:
        seen += len(receiver.consume(64))
    consumed = time.perf_counter() - began
    receiver.close()
    return count / submitted, count / consumed
