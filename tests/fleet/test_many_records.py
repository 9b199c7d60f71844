"""Whoever fills `fleet/replicas/` costs those who look a bounded number of reads, and hides nobody
who is alive."""

import itertools
import json
import logging

import pytest

from farcast.errors import LimitError
from farcast.fleet.observe import FleetObserver
from farcast.fleet.records import ReplicaRecord
from farcast.fleet.registry import MAX_LISTED, MAX_REPLICAS, Registry
from farcast.store import CountingStore, MemoryStore

MANY = 100_000


def filled(count: int) -> MemoryStore:
    """`count` records of nobody, and between them one of a replica that is alive."""
    ticks = itertools.count()
    store = MemoryStore(clock=lambda: next(ticks) / 1e5)
    for number in range(count):
        name = f"r{number:06d}"
        record = {"replica_id": name, "state": "serving", "version": 1}
        store.put(f"fleet/replicas/{name}.json", json.dumps(record).encode())
    Registry(store).write_replica(ReplicaRecord(replica_id="living", state="serving", version=7))
    return store


def test_a_hundred_thousand_records_cost_a_bounded_number_of_reads_and_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = CountingStore(filled(MANY))
    observer = FleetObserver(Registry(store))
    with caplog.at_level(logging.WARNING):
        for looks in (1, 2):
            snapshot = observer.look()
            # One more for the trainer's record, which is not there.
            assert store.traffic.requests["get"] == looks * (MAX_REPLICAS + 1)
    assert len(snapshot.replicas) == MAX_REPLICAS
    assert snapshot.replicas["living"].record.version == 7
    assert "r099999" in snapshot.replicas
    assert "r000000" not in snapshot.replicas
    (warning,) = caplog.messages
    assert f"at least {MANY + 1 - MAX_REPLICAS} records beyond the {MAX_REPLICAS}" in warning


def test_who_needs_all_records_is_told_that_there_are_more() -> None:
    with pytest.raises(LimitError, match=r"remove those of replicas that are gone\."):
        Registry(filled(MAX_REPLICAS)).replicas()


def test_a_list_without_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(10)
    (one, *_) = store.list("fleet/replicas/")
    listed = itertools.count()
    monkeypatch.setattr(
        store,
        "list",
        lambda prefix: (one._replace(key=f"{prefix}r{i:09d}.json") for i in listed),
    )
    Registry(store).replicas(damaged=lambda *_: None)
    assert next(listed) == MAX_LISTED
