"""Records are bounded, checked against their key, and evidence is never overwritten."""

import pytest

from farcast.errors import FormatError, LimitError, VersionConflictError
from farcast.fleet.records import (
    MAX_RECORD_BYTES,
    Receipt,
    ReplicaRecord,
    StepRecord,
    TrainerRecord,
)
from farcast.fleet.registry import Registry
from farcast.store import Store, open_store

ROOT, OTHER = "0" * 64, "1" * 64


@pytest.fixture
def store() -> Store:
    return open_store("memory://")


def step(version: int, root: str = ROOT) -> StepRecord:
    return StepRecord(version=version, step=version, root=root, incarnation="a")


def receipt(root: str, seconds: float) -> Receipt:
    return Receipt(
        replica_id="r1",
        version=3,
        root=root,
        staged_seconds=seconds,
        commit_seconds=0.0,
        bytes_fetched=1,
    )


def test_what_is_written_is_read(store: Store) -> None:
    registry = Registry(store)
    assert registry.trainer() is None
    assert registry.replicas() == {}
    trainer = TrainerRecord(run_id="run", state="training", version=3, step=3, positions={"r1": 2})
    replica = ReplicaRecord(replica_id="r1", state="serving", version=2)
    registry.write_trainer(trainer)
    registry.write_replica(replica)
    for version in (0, 1, 10, 2):
        registry.put_step(step(version))
    assert registry.trainer() == trainer
    assert registry.replicas()["r1"].record == replica
    assert [record.version for record in registry.steps()] == [0, 1, 2, 10]
    assert [record.version for record in registry.steps(after=1)] == [2, 10]


def test_a_step_is_put_once(store: Store) -> None:
    registry = Registry(store)
    registry.put_step(step(1))
    registry.put_step(step(1))
    with pytest.raises(VersionConflictError, match="only one trainer"):
        registry.put_step(step(1, OTHER))
    assert next(registry.steps()).root == ROOT


def test_a_replica_may_commit_again_but_not_with_another_root(store: Store) -> None:
    registry = Registry(store)
    registry.put_receipt(receipt(ROOT, 1.0))
    registry.put_receipt(receipt(ROOT, 2.0))
    assert [held.staged_seconds for held in registry.receipts()] == [1.0]
    with pytest.raises(VersionConflictError, match="two roots"):
        registry.put_receipt(receipt(OTHER, 1.0))


@pytest.mark.parametrize(
    "data",
    [b"", b"\x80\x04N.", b"[]", b'{"replica_id":"r1","state":"flying","version":1}'],
    ids=["empty", "pickle", "array", "state"],
)
def test_a_damaged_record_is_a_typed_error(store: Store, data: bytes) -> None:
    store.put("fleet/replicas/r1.json", data)
    with pytest.raises(FormatError, match="is not valid"):
        Registry(store).replicas()


def test_a_record_under_a_foreign_key_is_refused(store: Store) -> None:
    store.put("fleet/replicas/r2.json", b'{"replica_id":"r1","state":"serving","version":1}')
    with pytest.raises(FormatError, match="stray"):
        Registry(store).replicas()


def test_a_huge_record_is_not_read(store: Store) -> None:
    store.put("fleet/trainer.json", b" " * (MAX_RECORD_BYTES + 1))
    with pytest.raises(LimitError):
        Registry(store).trainer()
