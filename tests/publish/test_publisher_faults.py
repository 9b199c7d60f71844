"""A store that fails, lies or vanishes: nothing is lost, mixed or shown too early."""

from collections.abc import Callable
from typing import Any

import pytest

from farcast.delta import TensorBits
from farcast.errors import (
    FarcastError,
    IntegrityError,
    ObjectExistsError,
    StoreUnavailableError,
    VersionConflictError,
)
from farcast.publish import Publisher
from farcast.store import MemoryStore
from farcast.store.archive import Archive
from farcast.store.testing import (
    Crash,
    DropBytes,
    Fail,
    FaultStore,
    FlipBit,
    Freeze,
    LoseReply,
    Rule,
    Stale,
)
from version_world import RUN, bits_of, clone, contents, keys, rebuilt, tensors


def publisher_on(store: Any, **options: Any) -> Publisher:
    """One request at a time, several objects a version, an anchor at 2: every path is taken."""
    return Publisher(store, RUN, **{"workers": 1, "anchor_every": 2, "part_bytes": 300, **options})


def calls_of(action: Callable[[FaultStore], Any], store: MemoryStore) -> int:
    """How many store calls `action` makes on a copy of `store`."""
    counted = FaultStore(clone(store))
    action(counted)
    return len(counted.calls)


def world(versions: int = 2) -> MemoryStore:
    store = MemoryStore()
    publisher = publisher_on(store)
    for step in range(versions):
        publisher.publish(tensors(step), step=step)
    return store


@pytest.mark.parametrize("fault", [Fail(), LoseReply()], ids=["fail", "lose reply"])
def test_case_001_the_baseline_moves_only_with_a_commit(fault: Fail | LoseReply) -> None:
    """Whichever call of publish(2) fails, version 3 carries both changes."""
    before = world()

    def publish_2(store: FaultStore) -> int:
        publisher = publisher_on(store)
        start = len(store.calls)
        publisher.publish(tensors(2), step=2)
        return len(store.calls) - start

    calls = publish_2(FaultStore(clone(before)))
    assert calls >= 4
    failed = 0
    for index in range(1, calls + 1):
        store = FaultStore(clone(before))
        publisher = publisher_on(store)
        store.fail_call(index, fault)
        try:
            publisher.publish(tensors(2), step=2)
        except StoreUnavailableError:
            failed += 1
        store.clear()
        ref = publisher.publish(tensors(3), step=3)
        have = Archive(store.inner, RUN)
        base = have.manifest(1).ref, have.rebuild(1)
        found = have.rebuild(ref.version, base)
        assert {n: b.data.tobytes() for n, b in found.items()} == {
            n: bits[2] for n, bits in bits_of(tensors(3)).items()
        }
        for version in range(ref.version + 1):
            step = have.manifest(version).step
            assert rebuilt(store.inner, version) == bits_of(tensors(step))
    # A put of what is already there has no reply to lose.
    assert failed == calls if isinstance(fault, Fail) else failed >= 2


def test_a_lost_reply_to_a_commit_is_found_out_later() -> None:
    store = FaultStore(clone(world()))
    publisher = publisher_on(store)
    store.add(Rule(LoseReply(), verb="put", prefix="versions/"))
    with pytest.raises(StoreUnavailableError):
        publisher.publish(tensors(2), step=2)
    assert publisher.newest is not None
    assert publisher.newest.version == 1
    # The same again: it was there all along.
    assert publisher.publish(tensors(2), step=2).version == 2
    assert rebuilt(store, 2) == bits_of(tensors(2))
    store.add(Rule(LoseReply(), verb="put", prefix="versions/"))
    with pytest.raises(StoreUnavailableError):
        publisher.publish(tensors(3), step=3)
    # Something else: version 3 stays what it is, this becomes version 4.
    assert publisher.publish(tensors(4), step=4).version == 4
    assert rebuilt(store, 3) == bits_of(tensors(3))
    assert rebuilt(store, 4) == bits_of(tensors(4))


def test_a_commit_that_arrives_late_is_recognised() -> None:
    """The request times out, is seen as absent, and lands only after the next try began."""
    store = FaultStore(clone(world()))
    publisher = publisher_on(store)
    store.add(Rule(Fail(), verb="put", prefix="versions/", times=2))
    for step in (2, 3):
        with pytest.raises(StoreUnavailableError):
            publisher.publish(tensors(step), step=step)
    # The first of the two lands now.
    twin = clone(world())
    publisher_on(twin, writer=publisher._how.writer).publish(tensors(2), step=2)
    for key, data in contents(twin).items():
        store.inner.put(key, data)
    assert publisher.publish(tensors(4), step=4).version == 3
    assert rebuilt(store, 2) == bits_of(tensors(2))
    assert rebuilt(store, 3) == bits_of(tensors(4))


