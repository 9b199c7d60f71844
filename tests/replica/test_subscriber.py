"""What the subscriber decides: where to go, when to start over, what it costs."""

import pytest
from msgspec.structs import replace
from replica_world import World, held, weights

from farcast.delta import encode
from farcast.errors import (
    FormatError,
    IntegrityError,
    LimitError,
    ObjectNotFoundError,
    TargetChangedError,
    UnknownVersionError,
)
from farcast.lineage import ObjectRef, encode_manifest, object_key, version_key
from farcast.replica import MemoryTarget, Progress, SyncStats
from farcast.replica.subscriber import LATE_SECONDS, LOOK_EVERY
from farcast.store.archive import Archive
from farcast.store.testing import Fail, Rule, Stale
from version_world import RUN, bits_of


def test_case_055_a_stale_answer_never_leads_back() -> None:
    world, target = World(), MemoryTarget()
    for _ in range(5):
        world.publish()
    first = world.subscriber(target)
    assert first.sync() == world.refs[4]
    hidden = Fail(ObjectNotFoundError("not yet"))  # a new process whose store shows version 3
    world.store.add(Rule(hidden, verb="get", prefix=version_key(4), times=None))
    world.store.add(Rule(Stale(), verb="list", times=None))
    for _ in range(5):
        late = world.subscriber(target)
        assert late.stage() is None
        assert late.sync() == world.refs[4]
    assert held(target) == bits_of(weights(4))


def test_case_065_overtaken_by_garbage_collection_it_starts_over_on_a_newer_plan() -> None:
    world, target = World(anchor_every=3), MemoryTarget()
    for _ in range(4):
        world.publish()
    subscriber = world.subscriber(target, workers=1)
    subscriber.plan()  # the reader has read about version 3, and pauses
    for _ in range(6):
        world.publish()
    prune(world, keep_from=9)
    assert subscriber.sync() == world.refs[9]
    assert held(target) == bits_of(weights(9))


def test_case_065_objects_may_vanish_in_the_middle_of_a_fetch() -> None:
    world, target = World(anchor_every=3), MemoryTarget()
    world.publish()
    subscriber = world.subscriber(target, workers=1)
    subscriber.sync()
    for _ in range(2):
        world.publish()
    doomed = subscriber.plan()
    assert len(doomed.steps) == 2
    for _ in range(7):
        world.publish()
    prune(world, keep_from=9)
    assert subscriber.sync() == world.refs[9]
    assert held(target) == bits_of(weights(9))


def test_case_065_a_named_version_that_was_pruned_is_an_error() -> None:
    world, target = World(anchor_every=3), MemoryTarget()
    for _ in range(10):
        world.publish()
    subscriber = world.subscriber(target)
    subscriber.plan(to=5)
    prune(world, keep_from=9)
    with pytest.raises(UnknownVersionError):
        subscriber.sync(to=5)
    assert target.ref is None


def test_a_replica_that_slept_past_the_retention_finds_the_newest() -> None:
    world, target = World(anchor_every=3), MemoryTarget()
    world.publish()
    subscriber = world.subscriber(target)
    subscriber.sync()
    for _ in range(9):
        world.publish()
    prune(world, keep_from=9)
    assert subscriber.sync() == world.refs[0]  # version 1 by its key is gone, as if it were to come
    assert subscriber.sync() == world.refs[9]
    assert held(target) == bits_of(weights(9))


@pytest.mark.parametrize("quiet", [0, 3, 40])
def test_who_was_away_for_long_is_back_with_its_first_poll(quiet: int) -> None:
    """However long nothing was new before: a machine slept, or its line was down."""
    world, target, now = World(anchor_every=3), MemoryTarget(), 0.0
    world.publish()
    subscriber = world.subscriber(target, clock=lambda: now)
    for _ in range(1 + quiet):
        subscriber.sync()
        now += 1
    for _ in range(9):
        world.publish()
    prune(world, keep_from=9)
    now += LATE_SECONDS
    assert subscriber.sync() == world.refs[9]


