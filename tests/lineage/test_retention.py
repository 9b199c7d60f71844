"""Old versions leave while the run goes on; nobody with a lease is left without a way on."""

import threading
from pathlib import Path

import pytest

from farcast.cli.main import main
from farcast.config import TrainConfig
from farcast.errors import UnknownVersionError
from farcast.fleet.accounting import Effective, Published, compare_roots
from farcast.fleet.records import ReplicaRecord, StepRecord, TrainerRecord
from farcast.fleet.registry import Registry
from farcast.fleet.retention import Retention
from farcast.lineage import RunRecord
from farcast.publish import Publisher
from farcast.replica import MemoryTarget, Subscriber
from farcast.store import MemoryStore, open_store
from farcast.store.archive import Archive
from farcast.store.testing import Fail, FaultStore, Rule
from version_world import RUN, bits_of, contents, keys, plain, tensors


def stands_on(registry: Registry, name: str, version: int, state: str = "serving") -> None:
    registry.write_replica(ReplicaRecord(replica_id=name, state=state, version=version))  # type: ignore[arg-type]


def collected(retention: Retention, version: int) -> None:
    retention.published(version)
    if retention._thread is not None:
        retention._thread.join()


def test_case_065_the_store_of_a_run_that_goes_on_is_bounded() -> None:
    """Also where replicas churn, and one holds on to an old version with its lease."""
    store = MemoryStore()
    registry = Registry(store)
    sizes, oldest = [], []
    with (
        Publisher(store, RUN, anchor_every=4) as publisher,
        Retention(publisher, registry, 8, grace=0.0) as retention,
    ):
        stands_on(registry, "slow", 30)
        stands_on(registry, "gone", 2, "stopped")
        for step in range(120):
            ref = publisher.publish(tensors(step), step=step)
            collected(retention, ref.version)
            sizes.append(sum(len(data) for key, data in contents(store).items() if "fl" not in key))
            oldest.append(int(keys(store, "versions/")[0][9:-5]))
            if step == 80:
                stands_on(registry, "slow", 30, "stopped")
    assert oldest[29] >= 16  # nobody needs the first ones: the one that stopped has no lease
    assert oldest[79] == 28  # the anchor before version 30
    assert oldest[-1] >= 100
    assert max(sizes[90:]) < 1.5 * max(sizes[:30])


def test_a_replica_with_a_lease_goes_on_and_one_without_starts_over() -> None:
    store = MemoryStore()
    registry = Registry(store)
    with (
        Publisher(store, RUN, anchor_every=4) as publisher,
        Retention(publisher, registry, 2, grace=0.0) as retention,
    ):
        publisher.publish(tensors(0), step=0)
        leased, silent = MemoryTarget(), MemoryTarget()
        here, away = (Subscriber(store, RUN, target) for target in (leased, silent))
        away.sync()
        for step in range(1, 6):
            publisher.publish(tensors(step), step=step)
        here.sync()
        stands_on(registry, "here", 5)
        for step in range(6, 30):
            collected(retention, publisher.publish(tensors(step), step=step).version)
        left = [int(key[9:-5]) for key in keys(store, "versions/")]
        assert left == list(range(4, 30))  # all that leads on from 5, and its anchor
        assert here.sync() == publisher.newest
        for _ in range(2):  # the next one by key is gone: it looks further
            away.sync()
        assert away.ref == publisher.newest
    assert plain(leased.tensors) == plain(silent.tensors) == bits_of(tensors(29))


def test_the_trainer_does_not_wait_and_an_error_ends_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = FaultStore()
    with Publisher(store, RUN, anchor_every=2) as publisher:
        for step in range(9):
            publisher.publish(tensors(step), step=step)
        store.add(Rule(Fail(), verb="delete", times=None))
        with Retention(publisher, Registry(store), 2, grace=0.0) as retention:
            begun = threading.active_count()
            retention.published(8)
            assert threading.active_count() <= begun + 1
        assert "old versions stay for now" in capsys.readouterr().out
        store.clear()
        with Retention(publisher, Registry(store), 2, grace=0.0) as retention:
            retention.published(8)
        assert len(keys(store.inner, "versions/")) == 3
        with Retention(publisher, Registry(store), None) as nothing:
            nothing.published(10**6)
        assert nothing._thread is None


def test_it_is_on_unless_a_run_says_otherwise() -> None:
    assert TrainConfig().keep_versions == 256
    assert TrainConfig().squash == 4


def test_gc_is_refused_beside_a_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(tmp_path)
    Archive(store, RUN).create_run(RunRecord(run_id=RUN, created="now"))
    with Publisher(store, RUN) as publisher:
        publisher.publish(tensors(0), step=0)
    registry = Registry(store)
    for state, status in (("training", 2), ("done", 0)):
        told = TrainerRecord(run_id=RUN, state=state, version=0, step=0)  # type: ignore[arg-type]
        registry.write_trainer(told)
        with pytest.raises(SystemExit) as left:
            main(["gc", "--store", str(tmp_path)])
        assert (left.value.code or 0) == status
    assert "collects for itself" in capsys.readouterr().err


def test_what_was_said_of_removed_versions_is_not_a_difference() -> None:
    root = "a" * 64
    published = [
        Published(version=v, step=v, root=root, by_delta=root, by_anchor="") for v in (5, 6)
    ]
    steps = Effective(
        kept=tuple(
            StepRecord(
                version=v,
                step=v,
                root=root,
                incarnation="t",
                changed=0,
                elements=0,
                bytes_sent=0,
                bytes_full=0,
            )
            for v in range(8)
        ),
        void=(),
        differences=(),
    )
    assert compare_roots(published, steps, [], {}) == [
        "version 7: the trainer names it, the store has no manifest"
    ]


def test_case_065_a_plan_made_before_a_collection_ends_on_a_newer_version() -> None:
    store = MemoryStore()
    with Publisher(store, RUN, anchor_every=3) as publisher:
        for step in range(4):
            publisher.publish(tensors(step), step=step)
        target = MemoryTarget()
        subscriber = Subscriber(store, RUN, target)
        planned = subscriber.plan()
        for step in range(4, 12):
            publisher.publish(tensors(step), step=step)
        removed = publisher.collect_garbage(keep=1, grace=0.0)
        assert planned.want.version in removed.versions
        with pytest.raises(UnknownVersionError):
            subscriber.sync(planned.want)
        assert target.ref is None
        assert subscriber.sync() == publisher.newest
    assert plain(target.tensors) == bits_of(tensors(11))
