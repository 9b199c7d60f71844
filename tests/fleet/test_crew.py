"""A crew is as many as wanted, whatever happens to its members; and the loop of `farcast up`."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from farcast.config import RunConfig, encode_config
from farcast.errors import StoreUnavailableError
from farcast.fleet.advising import DECIDE_SECONDS
from farcast.fleet.crew import GAP_SECONDS, HUNG_SECONDS, STARTING_SECONDS, Crew
from farcast.fleet.launcher import Handle, ProcessSpec
from farcast.fleet.leases import DEAD_SECONDS
from farcast.fleet.observe import FleetSnapshot
from farcast.fleet.records import ReplicaRecord, StepRecord, TrainerRecord
from farcast.fleet.registry import Registry, Sighting
from farcast.fleet.scaling import Limits
from farcast.fleet.signals import StopRequest
from farcast.fleet.up_process import Keeper, worker_spec
from farcast.lineage import RunRecord
from farcast.store import MemoryStore
from farcast.store.archive import Archive
from farcast.store.testing import Fail, FaultStore, Rule


class Played:
    """A launcher of processes that do what the test says."""

    def __init__(self) -> None:
        self.running: dict[Handle, ProcessSpec] = {}
        self.ended: dict[Handle, int] = {}
        self.asked: list[str] = []
        self.killed: list[str] = []
        self.polite = True
        self.said = "farcast: something is wrong."
        self.closed = False
        self._lives = 0

    def start(self, spec: ProcessSpec) -> Handle:
        self._lives += 1
        handle = Handle(spec.name, self._lives)
        self.running[handle] = spec
        return handle

    def poll(self, handle: Handle) -> int | None:
        return self.ended.get(handle)

    def words(self, handle: Handle) -> str:  # noqa: ARG002
        return self.said

    def end(self, name: str, status: int) -> None:
        for handle in [h for h in self.running if h.name == name]:
            del self.running[handle]
            self.ended[handle] = status

    def kill(self, handle: Handle) -> None:
        self.killed.append(handle.name)
        self.end(handle.name, -9)

    def ask(self, handle: Handle) -> None:
        self.asked.append(handle.name)
        if self.polite:
            self.end(handle.name, 0)

    def stop(self, handle: Handle, *, grace: float) -> int:
        self.ask(handle)
        if handle not in self.ended:
            assert grace >= 0
            self.kill(handle)
        return self.ended[handle]

    def restart(self, handle: Handle, *, grace: float) -> Handle:
        spec = self.running[handle]
        self.stop(handle, grace=grace)
        return self.start(spec)

    def close(self) -> None:
        self.closed = True

    @property
    def names(self) -> list[str]:
        return sorted(handle.name for handle in self.running)

    def list(self) -> Sequence[Handle]:
        return [*self.running]


class World:
    """A crew with a clock that the test moves."""

    def __init__(self, **options: float) -> None:
        self.now = 0.0
        self.launcher = Played()
        spec = worker_spec("file:///s", Path("/logs"), ("--link", "1mbit,1ms"))
        self.crew = Crew(self.launcher, spec, prefix="r", clock=lambda: self.now, **options)

    def tend(self, *ages: float) -> list[str]:
        """Tend while replicas r1, r2, ... last wrote so many seconds ago."""
        replicas = {
            f"r{i}": Sighting(
                ReplicaRecord(replica_id=f"r{i}", state="serving", version=1), 1e6 - age
            )
            for i, age in enumerate(ages, 1)
        }
        return [str(change) for change in self.crew.tend(FleetSnapshot(None, (), replicas, 1e6))]


def test_a_workers_command_line() -> None:
    spec = worker_spec("s3://b/r", Path("/logs"), ("--link", "1mbit,1ms"))("r1")
    assert spec.arguments == ("worker", "--store", "s3://b/r", "--id", "r1", "--link", "1mbit,1ms")
    assert spec.log == Path("/logs/r1.log")


def test_up_and_down() -> None:
    world = World()
    world.crew.scale(3)
    assert world.tend() == ["r1 started", "r2 started", "r3 started"]
    world.now = 5
    world.crew.scale(4)
    world.crew.scale(2)
    assert world.launcher.names == ["r1", "r2"]
    world.tend()
    world.crew.scale(3)
    assert world.crew.names == ["r1", "r2", "r3"]  # a free name is taken again
    world.crew.close()
    assert world.launcher.names == []
    assert world.launcher.killed == []


def test_one_that_does_not_leave_is_ended_after_its_grace() -> None:
    world = World(grace=10.0)
    world.launcher.polite = False
    world.crew.scale(2)
    world.crew.scale(1)
    world.now = 9
    assert "r2 left" not in world.tend()
    world.crew.scale(2)
    assert world.crew.names == ["r1", "r3"]  # r2 is not free yet
    world.now = 11
    assert "r2 left" in world.tend()
    assert world.launcher.killed == ["r2"]


def test_a_crash_is_made_good_a_bounded_number_of_times() -> None:
    world = World()
    world.crew.scale(2)
    world.tend()
    for pause in (2, 4, 8):
        world.launcher.end("r1", -9)
        assert world.tend() == [f"r1 crashed: signal 9; it starts again in {pause} s"]
        world.crew.scale(2)
        assert world.launcher.names == ["r2"]  # it still counts
        world.now += pause
        assert world.tend()[0].startswith("r1 restarted")
    world.launcher.end("r1", 4)
    assert world.tend() == ["r1 given up: status 4: something is wrong."]


def test_a_users_mistake_is_not_repeated_and_a_waiting_one_can_be_let_go() -> None:
    world = World()
    world.crew.scale(2)
    world.tend()
    world.launcher.end("r1", 2)
    world.launcher.end("r2", 1)
    assert [line.split(":")[0] for line in world.tend()] == ["r1 given up", "r2 crashed"]
    world.crew.scale(0)
    world.now += 60
    assert world.tend() == ["r2 left"]
    assert world.launcher.names == []


def test_one_that_hangs_is_replaced_and_one_that_starts_slowly_is_not() -> None:
    world = World()
    world.crew.scale(2)
    world.tend()
    changes = []
    while world.now < STARTING_SECONDS + HUNG_SECONDS + 5:
        world.now += 5
        changes += world.tend(world.now, 1.0)  # r1 has never said a word in this life
    assert changes == [f"r1 replaced: it said nothing for {world.now - 5:.0f} s"] or (
        len(changes) == 1 and changes[0].startswith("r1 replaced")
    )
    assert world.launcher.names == ["r1", "r2"]
    assert world.launcher.asked == ["r1"]


def test_an_outage_of_the_store_makes_nobody_hung() -> None:
    world = World()
    world.crew.scale(2)
    world.now = 2 * STARTING_SECONDS
    world.tend(1.0, 1.0)
    for _ in range(100):  # the store is away
        world.now += 5
        world.crew.tend(None)
    old = 500.0 + DEAD_SECONDS
    assert world.tend(old, old) == []
    world.now += HUNG_SECONDS / 2
    assert GAP_SECONDS < HUNG_SECONDS / 2
    assert world.tend(old, old) == []  # the gap begins anew
    assert world.tend(0.5, 0.5) == []


def run_store() -> MemoryStore:
    store = MemoryStore()
    config = RunConfig(run_id="run", store="memory://", model="tiny", out="/x")
    Archive(store, "run").create_run(
        RunRecord(
            run_id="run",
            created="2026-01-01T00:00:00+00:00",
            assets={},
            settings=encode_config(config).decode(),
        )
    )
    return store


def step(version: int, waited: float) -> StepRecord:
    return StepRecord(
        version=version,
        step=version,
        root="0" * 64,
        incarnation="a",
        consumed=tuple(f"t{version}-{i}" for i in range(32)),
        step_seconds=10.0,
        waited_seconds=waited,
    )


class Run:
    """A run in memory, its trainer and its workers, and the loop that keeps them up."""

    def __init__(self, limits: Limits) -> None:
        self.store = FaultStore(run_store())
        self.registry = Registry(self.store)
        self.now = 0.0
        self.launcher = Played()
        self.said: list[str] = []
        crew = Crew(
            self.launcher,
            worker_spec("memory://", Path("/logs"), ()),
            prefix="r",
            clock=lambda: self.now,
        )
        self.keeper = Keeper(
            self.store, crew, limits, tell=self.said.append, clock=lambda: self.now
        )
        self.made: dict[str, float] = {}

    def trainer(self, state: str = "training", at: int = 0) -> None:
        self.registry.write_trainer(
            TrainerRecord(run_id="run", state=state, version=at, step=at)  # type: ignore[arg-type]
        )

    def turn(self, rate: float = 1.0) -> bool:
        for name in self.launcher.names:
            self.made[name] = self.made.get(name, 0.0) + rate * DECIDE_SECONDS
            record = ReplicaRecord(
                replica_id=name, state="serving", version=0, trajectories=int(self.made[name])
            )
            self.registry.write_replica(record)
        self.now += DECIDE_SECONDS
        return self.keeper.turn()


def test_up_starts_what_the_trainer_needs_and_ends_with_it() -> None:
    run = Run(Limits(least=1, most=8))
    assert run.turn()  # nobody is there yet but the least
    assert run.launcher.names == ["r1"]
    run.trainer()
    run.turn()
    for version in range(1, 4):
        run.registry.put_step(step(version, waited=20.0))
    for _ in range(6):
        run.trainer(at=3)
        run.turn()
    assert run.launcher.names == ["r1", "r2", "r3", "r4"]  # 3.2 a second, and headroom
    run.trainer("done", at=3)
    assert not run.turn()
    with StopRequest() as stop:
        result = run.keeper.run(stop)
    assert run.launcher.names == []
    assert (result.run_id, result.most_at_once, result.started) == ("run", 4, 4)
    assert any("1 -> 2 workers: the trainer uses 3.20" in line for line in run.said)


def test_up_counts_the_workers_of_others() -> None:
    run = Run(Limits(least=0, most=8))
    run.trainer()
    for version in range(1, 4):
        run.registry.put_step(step(version, waited=0.5))
    for beat in range(8):
        for name in ("x1", "x2"):
            run.registry.write_replica(
                ReplicaRecord(
                    replica_id=name, state="serving", version=0, trajectories=5 * (beat + 1)
                )
            )
        run.trainer(at=3)
        run.turn()
    assert run.launcher.names == ["r1", "r2"]


def test_up_keeps_what_there_is_while_the_store_or_the_trainer_is_away() -> None:
    run = Run(Limits(least=2, most=8))
    run.trainer()
    run.turn()
    away = Fail(StoreUnavailableError("The store is away; wait."))
    run.store.add(Rule(away, verb="list", times=6))
    run.keeper.turn()
    run.keeper.turn()
    run.store.add()
    assert run.launcher.names == ["r1", "r2"]
    assert sum("does not answer" in line for line in run.said) == 1


@pytest.mark.parametrize("state", ["starting", "stopped"])
def test_up_stays_where_it_is_under_a_trainer_that_is_not_training(state: str) -> None:
    run = Run(Limits(least=1, most=8))
    run.trainer(state)
    for _ in range(5):
        assert run.turn()
    assert run.launcher.names == ["r1"]