@pytest.mark.parametrize("start", [0, 2])
def test_case_067_stopping_after_any_call_leaves_whole_versions(start: int) -> None:
    """Case 067: killed after each store call, readers see the version before, or the new one;
    a restarted trainer goes on."""
    before = world(start)

    def whole(store: FaultStore) -> None:
        publisher_on(store).publish(tensors(start), step=start)

    calls = calls_of(whole, before)
    for index in range(1, calls + 1):
        store = FaultStore(clone(before))
        store.fail_call(index, Freeze())
        with pytest.raises(Crash):
            whole(store)
        left = store.inner
        newest = Archive(left, RUN).newest()
        # The last call follows the commit: it looks whether the place was really free.
        step = start if index == calls else start - 1
        assert (newest is None) if step < 0 else (newest is not None and newest.step == step)
        if newest is not None:
            assert rebuilt(left, newest.version) == bits_of(tensors(newest.step))
        again = publisher_on(left)
        ref = again.publish(tensors(start), step=start)
        assert ref.version == start
        assert again.publish(tensors(start + 1), step=start + 1).version == start + 1
        for version in range(start + 2):
            assert rebuilt(left, version) == bits_of(tensors(version))


def test_a_crash_after_the_commit_leaves_the_new_version() -> None:
    store = FaultStore(clone(world()))
    publisher = publisher_on(store)
    store.add(Rule(LoseReply(Crash()), verb="put", prefix="versions/"))
    with pytest.raises(Crash):
        publisher.publish(tensors(2), step=2)
    again = publisher_on(store.inner)
    assert again.newest is not None
    assert again.newest.version == 2
    assert again.publish(tensors(2), step=2).version == 2
    assert again.publish(tensors(3), step=3).version == 3


def test_case_049_an_object_cut_short_stays_out_of_reach_and_is_replaced() -> None:
    """Case 049: half an object under its final key, then the same version again."""
    store = FaultStore(clone(world()))
    publisher = publisher_on(store)
    seen = set(keys(store))
    store.add(Rule(DropBytes(10, 10**9), verb="put", prefix="objects/"))
    store.add(Rule(Fail(), verb="put", prefix="objects/", nth=2))
    with pytest.raises(StoreUnavailableError):
        publisher.publish(tensors(2), step=2)
    assert len(set(keys(store)) - seen) == 1
    assert Archive(store, RUN).newest() == Archive(store, RUN).manifest(1)
    publisher.publish(tensors(2), step=2)
    assert rebuilt(store, 2) == bits_of(tensors(2))


@pytest.mark.parametrize("damage", [DropBytes(20, 7), FlipBit(99)])
def test_case_051_bytes_lost_in_a_put_are_never_served(damage: DropBytes | FlipBit) -> None:
    """Case 051: the store reports success and the full size."""
    store = FaultStore()
    store.add(Rule(damage, verb="put", prefix="objects/"))
    publisher = publisher_on(store)
    publisher.publish(tensors(), step=0)
    with pytest.raises(IntegrityError, match="damaged"):
        rebuilt(store, 0)
    with pytest.raises(IntegrityError) as caught:
        publisher_on(store)
    assert any("reanchor=True" in note for note in caught.value.__notes__)
    healed = publisher_on(store, reanchor=True)
    assert healed.publish(tensors(1), step=1).version == 1
    assert rebuilt(store, 1) == bits_of(tensors(1))


def test_publishing_the_same_content_again_heals_a_damaged_object() -> None:
    store = FaultStore()
    store.add(Rule(FlipBit(99), verb="put", prefix="objects/"))
    publisher_on(store).publish(tensors(), step=0)
    publisher_on(store, reanchor=True).publish(tensors(), step=0)
    assert rebuilt(store, 0) == bits_of(tensors())
    assert rebuilt(store, 1) == bits_of(tensors())


