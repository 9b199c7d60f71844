"""Records are bounded, checked against their key, and evidence is never overwritten."""

import pytest
from msgspec.structs import replace

from farcast.dashboard.live import step_line
from farcast.errors import FormatError, LimitError, VersionConflictError
from farcast.fleet.observe import FleetObserver
from farcast.fleet.records import (
    MAX_RECORD_BYTES,
    MAX_REPLICA_BYTES,
    Receipt,
    ReplicaRecord,
    StepRecord,
    TrainerRecord,
)
from farcast.fleet.registry import Registry
from farcast.fleet.watching import TrainerWatch
from farcast.store import Store, open_store
from farcast.trajectory.receiver import MAX_WORKERS

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


def test_a_replicas_record_is_small_or_not_read(store: Store) -> None:
    """Whoever looks at a run reads all of them, and anybody may write some."""
    key = "fleet/replicas/r1.json"
    store.put(key, b'{"replica_id":"r1","state":"serving","version":1}' + b" " * MAX_REPLICA_BYTES)
    with pytest.raises(LimitError):
        Registry(store).replicas()
    store.put(key, b'{"replica_id":"r1","state":"serving","version":1' + b"0" * 30 + b"}")
    with pytest.raises(FormatError):
        Registry(store).replicas()


FORGED = [10**12, 1 << 63, 10**30, 10**5000]


@pytest.mark.parametrize("number", FORGED, ids=["13 digits", "2^63", "10^30", "10^5000"])
@pytest.mark.parametrize(
    ("key", "record"),
    [
        ("replicas/r1.json", '"replica_id":"r1","state":"serving","version":N'),
        ("steps/N.json", f'"version":N,"step":1,"root":"{ROOT}","incarnation":"a"'),
        (
            "receipts/r1/N.json",
            f'"replica_id":"r1","version":N,"root":"{ROOT}","staged_seconds":1,'
            '"commit_seconds":1,"bytes_fetched":1',
        ),
    ],
    ids=["replica", "step", "receipt"],
)
def test_a_forged_huge_version_is_refused_and_passed_over(
    store: Store, key: str, record: str, number: int
) -> None:
    """Also where it stands under the key that it would have."""
    registry = Registry(store)
    registry.write_replica(ReplicaRecord(replica_id="r0", state="serving", version=2))
    registry.put_step(step(0))
    registry.put_receipt(receipt(ROOT, 1.0))
    digits = f"1{'0' * 5000}" if number == FORGED[-1] else str(number)
    key = f"fleet/{key.replace('N', digits[:200])}"
    store.put(key, f"{{{record.replace('N', digits)}}}".encode())
    told: list[tuple[str, FormatError]] = []

    def note(key: str, error: FormatError) -> None:
        told.append((key, error))

    assert list(registry.replicas(damaged=note)) == ["r0"]
    assert [r.version for r in registry.steps(damaged=note)] == [0]
    assert [r.version for r in registry.receipts(damaged=note)] == [3]
    assert [key for key, _ in told] == [key]
    assert FleetObserver(registry).look().version == 0


@pytest.mark.parametrize("number", [-2, *FORGED[1:3]])
def test_a_step_that_none_was_resumed_from_is_refused(store: Store, number: int) -> None:
    data = f'{{"version":1,"step":1,"root":"{ROOT}","incarnation":"a","resumed_from":{number}}}'
    store.put("fleet/steps/000000000001.json", data.encode())
    with pytest.raises(FormatError, match="resumed_from"):
        list(Registry(store).steps())


STRAYS = {
    "fleet/replicas/notes.txt": b"hello",
    "fleet/replicas/r9.json": b"\x80\x04}",
    "fleet/replicas/copy.json": b'{"replica_id":"r1","state":"serving","version":2}',
    "fleet/steps/000000000001.json": b'{"version":1,"step":1,"loss":null',
    "fleet/steps/zzz": b"",
    "fleet/receipts/r1/x": b"[]",
}


def test_stray_and_damaged_records_are_told_and_do_not_hide_the_others(store: Store) -> None:
    registry = Registry(store)
    registry.write_replica(ReplicaRecord(replica_id="r1", state="serving", version=2))
    for version in (0, 2):
        registry.put_step(step(version))
    registry.put_receipt(receipt(ROOT, 1.0))
    for key, data in STRAYS.items():
        store.put(key, data)
    told: list[str] = []
    assert list(registry.replicas(damaged=lambda key, _: told.append(key))) == ["r1"]
    assert [r.version for r in registry.steps(damaged=lambda key, _: told.append(key))] == [0, 2]
    assert len(list(registry.receipts(damaged=lambda key, _: told.append(key)))) == 1
    assert sorted(told) == sorted(STRAYS)
    with pytest.raises(FormatError):
        list(registry.steps())


def test_a_look_at_a_run_survives_strays_and_a_damaged_trainers_record(store: Store) -> None:
    registry = Registry(store)
    trainer = TrainerRecord(run_id="run", state="done", version=3, step=3, positions={"r1": 7})
    registry.write_trainer(trainer)
    registry.put_step(step(0))
    observer = FleetObserver(registry)
    with TrainerWatch(registry, "r1") as watch:
        observer.look()
        for key, data in {**STRAYS, "fleet/trainer.json": b"\0" * 99}.items():
            store.put(key, data)
        snapshot = observer.look()
        assert (snapshot.trainer, snapshot.step) == (trainer, 0)
        watch._look()
        assert (watch.done, watch.position()) == (True, 7)


def test_a_step_whose_gradient_was_not_finite_has_a_record(store: Store) -> None:
    registry = Registry(store)
    record = StepRecord(version=1, step=1, root=ROOT, incarnation="a", loss=None, grad_norm=None)
    registry.put_step(record)
    assert list(registry.steps()) == [record]
    assert "not finite" in step_line(replace(record, consumed=("t",)), 8)


def test_the_largest_records_that_settings_allow_are_read(store: Store) -> None:
    registry = Registry(store)
    ids = tuple(f"0123456789ab-{i:06d}-{i % 64}" for i in range(1 << 16))
    registry.put_step(replace(step(1), consumed=ids))
    assert [len(record.consumed) for record in registry.steps()] == [1 << 16]
    workers = {f"{i:06d}-".ljust(128, "w"): 10**12 for i in range(MAX_WORKERS)}
    record = TrainerRecord(run_id="r", state="training", version=1, step=1, positions=workers)
    registry.write_trainer(record)
    assert registry.trainer() == record
