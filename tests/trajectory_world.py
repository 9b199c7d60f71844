"""Trajectories as tests speak of them: `episode()` is a valid one, `group()` a whole group."""

import random
from typing import Any

from msgspec.structs import replace

from farcast.trajectory import Trajectory, Turn
from farcast.types import PolicySpan

RUN = "run1"


def root_of(version: int) -> str:
    return f"{version:064x}"


def span(start: int, end: int, version: int) -> PolicySpan:
    return PolicySpan(start, end, version, root_of(version))


def episode(
    id: str = "t0",
    *,
    worker: str = "w0",
    group: str = "g0",
    size: int = 1,
    version: int = 0,
    prompt: int = 3,
    answer: int = 5,
    **changes: Any,
) -> Trajectory:
    """`prompt` shown tokens, then `answer` sampled by `version`. Contents follow from the id."""
    rng = random.Random(id)
    tokens = prompt + answer
    made = Trajectory(
        id=id,
        group_id=group,
        group_size=size,
        worker_id=worker,
        token_ids=tuple(rng.randrange(50_000) for _ in range(tokens)),
        logprobs=(0.0,) * prompt + tuple(-rng.randrange(1, 1 << 12) / 256 for _ in range(answer)),
        loss_mask=(False,) * prompt + (True,) * answer,
        spans=(span(prompt, tokens, version),) if answer else (),
        turns=(
            Turn(role="user", start=0, end=prompt),
            Turn(role="model", start=prompt, end=tokens, started=1.5, ended=2.5),
        ),
        reward=rng.random(),
        finish_reason="stop",
        task="letters",
        seed=rng.randrange(1 << 31),
    )
    return replace(made, **changes)


def group(name: str, size: int = 4, **common: Any) -> list[Trajectory]:
    return [episode(f"{name}-{i}", group=name, size=size, **common) for i in range(size)]


def ids(trajectories: list[Trajectory]) -> list[str]:
    return [t.id for t in trajectories]
