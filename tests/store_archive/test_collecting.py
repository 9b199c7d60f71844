"""What is removed is needed by nobody, whenever the collection stops."""

import pytest

from farcast.errors import ConfigError, FormatError, VersionConflictError
from farcast.lineage import RunRecord, first_kept, object_key, version_key
from farcast.publish import Publisher
from farcast.store import MemoryStore
from farcast.store.archive import Archive
from farcast.store.collecting import collect_garbage, find_garbage
from farcast.store.testing import Crash, FaultStore, Freeze
from version_world import RUN, bits_of, clone, contents, keys, rebuilt, tensors

VERSIONS = 14


def run_of(versions: int = VERSIONS) -> tuple[MemoryStore, Publisher]:
    """Anchors at 0, 5 and 10."""
    store = MemoryStore()
    archive = Archive(store, RUN)
    asset = archive.put_object(b"tokenizer")
    archive.create_run(RunRecord(run_id=RUN, created="now", assets={"tokenizer.json": asset}))
    publisher = Publisher(store, RUN, anchor_every=5)
    for step in range(versions):
        publisher.publish(tensors(step), step=step)
    return store, publisher


def check_usable(store: MemoryStore, first: int, last: int = VERSIONS) -> None:
    archive = Archive(store, RUN, workers=1)
    for version in range(first, last):
        assert rebuilt(store, version) == bits_of(tensors(version))
        start = archive.manifest(version).ref, archive.rebuild(version)
        archive.rebuild(last - 1, start)
    assert archive.get_object(archive.open_run().assets["tokenizer.json"]) == b"tokenizer"


@pytest.mark.parametrize(
    ("keep", "pinned", "first"),
    [
        (1, (), 10),
        (4, (), 10),
        (5, (), 5),
        (9, (), 5),
        (10, (), 0),
        (100, (), 0),
        (1, (11,), 10),
        (1, (7, 12), 5),
        (1, (3,), 0),
        (1, (99, -1), 10),
    ],
)
def test_what_is_kept_is_usable(keep: int, pinned: tuple[int, ...], first: int) -> None:
    store, publisher = run_of()
    before = contents(store)
    found = find_garbage(Archive(store, RUN), keep=keep, pinned=pinned, grace=0.0)
    assert contents(store) == before
    assert found.first_kept == first
    removed = publisher.collect_garbage(keep=keep, pinned=pinned, grace=0.0)
    assert removed == found
    assert removed.versions == tuple(range(first))
    left = contents(store)
    assert sum(map(len, before.values())) - sum(map(len, left.values())) >= removed.bytes
    check_usable(store, first)
    assert find_garbage(Archive(store, RUN), keep=keep, pinned=pinned, grace=0.0).objects == ()
    assert publisher.publish(tensors(VERSIONS), step=VERSIONS).version == VERSIONS
    assert rebuilt(store, VERSIONS) == bits_of(tensors(VERSIONS))


def test_the_plan_prints() -> None:
    store, _ = run_of()
    archive = Archive(store, RUN)
    text = str(find_garbage(archive, keep=1, grace=0.0))
    assert "versions up to the anchor at 10" in text
    assert "(0 to 9)" in text
    assert "nothing to remove" in str(find_garbage(archive, keep=100, grace=0.0))


def test_a_stop_anywhere_leaves_a_usable_run() -> None:
    start, _ = run_of()
    counted = FaultStore(clone(start))
    collect_garbage(Archive(counted, RUN), keep=1, grace=0.0)
    for index in range(1, len(counted.calls) + 1):
        store = FaultStore(clone(start))
        store.fail_call(index, Freeze())
        with pytest.raises(Crash):
            collect_garbage(Archive(store, RUN), keep=1, grace=0.0)
        left = clone(store.inner)
        check_usable(left, 10)
        for key in keys(left, "versions/"):  # no manifest names what is gone
            manifest = Archive(left, RUN).manifest(int(key[9:21]))
            assert {object_key(ref) for ref in manifest.objects} <= set(keys(left))
        collect_garbage(Archive(left, RUN), keep=1, grace=0.0)
        assert set(keys(left)) == set(keys(counted.inner))


def test_young_orphans_are_left_alone() -> None:
    store, publisher = run_of()
    fresh = Archive(store, RUN).put_object(b"of a version that is not committed yet")
    removed = publisher.collect_garbage(keep=1)
    assert removed.versions == tuple(range(10))
    assert removed.objects == ()
    assert object_key(fresh) in keys(store)
    publisher.collect_garbage(keep=1, grace=0.0)
    assert object_key(fresh) not in keys(store)


def test_a_version_that_comes_meanwhile_is_kept() -> None:
    start, _ = run_of()
    store = FaultStore(clone(start))
    publisher = Publisher(store.inner, RUN, anchor_every=5)

    def publish_first(call: object) -> None:
        if getattr(call, "verb", "") == "delete" and publisher.newest == newest:
            publisher.publish(tensors(0), step=77)  # its anchor's objects were about to go

    newest = publisher.newest
    store = FaultStore(store.inner, decide=publish_first)
    collect_garbage(Archive(store, RUN), keep=1, grace=0.0)
    assert rebuilt(store.inner, VERSIONS) == bits_of(tensors(0))


def test_only_the_publisher_of_the_newest_version_collects() -> None:
    store, first = run_of()
    second = Publisher(store, RUN)
    second.publish(tensors(20), step=20)
    with pytest.raises(VersionConflictError, match="leave the store"):
        first.collect_garbage(keep=1)
    second.collect_garbage(keep=1)


def test_doubt_removes_nothing() -> None:
    store, publisher = run_of()
    store.put(version_key(12), b"garbage")
    before = contents(store, "objects/")
    removed = collect_garbage(Archive(store, RUN), keep=1, grace=0.0)
    assert (removed.versions, removed.objects) == (tuple(range(10)), ())
    assert contents(store, "objects/") == before  # what version 12 named stays
    broken = MemoryStore()
    broken.put(version_key(0), b"garbage")
    with pytest.raises(FormatError):
        collect_garbage(Archive(broken, RUN), keep=1, grace=0.0)
    assert keys(broken) == [version_key(0)]
    with pytest.raises(ConfigError):
        publisher.collect_garbage(keep=0)
    assert first_kept({}, 1) == 0


def test_a_damaged_manifest_goes_with_its_neighbours() -> None:
    store, publisher = run_of()
    store.put(version_key(3), b"garbage")
    removed = publisher.collect_garbage(keep=1, grace=0.0)
    assert removed.versions == tuple(range(10))
    assert removed.objects
    check_usable(store, 10)


def test_the_store_stays_bounded() -> None:
    """Case 065, the unpruned twin: 100 versions."""
    store = MemoryStore()
    publisher = Publisher(store, RUN, anchor_every=5)
    sizes = []
    for step in range(100):
        publisher.publish(tensors(step), step=step)
        publisher.collect_garbage(keep=2, grace=0.0)
        sizes.append(sum(map(len, contents(store).values())))
    assert max(sizes[20:]) < 2 * max(sizes[:20])
    assert len(keys(store, "versions/")) <= 7
