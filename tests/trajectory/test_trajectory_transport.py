"""Nothing acknowledged is lost and nothing counts twice, whatever the store does in between."""

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from farcast.config import LinkConfig
from farcast.errors import (
    BacklogFullError,
    BrokenBatchError,
    ConfigError,
    FarcastError,
    FormatError,
    ObjectExistsError,
    RunMismatchError,
    StoreUnavailableError,
    TrajectoryTooLargeError,
)
from farcast.lineage.manifest import RUN_KEY
from farcast.store import LinkedStore, open_store
from farcast.store.counting import CountingStore
from farcast.store.memory import MemoryStore
from farcast.store.testing import Fail, FaultStore, FlipBit, LoseReply, Rule
from farcast.trajectory import (
    RoutedExperts,
    Trajectory,
    TrajectoryReceiver,
    TrajectorySender,
    encode_batch,
)
from farcast.trajectory.keys import TRAJECTORIES_PREFIX, WORKERS_PREFIX, batch_key
from farcast.trajectory.sender import RECALLED_BATCHES
from trajectory_world import RUN, episode, group, ids


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def sender(store: Any, worker: str = "w0", **options: Any) -> TrajectorySender:
    return TrajectorySender(store, RUN, worker, **options)


def receiver(store: Any, **options: Any) -> TrajectoryReceiver:
    return TrajectoryReceiver(store, RUN, **options)


def everything(store: Any) -> list[str]:
    return ids(receiver(store).consume(10_000))


def objects(store: Any) -> list[str]:
    return [info.key for info in store.list(TRAJECTORIES_PREFIX)]


def test_what_is_submitted_is_consumed_exactly() -> None:
    store = MemoryStore()
    given = [episode(f"t{i}") for i in range(5)]
    for one in given:
        sender(store).submit(one)
    assert receiver(store).consume(64) == given


def test_case_075_token_ids_come_home_as_sampled() -> None:
    """Two token sequences may read the same; what was sampled is what is trained on."""
    store = MemoryStore()
    sender(store).submit(episode(prompt=0, answer=2, turns=(), token_ids=(5, 6)))
    sender(store, "w1").submit(
        episode("t1", worker="w1", prompt=0, answer=1, token_ids=(7,), turns=())
    )
    assert [t.token_ids for t in receiver(store).consume(9)] == [(5, 6), (7,)]


def test_submitting_again_writes_nothing() -> None:
    store = MemoryStore()
    first = sender(store)
    first.submit_many(group("g"))
    first.submit_many(group("g"))
    first.submit(group("g")[2])
    again = sender(store)  # a worker that started anew
    again.submit_many(group("g"))
    again.submit_many([*group("h"), *group("h")])
    assert objects(store) == [batch_key("w0", 0), batch_key("w0", 1)]
    assert everything(store) == ids(group("g") + group("h"))


@pytest.mark.parametrize("fault", [Fail(), LoseReply()], ids=["not written", "reply lost"])
@pytest.mark.parametrize("same_batch", [True, False])
@pytest.mark.parametrize("restarted", [True, False])
def test_a_failed_submit_may_be_repeated(fault: Any, same_batch: bool, restarted: bool) -> None:
    store = FaultStore()
    one = sender(store)
    one.submit(episode("before"))
    store.add(Rule(fault, verb="put", prefix=TRAJECTORIES_PREFIX))
    with pytest.raises(StoreUnavailableError):
        one.submit(episode("t"))
    if restarted:
        one = sender(store)
    one.submit_many([episode("t")] if same_batch else [episode("t"), episode("u")])
    expected = ["before", "t"] if same_batch else ["before", "t", "u"]
    assert everything(store) == expected


