"""Squashed deltas: few objects from any version to any later one, and the same bits."""

from typing import Any

import numpy as np
import pytest

from farcast.errors import ConfigError, StoreUnavailableError
from farcast.lineage import squash_spans
from farcast.publish import Publisher
from farcast.store import CountingStore, MemoryStore
from farcast.store.archive import Archive
from farcast.store.testing import Fail, FaultStore, LoseReply, Rule
from farcast.types import VersionRef
from version_world import RUN, Tensors, bits_of, copied, plain, rebuilt, tensors


def walk(versions: int, *, seed: int = 1) -> list[Tensors]:
    """Weights that drift: a few elements move each version, and tensors come and go."""
    rng = np.random.default_rng(seed)
    values: Tensors = {
        "a": rng.integers(0, 1 << 16, (50, 40), dtype=np.uint16),
        "b": rng.normal(size=(30, 30)).astype(np.float32),
        "still": np.arange(10, dtype=np.int64),
    }
    made = []
    for step in range(versions):
        for name in ("a", "b"):
            values[name].flat[rng.integers(0, values[name].size, 5)] += 1
        if step % 7 == 3:
            values["sometimes"] = np.full(step, step, np.uint8)
        if step % 7 == 6:
            del values["sometimes"]
        if step % 11 == 10:
            values["b"] = np.ascontiguousarray(values["b"].T if step % 2 else values["b"][1:])
        made.append(copied(values))
    return made


@pytest.fixture(scope="module")
def squashed() -> tuple[MemoryStore, list[Tensors]]:
    store, versions = MemoryStore(), walk(84)
    with Publisher(store, RUN, anchor_every=1000, squash=4, part_bytes=5000) as publisher:
        for step, values in enumerate(versions):
            publisher.publish(values, step=step)
    return store, versions


def test_versions_list_the_squashed_deltas_that_are_due(
    squashed: tuple[MemoryStore, list[Tensors]],
) -> None:
    archive = Archive(squashed[0], RUN)
    for version in range(1, 84):
        bases = [delta.base for delta in archive.manifest(version).deltas]
        spans = [version - base for base in bases]
        assert spans == [1, *squash_spans(version, 4)]
    assert [version - d.base for version in (64,) for d in archive.manifest(64).deltas] == [
        1,
        4,
        16,
        64,
    ]


def test_any_later_version_is_few_steps_away(squashed: tuple[MemoryStore, list[Tensors]]) -> None:
    archive = Archive(squashed[0], RUN)
    refs = [archive.manifest(version).ref for version in range(84)]
    longest = max(
        len(archive.plan(refs[have], refs[want]).steps)
        for have in range(84)
        for want in range(have, 84)
    )
    assert longest <= 2 * 3 * 3  # levels of 1, 4, 16 and one step of 64: at most 3 each way
    chain = sum(archive.manifest(v).deltas[0].objects[0].size for v in range(1, 81))
    assert archive.plan(refs[0], refs[80]).bytes < chain


def test_a_far_plan_reads_few_manifests(squashed: tuple[MemoryStore, list[Tensors]]) -> None:
    store = CountingStore(squashed[0])
    writer = Archive(squashed[0], RUN)
    for have in (None, 0, 5, 17, 49):
        reader = Archive(store, RUN, workers=1)
        start = None if have is None else writer.manifest(have).ref
        before = store.traffic.requests.get("get", 0)
        found = reader.plan(start, writer.manifest(83).ref)
        assert store.traffic.requests["get"] - before <= 20
        assert len(found.steps) <= 19
        assert reader.manifests_for(start, found.want).keys() >= {s.version for s in found.steps}


@pytest.mark.parametrize("version", [0, 5, 16, 64, 80])
def test_a_lost_fork_far_behind_starts_from_the_anchor(
    squashed: tuple[MemoryStore, list[Tensors]], version: int
) -> None:
    archive = Archive(squashed[0], RUN)
    found = archive.plan(VersionRef(RUN, version, "ee" * 32), archive.manifest(83).ref)
    assert found.steps[0].kind == "anchor"