def test_case_043_every_flipped_bit_is_noticed() -> None:
    """Case 043."""
    store = world(4)
    wanted = bits_of(tensors(3))
    for key, data in contents(store).items():
        for sample in range(32):
            bit = sample * 8 * len(data) // 32 + sample % 8
            bad = bytearray(data)
            bad[bit // 8] ^= 1 << bit % 8
            twin = clone(store)
            twin.put(key, bytes(bad))
            try:
                found = rebuilt(twin, 3)
            except FarcastError:
                continue
            assert found == wanted  # the damaged object was not needed
    for key, data in contents(store, "objects/").items():
        for cut in (data[:-1], data + b"x", b""):
            twin = clone(store)
            twin.put(key, cut)
            try:
                assert rebuilt(twin, 3) == wanted
            except FarcastError:
                continue


def test_case_053_a_refusal_with_nothing_there_is_not_final() -> None:
    """Case 053: "somebody else holds it" although nothing was stored."""
    for prefix in ("objects/", "versions/"):
        store = FaultStore(clone(world()))
        publisher = publisher_on(store)
        store.add(Rule(Fail(ObjectExistsError("busy")), verb="put", prefix=prefix, times=2))
        assert publisher.publish(tensors(2), step=2).version == 2
        assert rebuilt(store, 2) == bits_of(tensors(2))
        store.add(Rule(Fail(ObjectExistsError("busy")), verb="put", prefix=prefix, times=None))
        with pytest.raises(StoreUnavailableError, match="holds nothing there"):
            publisher.publish(tensors(3), step=3)


def test_readers_may_lag_but_never_go_back() -> None:
    """Case 055."""
    store = FaultStore(clone(world(4)))
    reader = Archive(store, RUN)
    newest = reader.newest()
    assert newest is not None
    assert newest.version == 3
    publisher_on(store.inner).publish(tensors(4), step=4)
    store.add(Rule(Stale(), verb="get", prefix="versions/", times=1))
    seen = [reader.newest() for _ in range(5)]
    assert [m.version for m in seen if m is not None] == [4, 4, 4, 4, 4] or [
        m.version for m in seen if m is not None
    ] == [3, 4, 4, 4, 4]
    store.add(Rule(Stale(), times=None))
    seen = [reader.newest(relist=True) for _ in range(5)]
    assert [m.version for m in seen if m is not None] == [4] * 5


def test_two_publishers_on_one_run() -> None:
    """Exactly one wins each version; the other is told, and stays fenced."""
    store = world()
    first, second = publisher_on(store), publisher_on(store)
    assert first.publish(tensors(2), step=2).version == 2
    for step in (2, 3):
        with pytest.raises(VersionConflictError, match="one trainer"):
            second.publish(tensors(step), step=step)
    with pytest.raises(VersionConflictError, match="one trainer"):
        second.publish_async(tensors(3), step=3).result()
    assert first.publish(tensors(3), step=3).version == 3
    for version in range(4):
        assert rebuilt(store, version) == bits_of(tensors(version))


def test_a_paused_publisher_that_wakes_in_doubt_is_fenced() -> None:
    """Its commit went through without a reply, and meanwhile a successor built on it."""
    store = FaultStore(clone(world()))
    paused = publisher_on(store)
    store.add(Rule(LoseReply(), verb="put", prefix="versions/"))
    with pytest.raises(StoreUnavailableError):
        paused.publish(tensors(2), step=2)
    successor = publisher_on(store)
    assert successor.publish(tensors(3), step=3).version == 3
    for _ in range(2):
        with pytest.raises(VersionConflictError, match="superseded"):
            paused.publish(tensors(9), step=9)
    assert successor.publish(tensors(4), step=4).version == 4
    for version in range(5):
        assert rebuilt(store, version) == bits_of(tensors(version))


def test_an_interrupt_while_the_baseline_moves_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = world()
    publisher = publisher_on(store)
    calls = 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    real = TensorBits.copied
    monkeypatch.setattr(TensorBits, "copied", interrupted)
    with pytest.raises(KeyboardInterrupt):
        publisher.publish(tensors(2), step=2)
    monkeypatch.undo()
    assert publisher.publish(tensors(3), step=3).version == 3
    assert rebuilt(store, 2) == bits_of(tensors(2))
    assert rebuilt(store, 3) == bits_of(tensors(3))


def test_an_error_carries_no_secret() -> None:
    """Case 103, failing calls included."""
    store = FaultStore(clone(world()))
    publisher = publisher_on(store)
    store.add(Rule(Fail(RuntimeError("SENTINELSECRET")), verb="put"))
    job = publisher.publish_async(tensors(2), step=2)
    with pytest.raises(RuntimeError):
        job.result()
    assert publisher.publish(tensors(2), step=2).version == 2
