"""Ten thousand trajectories, eight workers that restart, a trainer that falls back to its
checkpoint, one store call in a hundred failing: each acknowledged one counts exactly once."""

import contextlib
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from farcast.errors import StoreUnavailableError
from farcast.store import open_store
from farcast.store.testing import Call, Fail, Fault, FaultStore, LoseReply
from farcast.trajectory import GroupBatcher, TrajectoryReceiver, TrajectorySender
from trajectory_world import RUN, group, ids

GROUPS = 160


def work(store: FaultStore, worker: str) -> list[str]:
    """Submits until acknowledged; now and then a new process takes over."""
    rng, sender = random.Random(worker), TrajectorySender(store, RUN, worker)
    acknowledged: list[str] = []
    for number in range(GROUPS):
        if rng.random() < 0.03:
            sender = TrajectorySender(store, RUN, worker)
        members = group(f"{worker}.{number}", 8, worker=worker, prompt=20, answer=30)
        while len(acknowledged) < 8 * (number + 1):
            with contextlib.suppress(StoreUnavailableError):
                sender.submit_many(members)
                acknowledged += ids(members)
    return acknowledged


class Trainer:
    def __init__(self, store: FaultStore) -> None:
        self.store = store
        self.boot()
        self.save()

    def boot(self) -> None:
        self.receiver = TrajectoryReceiver(self.store, RUN)
        self.batcher = GroupBatcher(RUN, max_staleness=4, group_timeout=60)
        self.used: list[str] = []

    def save(self) -> None:
        self.saved = (self.receiver.state(), self.batcher.state(now=0), list(self.used))

    def crash(self) -> None:
        self.receiver.close()
        self.boot()
        self.receiver.restore(self.saved[0])
        self.batcher.restore(self.saved[1], now=0)
        self.used = list(self.saved[2])

    def step(self) -> bool:
        arrived = self.receiver.consume(64)
        self.batcher.add(arrived, now=0)
        for one in self.batcher.take(self.batcher.whole_groups(), version=0, now=0):
            self.used += ids(list(one.members))
        return bool(arrived)


@pytest.mark.full
def test_each_of_ten_thousand_counts_once(tmp_path: Path) -> None:
    rng, chance = random.Random(1), random.Random(2)

    def decide(_: Call) -> Fault | None:
        drawn = rng.random()
        return LoseReply() if drawn < 0.005 else Fail() if drawn < 0.01 else None

    store = FaultStore(open_store(tmp_path / "store"), decide=decide)
    trainer, crashes = Trainer(store), 0
    with ThreadPoolExecutor(8) as pool:
        workers = [pool.submit(work, store, f"w{i}") for i in range(8)]
        while True:
            over = all(worker.done() for worker in workers)
            more = True
            with contextlib.suppress(StoreUnavailableError):
                more = trainer.step()
            if over and not more:
                break
            if chance.random() < 0.5:
                trainer.save()
            elif chance.random() < 0.05:
                trainer.crash()
                crashes += 1
    acknowledged = [id_ for worker in workers for id_ in worker.result()]
    assert len(acknowledged) == 8 * 8 * GROUPS
    assert sorted(trainer.used) == sorted(acknowledged)
    assert crashes > 0
    trainer.receiver.close()
