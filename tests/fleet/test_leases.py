"""Leases go by the store's time, whatever any machine's clock says; a replica that is busy is not
dead, and one that is taken for dead counts once all the same (case 069)."""

import ctypes
import time
from collections.abc import Callable, Iterator

import pytest

from farcast.config import LinkConfig
from farcast.errors import StoreAccessError, StoreFullError
from farcast.fleet import leases, reporting
from farcast.fleet.leases import (
    DEAD_SECONDS,
    MARK_SECONDS,
    SILENT_SECONDS,
    StoreClock,
    held_versions,
    life,
)
from farcast.fleet.observe import FleetObserver
from farcast.fleet.records import ReplicaRecord, TrainerRecord
from farcast.fleet.registry import Registry, Sighting
from farcast.fleet.reporting import ReplicaReporter
from farcast.store import LinkedStore, MemoryStore, ObjectInfo, Store, open_store
from farcast.store.testing import Fail, FaultStore, Rule
from farcast.trajectory import TrajectoryReceiver, TrajectorySender
from trajectory_world import RUN, episode


class ShiftedStore:
    """A store whose clock is `ahead` of this machine's, and moves when `now` does."""

    def __init__(self, ahead: float) -> None:
        self._store = MemoryStore()
        self._ahead = ahead
        self.now = 1e9
        self._written: dict[str, float] = {}

    @property
    def url(self) -> str:
        return "memory://shifted"

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        self._store.put(key, data, if_absent=if_absent)
        self._written[key] = self.now + self._ahead

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self._store.get(key, max_bytes=max_bytes)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._store.get_range(key, start, length)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        for info in self._store.list(prefix, start_after=start_after):
            yield info._replace(modified=self._written[info.key])

    def delete(self, key: str) -> None:
        self._store.delete(key)


def replica(name: str = "r1", version: int = 2, **fields: str) -> ReplicaRecord:
    state = fields.get("state", "serving")
    return ReplicaRecord(replica_id=name, state=state, version=version)  # type: ignore[arg-type]


@pytest.mark.parametrize("ahead", [-3600.0, 0.0, 3600.0])
def test_lives_go_by_the_stores_clock(ahead: float) -> None:
    store = ShiftedStore(ahead)
    registry = Registry(store)
    observer = FleetObserver(registry, steady=lambda: store.now)
    registry.write_trainer(TrainerRecord(run_id="run", state="training", version=4, step=4))
    registry.write_replica(replica("r1"))
    registry.write_replica(replica("r2", state="stopped"))
    seen = []
    for _ in range(90):
        snapshot = observer.look()
        seen.append((snapshot.life("r1"), snapshot.life("r2"), snapshot.trainer_life))
        store.now += 1
    assert [first for first, _, _ in seen] == (
        ["alive"] * 11 + ["silent"] * (60 - 10) + ["dead"] * (90 - 61)
    )
    assert {second for _, second, _ in seen} == {"left"}
    assert [third for _, _, third in seen] == [first for first, _, _ in seen]
    registry.write_replica(replica("r1", version=4))
    assert observer.look().life("r1") == "alive"
    assert observer.look().staleness("r1") == 0


def test_an_observer_that_comes_late_sees_who_is_dead_at_once() -> None:
    store = ShiftedStore(-777.0)
    Registry(store).write_replica(replica())
    store.now += 2 * DEAD_SECONDS
    snapshot = FleetObserver(Registry(store), steady=lambda: store.now).look()
    assert snapshot.life("r1") == "dead"
    assert snapshot.age("r1") == pytest.approx(2 * DEAD_SECONDS)


@pytest.mark.parametrize("error", [StoreAccessError("no"), StoreFullError("full")])
def test_who_may_not_write_goes_by_the_newest_record(error: Exception) -> None:
    inner = ShiftedStore(50.0)
    store = FaultStore(inner, Rule(Fail(error), verb="put", prefix="fleet/clock", times=None))
    observer = FleetObserver(Registry(store), steady=lambda: inner.now)
    Registry(inner).write_replica(replica("old"))
    inner.now += 100
    Registry(inner).write_replica(replica("new"))
    snapshot = observer.look()
    assert (snapshot.life("old"), snapshot.life("new")) == ("dead", "alive")
    inner.now += SILENT_SECONDS + 1
    assert observer.look().life("new") == "silent"