def test_an_idle_follower_lists_ever_more_rarely_and_looks_at_its_own_version() -> None:
    world = World()
    world.publish()
    subscriber = world.subscriber(MemoryTarget())
    subscriber.sync()
    before = world.store.counts()
    for _ in range(4096):
        assert subscriber.stage() is None
    spent = {verb: count - before.get(verb, 0) for verb, count in world.store.counts().items()}
    assert spent.pop("put", 0) == 0
    assert spent.pop("list") == 8  # after 32, 64 and so on
    assert sum(spent.values()) < 4096 * 1.04


def test_a_version_removed_out_of_turn_is_passed_by_a_list() -> None:
    world, target = World(anchor_every=3), MemoryTarget()
    for _ in range(2):
        world.publish()
    subscriber = world.subscriber(target)
    subscriber.sync()
    for _ in range(2):
        world.publish()
    world.store.delete(version_key(2))  # out of turn: version 1 is still there
    for _ in range(LOOK_EVERY - 1):
        assert subscriber.stage() is None
    assert subscriber.sync() == world.refs[3]


def test_a_base_that_was_changed_is_the_targets_fault_and_heals_from_an_anchor() -> None:
    world, target = World(), MemoryTarget()
    world.publish()
    subscriber = world.subscriber(target)
    subscriber.sync()
    target.read("layer.weight").data[0] ^= 1
    world.publish()
    with pytest.raises(TargetChangedError, match=r"layer\.weight"):
        subscriber.sync()
    assert target.ref is None
    assert subscriber.plan().steps[0].kind == "anchor"
    assert subscriber.sync() == world.refs[1]
    assert held(target) == bits_of(weights(1))


def test_figures_and_progress_say_what_it_cost() -> None:
    world, seen = World(), list[Progress]()
    world.publish()
    subscriber = world.subscriber(MemoryTarget(), on_progress=seen.append)
    plan = subscriber.plan()
    staged = subscriber.stage()
    assert staged is not None
    assert staged.stats.commit_seconds == 0
    subscriber.commit(staged)
    full = sum(value.nbytes for value in weights(0).values())
    assert (subscriber.last.objects, subscriber.last.bytes_fetched) == (plan.objects, plan.bytes)
    assert subscriber.last.bytes_full == full
    assert subscriber.last.commit_seconds > 0
    assert [p.phase for p in seen if p.done == p.total] == ["fetch", "decode"]
    assert seen[-1] == Progress("decode", full, full)
    world.publish()
    subscriber.sync()
    assert subscriber.totals.versions == 2
    assert subscriber.totals.bytes_full == 2 * full
    assert SyncStats() + subscriber.totals == subscriber.totals


def test_a_steady_follower_asks_for_no_list() -> None:
    world = World()
    world.publish()
    subscriber = world.subscriber(MemoryTarget())
    subscriber.sync()
    before = world.store.counts().get("list", 0)
    for _ in range(8):
        world.publish()
        subscriber.sync()
    assert world.store.counts().get("list", 0) == before


def test_a_poll_without_news_is_one_request() -> None:
    world = World()
    world.publish()
    subscriber = world.subscriber(MemoryTarget())
    subscriber.sync()
    before = len(world.store.calls)
    assert subscriber.stage() is None
    assert [call.key for call in world.store.calls[before:]] == [version_key(1)]


def test_an_empty_target_is_not_looked_up() -> None:
    world = World()
    for _ in range(3):
        world.publish()
    world.store.clear()
    before = len(world.store.calls)
    world.subscriber(MemoryTarget(), workers=1).sync()
    asked = [call.key for call in world.store.calls[before:]]
    assert len(asked) == len(set(asked))
    assert asked.count(version_key(0)) == 1


