"""A replica's record is a fair account of it, and receipts arrive although the store did not."""

import time
from collections.abc import Callable

import pytest

from farcast.errors import StoreUnavailableError
from farcast.fleet import heartbeat, reporting, watching
from farcast.fleet.connecting import ReplicaStore
from farcast.fleet.heartbeat import Heartbeat
from farcast.fleet.records import Receipt, ReplicaRecord
from farcast.fleet.registry import Registry
from farcast.fleet.reporting import ReplicaReporter, default_id
from farcast.fleet.watching import TrainerWatch
from farcast.store import open_store
from farcast.types import NAME_PATTERN, VersionRef


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "WRITE_SECONDS", 0.01)


def ref(version: int, root: str = "a" * 64) -> VersionRef:
    return VersionRef("run", version, root)


def commit(reporter: ReplicaReporter, version: int, *, root: str = "a" * 64) -> None:
    reporter.committed(
        ref(version, root), staged_seconds=0.5, commit_seconds=0.02, bytes_fetched=9, bytes_full=90
    )


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_record_tells_what_happened() -> None:
    now = [100.0]
    store = open_store("memory://")
    registry = Registry(store)
    store.put("objects/x", b"x" * 77)
    read = ReplicaStore(store)
    read.get("objects/x", max_bytes=77)
    reporter = ReplicaReporter(registry, "r1", traffic=read, clock=lambda: now[0])
    assert reporter.record().version == -1
    with reporter:
        reporter.state("serving")
        commit(reporter, 3)
        assert reporter.record().commit_seconds == 0.0
        commit(reporter, 4)
        reporter.sampled(tokens=500, trajectories=8)
        record = reporter.record()
        assert (record.version, record.commits, record.trajectories) == (4, 2, 8)
        assert (record.tokens_per_second, record.bytes_fetched, record.bytes_full) == (50, 77, 180)
        assert record.commit_seconds == 0.02
        now[0] += 60
        assert reporter.record().tokens_per_second == 0
    assert registry.replicas()["r1"].record.state == "stopped"
    assert [receipt.version for receipt in registry.receipts()] == [3, 4]


def test_an_error_on_its_way_out_is_the_last_word() -> None:
    registry = Registry(open_store("memory://"))
    with pytest.raises(ZeroDivisionError), ReplicaReporter(registry, "r1"):
        raise ZeroDivisionError
    assert registry.replicas()["r1"].record.state == "failed"


def test_receipts_wait_for_a_store_that_is_away() -> None:
    class AwayAtFirst(Registry):
        calls = 0

        def put_receipt(self, receipt: Receipt) -> None:
            self.calls += 1
            if self.calls < 4:
                raise StoreUnavailableError("away; wait")
            super().put_receipt(receipt)

        def write_replica(self, record: ReplicaRecord) -> None:
            if self.calls < 4:
                raise StoreUnavailableError("away; wait")
            super().write_replica(record)

    registry = AwayAtFirst(open_store("memory://"))
    with ReplicaReporter(registry, "r1") as reporter:
        commit(reporter, 1)
        wait_until(lambda: any(registry.receipts()))
        reporter.check()


@pytest.mark.parametrize("held", [None, b"no receipt"], ids=["another root", "garbage"])
def test_a_receipt_in_whose_place_another_stands_ends_no_replica(
    held: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Anybody who may write to the store could put one there."""
    store = open_store("memory://")
    registry = Registry(store)
    with ReplicaReporter(registry, "r1") as reporter:
        commit(reporter, 1, root="b" * 64)
    if held is not None:
        store.put("fleet/receipts/r1/000000000001.json", held)
    with ReplicaReporter(registry, "r1") as reporter:
        commit(reporter, 1)
        commit(reporter, 2)
        wait_until(lambda: any(r.version == 2 for r in registry.receipts(damaged=lambda *_: None)))
        reporter.check()
    assert "receipt could not be left" in caplog.text


def test_a_default_id_is_a_name() -> None:
    assert NAME_PATTERN.fullmatch(default_id())


class _Fails(Registry):
    """Meets an error that nobody foresaw, from the second call on."""

    calls = 0

    def _fail(self, *_: object) -> None:
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError("unforeseen")

    write_trainer = write_replica = trainer = _fail  # type: ignore[assignment]


def test_no_thread_ends_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers take their backpressure, and their end, from what these threads write and read."""
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(watching, "LOOK_SECONDS", 0.01)

    def raises(check: Callable[[], object]) -> bool:
        try:
            check()
        except RuntimeError:
            return True
        return False

    with Heartbeat(_Fails(open_store("memory://")), "run") as beating:
        wait_until(lambda: raises(beating.check))
    with ReplicaReporter(_Fails(open_store("memory://")), "r1") as reporter:
        wait_until(lambda: raises(reporter.check))
    with TrainerWatch(_Fails(open_store("memory://")), "w1") as watch:
        wait_until(lambda: raises(lambda: watch.done))