@pytest.mark.parametrize("have", [None, 0, 1, 7, 15, 16, 30, 63, 79, 82])
def test_every_path_gives_the_same_bits(
    squashed: tuple[MemoryStore, list[Tensors]], have: int | None
) -> None:
    store, versions = squashed
    archive = Archive(store, RUN)
    start = None
    if have is not None:
        start = archive.manifest(have).ref, archive.rebuild(have)
    for want in (*range(16, 84, 13), 64, 83):
        assert plain(archive.rebuild(want, start)) == bits_of(versions[want])


def test_a_restart_goes_on_and_squashes_again() -> None:
    store, versions = MemoryStore(), walk(20)
    for first, last in ((0, 6), (6, 20)):
        publisher = Publisher(store, RUN, anchor_every=1000, squash=4)
        for step in range(first, last):
            publisher.publish(versions[step], step=step)
    archive = Archive(store, RUN)
    spans = {
        version: [version - delta.base for delta in archive.manifest(version).deltas]
        for version in (4, 8, 12, 16)
    }
    assert spans == {4: [1, 4], 8: [1], 12: [1, 4], 16: [1, 4]}
    for step, values in enumerate(versions):
        assert rebuilt(store, step) == bits_of(values)


@pytest.mark.parametrize("fault", [Fail(), LoseReply()], ids=["fail", "lose reply"])
def test_failures_in_between_leave_no_wrong_step(fault: Any) -> None:
    versions = walk(24)
    for nth in range(1, 12):
        store = FaultStore()
        publisher = Publisher(store, RUN, anchor_every=1000, squash=2, workers=1)
        for step, values in enumerate(versions):
            if step == 5:
                store.add(Rule(fault, verb="put", nth=nth))
            try:
                publisher.publish(values, step=step)
            except StoreUnavailableError:
                continue
        archive = Archive(store, RUN)
        newest = archive.newest()
        assert newest is not None
        for version in range(newest.version + 1):
            wanted = bits_of(versions[archive.manifest(version).step])
            assert rebuilt(store, version) == wanted
            start = archive.manifest(version // 2).ref, archive.rebuild(version // 2)
            assert plain(archive.rebuild(version, start)) == wanted


def test_dense_changes_are_not_kept_in_memory() -> None:
    rng = np.random.default_rng(0)
    store = MemoryStore()
    publisher = Publisher(store, RUN, anchor_every=1000, squash=2)
    for step in range(5):
        values = {"w": rng.integers(0, 1 << 16, 100_000, dtype=np.uint16)}
        publisher.publish(values, step=step)
    archive = Archive(store, RUN)
    assert [len(archive.manifest(version).deltas) for version in range(5)] == [0, 1, 1, 1, 1]


def test_the_schedule() -> None:
    assert squash_spans(0, 4) == ()
    assert squash_spans(6, 4) == ()
    assert squash_spans(8, 4) == (4,)
    assert squash_spans(64, 4) == (4, 16, 64)
    assert squash_spans(64, None) == ()
    assert max(squash_spans(2**40, 2)) == 1024
    for factor in (0, 1, -3, 5000):
        with pytest.raises(ConfigError):
            Publisher(MemoryStore(), RUN, squash=factor)


def test_rollback_publishes_earlier_content_under_a_new_number() -> None:
    store = MemoryStore()
    publisher = Publisher(store, RUN, anchor_every=4)
    for step in range(6):
        publisher.publish(tensors(step), step=step)
    ref = publisher.rollback(2)
    assert ref.version == 6
    archive = Archive(store, RUN)
    assert ref.root == archive.manifest(2).root
    assert archive.manifest(6).step == 2
    assert rebuilt(store, 6) == bits_of(tensors(2))
    assert rebuilt(store, 5) == bits_of(tensors(5))
    assert publisher.rollback(6) == ref  # it is what is newest: nothing to do
    assert publisher.publish(tensors(3), step=3).version == 7
    assert rebuilt(store, 7) == bits_of(tensors(3))