def prune(world: World, *, keep_from: int) -> None:
    """Remove all versions before the anchor that `keep_from` needs, as a collector does."""
    archive = world.subscriber(MemoryTarget()).archive
    first = archive.manifest(keep_from).anchor_version
    needed = set()
    for version in range(first, len(world.refs)):
        manifest = archive.manifest(version)
        lists = [manifest.anchor or (), *(delta.objects for delta in manifest.deltas)]
        needed |= {f"objects/{ref.digest}" for refs in lists for ref in refs}
    for version in range(first):
        world.store.delete(version_key(version))
    for info in list(world.store.list("objects/")):
        if info.key not in needed:
            world.store.delete(info.key)


def damage(world: World, objects: tuple[ObjectRef, ...], fault: bytes | None = None) -> None:
    for ref in objects:
        data = bytearray(world.store.get(object_key(ref), max_bytes=ref.size))
        data[len(data) // 2] ^= 1
        world.store.put(object_key(ref), bytes(data) if fault is None else fault)


@pytest.mark.parametrize("fault", [None, b"", b"x" * 10_000_000], ids=["bit", "empty", "longer"])
def test_a_damaged_delta_is_passed_by_an_anchor(fault: bytes | None) -> None:
    """Without this a replica would wait for ever before it, while it serves an old version."""
    world, target = World(anchor_every=4), MemoryTarget()
    for _ in range(2):
        world.publish()
    subscriber = world.subscriber(target)
    assert subscriber.sync() == world.refs[1]
    world.publish()
    (delta,) = Archive(world.store, RUN).manifest(2).deltas
    damage(world, delta.objects, fault)
    for _ in range(2):  # nothing leads past it yet
        with pytest.raises((IntegrityError, LimitError)):
            subscriber.sync()
        assert subscriber.ref == world.refs[1]
    for _ in range(2):
        world.publish()
    assert subscriber.sync() == world.refs[4]
    assert held(target) == bits_of(weights(4))


def _other_than_promised(kind: str) -> bytes:
    """An object that a trainer could have written for version 2 and that is of no use."""
    base, target = weights(1), weights(2)
    if kind == "no delta":
        return b"not a delta"
    if kind == "other tensors":
        target = weights(3)
    else:  # made from other bits than those of version 1
        base["layer.weight"] = base["layer.weight"] * 2
    return encode(base, target)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["no delta", "other tensors", "other base"])
def test_a_delta_that_does_not_hold_what_its_version_promises_is_passed_by_an_anchor(
    kind: str, threads: int
) -> None:
    """Its bytes are what the manifest names, so it stays as it is however often it is fetched."""
    world, target = World(anchor_every=4), MemoryTarget()
    for _ in range(2):
        world.publish()
    subscriber = world.subscriber(target, threads=threads)
    assert subscriber.sync() == world.refs[1]
    world.publish()
    archive = Archive(world.store, RUN)
    manifest = archive.manifest(2)
    (delta,) = manifest.deltas
    useless = archive.put_object(_other_than_promised(kind))
    told = replace(manifest, deltas=(replace(delta, objects=(useless,)),))
    world.store.put(version_key(2), encode_manifest(told))
    with pytest.raises((IntegrityError, FormatError)):
        subscriber.sync()
    assert subscriber.ref == world.refs[1]
    for _ in range(2):
        world.publish()
    assert subscriber.sync() == world.refs[4]
    assert held(target) == bits_of(weights(4))


def test_a_manifest_with_other_figures_than_its_version_is_refused() -> None:
    world, target = World(), MemoryTarget()
    for _ in range(3):
        world.publish()
    manifest = Archive(world.store, RUN).manifest(2)
    for change in ({"tensors": 4}, {"bytes_full": 1}):
        world.store.put(version_key(2), encode_manifest(replace(manifest, **change)))
        with pytest.raises(IntegrityError, match="figures"):
            world.subscriber(target).sync()
    assert target.ref is None


def test_a_damaged_anchor_is_passed_by_deltas() -> None:
    world = World(anchor_every=2)
    for _ in range(4):
        world.publish()
    anchor = Archive(world.store, RUN).manifest(2).anchor
    assert anchor is not None
    damage(world, anchor)
    target = MemoryTarget()
    assert world.subscriber(target).sync() == world.refs[3]
    assert held(target) == bits_of(weights(3))