@pytest.mark.parametrize("fault", [Fail(), LoseReply()], ids=["not done", "reply lost"])
@pytest.mark.parametrize("number", range(1, 16))
def test_every_store_call_may_fail_once(fault: Any, number: int) -> None:
    store = FaultStore()
    store.fail_call(number, fault)
    one, reader = sender(store), receiver(store)
    read: list[str] = []
    for name in ("a", "b", "c"):
        persist(partial(one.submit_many, group(name, 2)))
        read += ids(persist(partial(reader.consume, 3)))
    read += ids(persist(partial(reader.consume, 99)))
    assert read == ids(group("a", 2) + group("b", 2) + group("c", 2))


def persist(action: Callable[[], Any]) -> Any:
    for _ in range(20):
        with contextlib.suppress(StoreUnavailableError):
            return action()
    raise AssertionError("it never worked")


def test_two_processes_with_one_worker_id_overwrite_nothing() -> None:
    store = MemoryStore()
    one, two = sender(store), sender(store)
    _ = one.next_sequence, two.next_sequence
    errors: list[FarcastError] = []

    def submit(who: TrajectorySender, name: str) -> None:
        try:
            for i in range(50):
                who.submit(episode(f"{name}{i}"))
        except FarcastError as error:
            errors.append(error)

    threads = [threading.Thread(target=submit, args=a) for a in ((one, "a"), (two, "b"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorted(everything(store)) == sorted(f"{n}{i}" for n in "ab" for i in range(50))
    assert len(objects(store)) == 100


def test_one_id_submitted_by_two_processes_counts_once() -> None:
    store = MemoryStore()
    one, two = sender(store), sender(store)
    _ = one.next_sequence, two.next_sequence
    one.submit(episode("same"))
    two.submit_many([episode("same"), episode("other")])
    assert everything(store) == ["same", "other"]
    assert len(objects(store)) == 2


def test_an_id_written_twice_is_returned_once_and_counted() -> None:
    store = MemoryStore()
    sender(store).submit(episode("t"))
    batch = encode_batch([episode("t"), episode("u")], run_id=RUN, sequence=1)
    store.put(batch_key("w0", 1), batch)
    reader = receiver(store)
    assert ids(reader.consume(9)) == ["t", "u"]
    assert reader.duplicates == 1


def test_a_refusal_without_an_object_is_not_final() -> None:
    """Some stores answer 409 under load although nothing was stored."""
    store = FaultStore()
    store.add(Rule(Fail(ObjectExistsError("409")), verb="put", prefix=TRAJECTORIES_PREFIX))
    sender(store).submit(episode())
    assert everything(store) == ["t0"]


def test_case_085_large_submissions_are_split_and_a_single_giant_is_refused() -> None:
    store = MemoryStore()
    one = sender(store, max_batch_bytes=64 << 10, max_trajectory_bytes=64 << 10)
    with pytest.raises(TrajectoryTooLargeError):
        one.check([episode("small"), episode("giant", answer=60_000)])
    with pytest.raises(TrajectoryTooLargeError):
        one.submit_many([episode("small"), episode("giant", answer=60_000)])
    assert objects(store) == []
    many = group("g", 16, answer=3000)
    one.submit_many(many)
    one.submit(episode("normal"))
    assert all(info.size <= 64 << 10 for info in store.list(TRAJECTORIES_PREFIX))
    assert receiver(store).consume(99) == [*many, episode("normal")]


def test_a_trajectory_beyond_a_batch_goes_alone() -> None:
    store = MemoryStore()
    one = sender(store, max_batch_bytes=64 << 10)
    giant = episode("giant", answer=60_000)
    one.submit_many([episode("a"), giant, episode("b")])
    assert everything(store) == ["a", "giant", "b"]
    sizes = [info.size > 64 << 10 for info in store.list(TRAJECTORIES_PREFIX)]
    assert sizes.count(True) == 1


def test_what_models_of_different_shapes_routed_goes_in_batches_of_their_own() -> None:
    store = MemoryStore()
    several = [
        replace(episode(f"t{i}"), experts=RoutedExperts(layers=1 + i // 2, top_k=1, width=1, ids=b))
        for i, b in enumerate((b"a", b"b", b"cc", b"dd"))
    ]
    sender(store).submit_many(several)
    assert receiver(store).consume(9) == several
    assert len(objects(store)) == 2


def test_who_was_cut_off_finds_what_went_home_however_long_ago() -> None:
    """More batches than a start recalls lie between, written by others of the same name."""
    store = MemoryStore()
    first = sender(store)
    first.submit(episode("before"))
    since = first.next_sequence
    first.submit_many([episode("a"), episode("b")])
    other = sender(store)
    for number in range(RECALLED_BATCHES + 4):
        other.submit(episode(f"other{number}"))
    again = sender(store)
    again.submit_many([episode("a"), episode("b"), episode("new")], since=since)
    found = everything(store)
    assert sorted(found) == sorted(set(found))
    assert {"a", "b", "new"} <= set(found)


def test_more_trajectories_than_one_batch_counts_are_several_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("farcast.trajectory.header.MAX_BATCH_TRAJECTORIES", 16)
    store = MemoryStore()
    many = group("g", 70)
    sender(store).submit_many(many)
    assert len(objects(store)) == 8
    assert receiver(store).consume(99) == many


def test_case_081_backlog_is_bounded_by_number_and_by_bytes() -> None:
    store, clock = MemoryStore(), Clock()
    reader = receiver(store)
    one = sender(
        store,
        max_backlog_groups=10,
        position_of_reader=lambda: reader.positions().get("w0"),
        clock=clock,
        sleep=clock.sleep,
        wait_seconds=5,
    )
    for i in range(10):
        one.submit(episode(f"t{i}"))
    with pytest.raises(BacklogFullError) as refusal:
        one.submit(episode("over"))
    assert refusal.value.retry
    assert clock.now >= 5
    one.submit(episode("t3"))  # known already: no room needed
    assert len(objects(store)) == 10
    reader.consume(1)
    one.submit(episode("over"))
    assert reader.backlog() == {"w0": 10}
    assert one.backlog().batches == 10

    small = sender(store, "w1", max_backlog_bytes=1 << 16, position_of_reader=lambda: 0)
    many = [episode(f"s{i}", worker="w1", answer=1000) for i in range(100)]
    with pytest.raises(BacklogFullError):
        submit_each(small, many)
    assert sum(i.size for i in store.list(f"{TRAJECTORIES_PREFIX}w1/")) <= 1 << 16


def submit_each(one: TrajectorySender, many: list[Trajectory]) -> None:
    for trajectory in many:
        one.submit(trajectory)


def test_a_restarted_worker_still_knows_its_backlog() -> None:
    store = MemoryStore()
    for i in range(3):
        sender(store).submit(episode(f"t{i}"))
    backlog = sender(store, position_of_reader=lambda: 1).backlog()
    assert (backlog.batches, backlog.groups) == (2, 2)


def test_groups_are_counted_not_the_batches_that_hold_them() -> None:
    store = MemoryStore()
    one = sender(store, max_backlog_groups=3, position_of_reader=lambda: 0)
    one.submit_many([episode("a", group="a"), episode("b", group="b"), episode("c", group="a")])
    assert one.backlog()[:2] == (1, 2)
    assert not one.is_full()
    assert one.is_full(coming_groups=1)
    one.submit(episode("d", group="c"))
    with pytest.raises(BacklogFullError, match="has not read 3 groups"):
        one.submit(episode("e", group="d"))


def test_case_079_consume_crash_restore() -> None:
    store = MemoryStore()
    sender(store).submit_many([episode(f"t{i}") for i in range(8)])
    first = receiver(store)
    saved = json.loads(json.dumps(first.state()))
    assert ids(first.consume(2)) == ["t0", "t1"]
    second = receiver(store)  # the crash came before the checkpoint
    second.restore(saved)
    assert ids(second.consume(2)) == ["t0", "t1"]
    saved = json.loads(json.dumps(second.state()))
    third = receiver(store)  # and this one after it
    third.restore(saved)
    assert ids(third.consume(99)) == [f"t{i}" for i in range(2, 8)]
    assert third.positions() == {"w0": 1}
    assert third.consume(99) == []


def test_workers_take_turns_and_the_order_follows_from_the_state() -> None:
    store = MemoryStore()
    for name in ("c", "a", "b"):
        for i in range(3):
            sender(store, name).submit_many(
                [episode(f"{name}{i}{j}", worker=name) for j in range(2)]
            )
    reader = receiver(store)
    assert ids(reader.consume(3)) == ["a00", "a01", "b00"]
    state = reader.state()
    rest = ids(reader.consume(99))
    assert rest[:5] == ["b01", "c00", "c01", "a10", "a11"]
    for step in (1, 2, 5):
        again = receiver(store)
        again.restore(state)
        read: list[str] = []
        while more := again.consume(step):
            read += ids(more)
        assert read == rest


def test_workers_are_found_when_they_come() -> None:
    store, clock = FaultStore(), Clock()
    reader = receiver(store, clock=clock)
    assert reader.consume(9) == []
    sender(store, "late").submit(episode(worker="late"))
    assert ids(reader.consume(9)) == ["t0"]


def test_the_steady_state_lists_nothing() -> None:
    store, clock = FaultStore(), Clock()
    one, reader = sender(store), receiver(store, clock=clock)
    one.submit(episode("t"))
    reader.consume(9)
    before = store.counts()["list"]
    for i in range(20):
        one.submit(episode(f"t{i}"))
        assert ids(reader.consume(1)) == [f"t{i}"]
    assert store.counts()["list"] == before


def test_a_damaged_batch_is_refused_until_it_is_skipped() -> None:
    store = MemoryStore()
    one = sender(store)
    for name in ("a", "b", "c"):
        one.submit(episode(name))
    store.put(batch_key("w0", 1), b"cos\nsystem\n(S'true'\ntR.")
    reader = receiver(store)
    with pytest.raises(ConfigError):
        reader.skip("w0")
    assert ids(reader.consume(9)) == ["a"]
    state = reader.state()
    for _ in range(2):
        with pytest.raises(BrokenBatchError, match="Batch 1 of worker w0") as refusal:
            reader.consume(9)
        assert (refusal.value.worker_id, refusal.value.sequence) == ("w0", 1)
        assert isinstance(refusal.value.__cause__, FormatError)
    assert reader.state() == state
    reader.skip("w0")
    assert reader.skipped == 1
    assert ids(reader.consume(9)) == ["c"]


def test_damage_on_the_way_heals_by_reading_again() -> None:
    store = FaultStore()
    sender(store).submit(episode())
    for bit in range(0, 4000, 127):
        store.add(Rule(FlipBit(bit), verb="get", prefix=TRAJECTORIES_PREFIX))
        reader = receiver(store)
        with pytest.raises(BrokenBatchError):
            reader.consume(9)
        assert ids(reader.consume(9)) == ["t0"]
        reader.close()  # nothing that it still asks for meets the next one's damage


def test_a_lost_object_is_noticed_and_its_gap_passed_by_skip() -> None:
    store, clock = MemoryStore(), Clock()
    one = sender(store)
    for name in "abcde":
        one.submit(episode(name))
    for lost in (1, 2):
        store.delete(batch_key("w0", lost))
    reader = receiver(store, clock=clock)
    assert ids(reader.consume(9)) == ["a"]
    assert reader.consume(9) == []
    clock.now += 31
    for _ in range(2):
        with pytest.raises(BrokenBatchError, match="missing"):
            reader.consume(9)
    reader.skip("w0")
    assert ids(reader.consume(9)) == ["d", "e"]


WRONG = {
    "another run": lambda: encode_batch([episode()], run_id="run2", sequence=0),
    "another sequence": lambda: encode_batch([episode()], run_id=RUN, sequence=5),
    "another worker": lambda: encode_batch([episode(worker="w9")], run_id=RUN, sequence=0),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_batch_that_belongs_elsewhere_is_refused(what: str) -> None:
    store = MemoryStore()
    sender(store).submit(episode())
    store.put(batch_key("w0", 0), WRONG[what]())
    with pytest.raises(BrokenBatchError):
        receiver(store).consume(9)


def test_a_store_of_another_run_is_refused_by_both_ends() -> None:
    store = MemoryStore()
    store.put(RUN_KEY, b'{"format":1,"run_id":"run2","created":"now"}')
    with pytest.raises(RunMismatchError):
        sender(store).submit(episode())
    with pytest.raises(RunMismatchError):
        receiver(store).consume(1)
    assert objects(store) == []


def test_stray_objects_are_no_workers() -> None:
    store = MemoryStore()
    store.put(f"{WORKERS_PREFIX}a/b", b"")
    store.put(f"{WORKERS_PREFIX}{'x' * 200}", b"")
    sender(store).submit(episode())
    assert everything(store) == ["t0"]


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a\0b", ".", "x" * 129, "C:\\x"])
def test_ids_that_are_no_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        TrajectorySender(MemoryStore(), RUN, name)
    with pytest.raises(ConfigError):
        TrajectoryReceiver(MemoryStore(), name)


def test_a_sender_takes_only_its_own_workers_trajectories() -> None:
    with pytest.raises(FormatError, match="another worker"):
        sender(MemoryStore()).submit(episode(worker="w1"))


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"positions": {"../x": [0, 0]}},
        {"positions": {"w0": [-1, 0]}},
        {"positions": []},
        {"recent": "not base64!"},
        {"surplus": 1},
    ],
)
def test_a_state_that_is_not_valid_is_refused(change: dict[str, Any]) -> None:
    reader = receiver(MemoryStore())
    state = reader.state()
    with pytest.raises(FormatError):
        reader.restore(state | change)
    with pytest.raises(RunMismatchError):
        reader.restore(state | {"run_id": "run2"})
    assert reader.state() == state


def test_read_batches_are_discarded_once_the_checkpoint_has_passed_them() -> None:
    store = MemoryStore()
    one, reader = sender(store), receiver(store)
    for i in range(20):
        one.submit(episode(f"t{i}"))
    reader.consume(15)
    state = reader.state()
    reader.consume(5)
    assert reader.discard(state, keep=3) == 12
    assert reader.discard(state, keep=3) == 0
    assert objects(store)[0] == batch_key("w0", 12)
    restored = receiver(store)
    restored.restore(state)
    assert ids(restored.consume(99)) == [f"t{i}" for i in range(15, 20)]
    again = sender(store)
    again.submit(episode("t19"))
    again.submit(episode("new"))
    assert again.next_sequence == 21


def test_a_worker_whose_batches_were_all_discarded_goes_on_after_the_reader() -> None:
    store = MemoryStore()
    sender(store).submit(episode("a"))
    reader = receiver(store)
    reader.consume(1)
    reader.discard(reader.state(), keep=0)
    sender(store, position_of_reader=lambda: reader.positions()["w0"]).submit(episode("b"))
    assert ids(reader.consume(9)) == ["b"]


def test_no_secret_is_logged_or_said(caplog: pytest.LogCaptureFixture) -> None:
    secret = "SENTINELSECRET"
    store = FaultStore()
    store.add(Rule(Fail(StoreUnavailableError("down")), verb="put", prefix=TRAJECTORIES_PREFIX))
    with caplog.at_level(logging.DEBUG), contextlib.suppress(StoreUnavailableError):
        sender(store).submit(episode(metadata={"key": secret}))
    with pytest.raises(FormatError) as refusal:
        sender(store).submit(episode(metadata={"key": secret}, reward=float("nan")))
    assert secret not in caplog.text
    assert secret not in str(refusal.value)


def test_a_far_store_is_not_asked_for_one_batch_at_a_time() -> None:
    """64 batches of one worker, 20 ms away: read ahead, it takes a few round trips."""
    store = open_store("memory://")
    sender = TrajectorySender(store, RUN, "w0")
    sent = [episode(f"t{i}") for i in range(64)]
    for one in sent:
        sender.submit(one)
    far = LinkedStore(store, LinkConfig(rate=1e9, rtt=0.02))
    receiver = TrajectoryReceiver(far, RUN)
    began = time.monotonic()
    found = receiver.consume(64)
    seconds = time.monotonic() - began
    receiver.close()
    assert ids(found) == ids(sent), "in the order in which they were sent"
    assert seconds < 64 * 0.02 / 2


def test_what_was_read_ahead_counts_from_the_state_that_is_restored() -> None:
    store = open_store("memory://")
    sender = TrajectorySender(store, RUN, "w0")
    for i in range(32):
        sender.submit(episode(f"t{i}"))
    receiver = TrajectoryReceiver(store, RUN)
    first = receiver.consume(5)
    state = receiver.state()
    rest = receiver.consume(27)
    receiver.restore(state)
    assert ids(receiver.consume(27)) == ids(rest)
    receiver.close()
    again = TrajectoryReceiver(store, RUN)
    again.restore(state)
    assert ids(again.consume(27)) == ids(rest)
    assert len(first) + len(rest) == 32
    again.close()


def test_what_was_prefetched_takes_no_further_round_trip() -> None:
    store = MemoryStore()
    for i in range(6):
        sender(store).submit(episode(f"t{i}"))
    counted = CountingStore(store)
    reader = receiver(counted)
    first = reader.consume(2)
    state = reader.state()
    reader.prefetch()
    wait(reader._coming.values())
    assert reader.state() == state, "nothing moved"
    asked = counted.traffic.total_requests
    found = reader.consume(1)
    assert counted.traffic.total_requests == asked
    found += reader.consume(99)
    assert [*ids(first), *ids(found)] == [f"t{i}" for i in range(6)]


def test_what_was_not_there_when_prefetched_is_asked_for_again() -> None:
    store = MemoryStore()
    one, reader = sender(store), receiver(store)
    one.submit(episode("t0"))
    assert ids(reader.consume(9)) == ["t0"]
    reader.prefetch()
    wait(reader._coming.values())
    one.submit(episode("t1"))
    assert ids(reader.consume(9)) == ["t1"]


def test_a_failed_prefetch_is_no_error() -> None:
    store = FaultStore()
    sender(store).submit(episode("t0"))
    sender(store).submit(episode("t1"))
    reader = receiver(store)
    assert ids(reader.consume(1)) == ["t0"]
    store.add(Rule(Fail(), verb="get", times=None))
    reader.prefetch()
    wait(reader._coming.values())
    store.clear()
    assert ids(reader.consume(9)) == ["t1"]


def test_a_batch_that_was_broken_when_prefetched_is_read_again() -> None:
    store = FaultStore()
    for i in range(2):
        sender(store).submit(episode(f"t{i}"))
    reader = receiver(store)
    assert ids(reader.consume(1)) == ["t0"]
    store.add(Rule(FlipBit(100), verb="get", nth=1, times=1))
    reader.prefetch()
    wait(reader._coming.values())
    assert ids(reader.consume(9)) == ["t1"]


def test_prefetching_is_bounded_and_one_worker_more_is_found() -> None:
    store = MemoryStore()
    for i in range(40):
        sender(store, f"w{i:02}").submit(episode(f"t{i}", worker=f"w{i:02}"))
        sender(store, f"w{i:02}").submit(episode(f"u{i}", worker=f"w{i:02}"))
    clock = Clock()
    reader = receiver(store, clock=clock)
    taken = reader.consume(40)
    sender(store, "w99").submit(episode("late", worker="w99"))
    clock.now += 60
    reader.prefetch()
    assert len(reader._coming) <= 16
    wait(reader._coming.values())
    assert len({*ids(taken), *ids(reader.consume(99))}) == 81
