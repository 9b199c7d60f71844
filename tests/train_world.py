"""A run with a tiny model, for tests of the trainer: store, publisher, receiver, and a worker's
side that writes groups which claim the versions they are given."""

import random
from pathlib import Path
from typing import Any

from tests.models import tiny_module

from farcast import Publisher, TrajectoryReceiver, TrajectorySender
from farcast.config import TrainConfig
from farcast.store import open_store
from farcast.store.archive import Archive
from farcast.train.checkpoint import Checkpoints
from farcast.train.loop import StepReport, Trainer
from farcast.train.policy import Policy
from farcast.trajectory import GroupBatcher, Trajectory, Turn
from farcast.types import PolicySpan, VersionRef

RUN = "run"


def trajectory(
    group: str, member: int, ref: VersionRef, *, reward: float, rng: random.Random, size: int = 4
) -> Trajectory:
    """Four prompt tokens that the group shares, then a few sampled ones."""
    prompt = [5, 6, 7, 8]
    answer = [rng.randrange(3, 90) for _ in range(rng.randrange(2, 6))]
    tokens = tuple(prompt + answer)
    return Trajectory(
        id=f"{group}-{member}",
        group_id=group,
        group_size=size,
        worker_id="w",
        token_ids=tokens,
        logprobs=(0.0,) * 4 + tuple(-4.5 - rng.random() for _ in answer),
        loss_mask=(False,) * 4 + (True,) * len(answer),
        spans=(PolicySpan(4, len(tokens), ref.version, ref.root),),
        turns=(
            Turn(role="user", start=0, end=4),
            Turn(role="model", start=4, end=len(tokens)),
        ),
        reward=reward,
        finish_reason="stop",
    )


class TrainWorld:
    """One run; `trainer()` is a new trainer process on it."""

    def __init__(self, folder: Path, store: str = "memory://", **settings: Any) -> None:
        self.folder = folder
        self.store = open_store(store)
        defaults: dict[str, Any] = {
            "steps": 3,
            "group_size": 4,
            "groups_per_step": 2,
            "learning_rate": 1e-3,
            "checkpoint_every": 1,
            "max_staleness": 100,
        }
        self.config = TrainConfig(**{**defaults, **settings})
        self.sender = TrajectorySender(self.store, RUN, "w")
        self.rng = random.Random(0)
        self.groups = 0
        self.reports: list[StepReport] = []

    def send(self, ref: VersionRef, groups: int = 1) -> list[str]:
        sent = []
        for _ in range(groups):
            name = f"g{self.groups}"
            self.groups += 1
            members = [
                trajectory(name, i, ref, reward=float(i % 2), rng=self.rng) for i in range(4)
            ]
            self.sender.submit_many(members)
            sent += [m.id for m in members]
        return sent

    def trainer(self, **overrides: Any) -> tuple[Trainer, Policy, Publisher]:
        policy = Policy(tiny_module(), self.config)
        publisher = overrides.pop("publisher", None) or Publisher(self.store, RUN)
        archive = Archive(self.store, RUN)
        settings: dict[str, Any] = {
            "receiver": TrajectoryReceiver(self.store, RUN),
            "batcher": GroupBatcher(
                RUN,
                max_staleness=self.config.max_staleness,
                group_timeout=60.0,
                fits=policy.fits,
            ),
            "checkpoints": Checkpoints(self.folder, RUN),
            "root_of": lambda version: archive.manifest(version).root,
            "report": self.reports.append,
        }
        trainer = Trainer(
            policy, self.config, run_id=RUN, publisher=publisher, **{**settings, **overrides}
        )
        return trainer, policy, publisher
