"""A worker with a spool survives an outage and a restart in it; nothing is lost or doubled."""

import random
from pathlib import Path
from typing import Any

import pytest

from farcast.errors import (
    ConfigError,
    IntegrityError,
    RunMismatchError,
    StoreAccessError,
    StoreUnavailableError,
)
from farcast.store.testing import Call, Fail, FaultStore, LoseReply, Rule
from farcast.trajectory import TrajectoryReceiver, TrajectorySender
from trajectory_world import RUN, episode, group, ids

OUTAGE = Rule(Fail(), times=None)


class World:
    def __init__(self, folder: Path, **options: Any) -> None:
        self.store = FaultStore()
        self.folder = folder / "spool"
        self.options = options
        self.start()

    def start(self, run: str = RUN) -> TrajectorySender:
        """A new process: the old one's lock goes with it."""
        if hasattr(self, "sender"):
            self.sender.close()
        self.sender = TrajectorySender(self.store, run, "w0", spool=self.folder, **self.options)
        return self.sender

    def arrived(self) -> list[str]:
        return ids(TrajectoryReceiver(self.store, RUN).consume(10_000))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_an_outage_is_bridged_in_order(world: World) -> None:
    world.sender.submit(episode("before"))
    world.store.add(OUTAGE)
    world.sender.submit_many(group("g"))
    world.sender.submit_many(group("g"))
    world.sender.submit(episode("during"))
    assert world.sender.spooled_bytes > 0
    with pytest.raises(StoreUnavailableError):
        world.sender.flush()
    world.store.clear()
    assert world.arrived() == ["before"]
    world.sender.submit(episode("after"))
    assert world.sender.spooled_bytes == 0
    assert world.arrived() == ["before", *ids(group("g")), "during", "after"]


def test_a_worker_that_starts_during_the_outage(world: World) -> None:
    world.sender.submit(episode("known"))
    world.store.add(OUTAGE)
    world.sender.submit(episode("a"))
    world.start().submit_many([episode("a"), episode("b"), episode("known")])
    world.start()
    world.store.clear()
    world.sender.flush()
    assert world.arrived() == ["known", "a", "b"]


def test_the_spool_has_a_limit(tmp_path: Path) -> None:
    world = World(tmp_path, max_spool_bytes=2000)
    world.store.add(OUTAGE)
    spooled = []
    for i in range(100):
        try:
            world.sender.submit(episode(f"t{i}", answer=50))
        except StoreUnavailableError:
            break
        spooled.append(f"t{i}")
    assert 0 < len(spooled) < 100
    assert sum(f.stat().st_size for f in world.folder.iterdir()) <= 2000
    world.store.clear()
    world.sender.submit(episode("next"))
    assert world.arrived() == [*spooled, "next"]


def test_a_crash_between_the_store_and_the_disk(world: World) -> None:
    """The batch is in both; the worker that starts again knows its ids."""
    world.store.add(OUTAGE)
    world.sender.submit_many(group("g"))
    (file,) = (f for f in world.folder.iterdir() if f.name.isdigit())
    data = file.read_bytes()
    world.store.clear()
    world.sender.flush()
    file.write_bytes(data)
    world.start().submit(episode("t"))
    assert world.arrived() == [*ids(group("g")), "t"]
    assert not file.exists()


def test_two_processes_cannot_share_a_spool(world: World) -> None:
    with pytest.raises(ConfigError, match="in use"):
        TrajectorySender(world.store, RUN, "w1", spool=world.folder)


def test_a_damaged_spool_is_refused(world: World) -> None:
    world.store.add(OUTAGE)
    world.sender.submit(episode())
    (file,) = (f for f in world.folder.iterdir() if f.name.isdigit())
    file.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(IntegrityError, match="Delete it"):
        world.start()


def test_a_spool_of_another_run_is_refused(world: World) -> None:
    world.store.add(OUTAGE)
    world.sender.submit(episode())
    with pytest.raises(RunMismatchError):
        world.start("run2")


def test_a_half_written_file_is_ignored(world: World) -> None:
    (world.folder / "new").write_bytes(b"half")
    world.start().submit(episode())
    assert world.arrived() == ["t0"]


def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("a file")
    with pytest.raises(StoreAccessError, match="cannot be used"):
        World(tmp_path)


@pytest.mark.parametrize("seed", range(8))
def test_outages_lost_replies_and_restarts_at_random(tmp_path: Path, seed: int) -> None:
    rng, world = random.Random(seed), World(tmp_path)
    down = False

    def decide(_: Call) -> Any:
        if down:
            return Fail()
        return rng.choice([LoseReply(), Fail()]) if rng.random() < 0.15 else None

    world.store = FaultStore(decide=decide)
    world.start()
    acknowledged: list[str] = []
    for i in range(60):
        down = rng.random() < (0.8 if down else 0.15)
        world.sender.submit_many(group(f"g{i}", 2))
        acknowledged += ids(group(f"g{i}", 2))
        if rng.random() < 0.2:
            world.start()
    world.store = FaultStore(world.store.inner)
    world.start().flush()
    assert world.arrived() == acknowledged