def test_a_store_clock_is_never_ahead_of_the_store_and_follows_it_when_it_is_set() -> None:
    steady, wall = [0.0], [500.0]
    clock = StoreClock(lambda: wall[0], steady=lambda: steady[0])
    assert clock.now() == 500.0
    steady[0] += 7
    clock.saw(503.0)  # older news change nothing
    assert clock.now() == 507.0
    clock.saw(509.0)
    assert clock.now() == 509.0
    wall[0] = 100.0  # set back
    steady[0] += MARK_SECONDS
    assert clock.now() == 100.0


def test_the_clock_costs_two_requests_a_minute() -> None:
    store = FaultStore()
    registry = Registry(store)
    registry.write_replica(replica())
    observer = FleetObserver(registry)
    for _ in range(5):
        observer.look()
    assert sum(call.key.startswith("fleet/clock/") for call in store.calls) == 2


def test_versions_with_a_lease_are_held() -> None:
    now = 1000.0
    replicas = {
        "alive": Sighting(replica(version=7), now),
        "silent": Sighting(replica(version=5), now - SILENT_SECONDS - 1),
        "dead": Sighting(replica(version=3), now - DEAD_SECONDS - 1),
        "left": Sighting(replica(version=4, state="stopped"), now),
        "new": Sighting(replica(version=-1, state="joining"), now),
    }
    assert held_versions(replicas, now) == {7, 5}
    assert {name: life(s, now) for name, s in replicas.items() if name != "new"} == {
        name: name for name in replicas if name != "new"
    }


def _sleep() -> None:
    time.sleep(1.5)


def _hold_the_interpreter() -> None:
    """As a long call into C that does not let go of the interpreter's lock does."""
    ctypes.PyDLL(None).usleep(1_500_000)


@pytest.mark.parametrize("block", [_sleep, _hold_the_interpreter])
def test_case_069_a_busy_worker_is_alive_or_counts_once(
    monkeypatch: pytest.MonkeyPatch, block: Callable[[], None]
) -> None:
    """The limit is 0.5 s here, and the main thread is away for three times that."""
    monkeypatch.setattr(reporting, "WRITE_SECONDS", 0.05)
    monkeypatch.setattr(leases, "SILENT_SECONDS", 0.25)
    monkeypatch.setattr(leases, "DEAD_SECONDS", 0.5)
    store: Store = open_store("memory://")
    registry = Registry(store)
    observer = FleetObserver(registry)
    receiver = TrajectoryReceiver(store, run_id=RUN)
    sender = TrajectorySender(store, run_id=RUN, worker_id="w0")
    given = []
    with ReplicaReporter(registry, "w0") as reporter:
        reporter.state("serving")
        sender.submit(episode("before"))
        given += receiver.consume(10)
        time.sleep(0.2)
        block()
        at_once = observer.look().life("w0")
        if block is _sleep:
            assert at_once == "alive"  # its reports have a thread of their own
        elif at_once == "dead":  # another takes its place, under its name
            again = TrajectorySender(store, run_id=RUN, worker_id="w0")
            again.submit(episode("by the other"))
        time.sleep(0.3)
        assert observer.look().life("w0") == "alive"
        sender.submit(episode("after"))
    sender.close()
    given += receiver.consume(10)
    counts = [trajectory.id for trajectory in given]
    assert sorted(counts) == sorted(set(counts))
    assert {"before", "after"} <= set(counts)
    assert observer.look().life("w0") == "left"


def test_what_a_dead_worker_sent_is_read_once_and_its_successor_goes_on() -> None:
    store = ShiftedStore(0.0)
    registry = Registry(store)
    observer = FleetObserver(registry, steady=lambda: store.now)
    receiver = TrajectoryReceiver(store, run_id=RUN)
    registry.write_replica(replica("w0"))
    first = TrajectorySender(store, run_id=RUN, worker_id="w0")
    first.submit(episode("a"))
    given = receiver.consume(10)
    first.submit(episode("b"))  # acknowledged, and then the machine is gone
    store.now += DEAD_SECONDS + 1
    assert observer.look().life("w0") == "dead"
    second = TrajectorySender(store, run_id=RUN, worker_id="w0")
    second.submit(episode("c"))
    first.submit(episode("d"))  # it was only cut off: both write under one name
    second.submit(episode("b"))  # and what one sent, the other sends again
    given += receiver.consume(10)
    assert sorted(trajectory.id for trajectory in given) == ["a", "b", "c", "d"]


def test_a_slow_line_makes_nobody_dead() -> None:
    store = open_store("memory://")
    Registry(store).write_replica(replica())
    behind = LinkedStore(store, LinkConfig(rate=1e6, rtt=0.05))
    snapshot = FleetObserver(Registry(behind)).look()
    assert snapshot.life("r1") == "alive"
    assert 0 <= snapshot.age("r1") < 1
