"""Ranks that publish one model together: the store looks as if one process had done it."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farcast.errors import (
    ConfigError,
    PoisonError,
    RankError,
    RankLostError,
    StoreUnavailableError,
    TensorMismatchError,
    VersionConflictError,
)
from farcast.publish import Publisher
from farcast.publish.pieces import Piece, assign
from farcast.store import MemoryStore
from farcast.store.archive import Archive
from farcast.store.base import Store
from farcast.store.testing import Fail, FaultStore, LoseReply, Rule
from shard_world import FakeDTensor, Meeting, ThreadComms, on_ranks
from version_world import RUN, bits_of, contents, rebuilt

PART_BYTES = 1000
Model = dict[str, np.ndarray[Any, Any]]


def model(step: int) -> Model:
    """Four sharded tensors (one with fewer rows than ranks), a plain one and a scalar."""
    rng = np.random.default_rng(3)
    made: Model = {
        f"layers.{i}.w": rng.integers(0, 1 << 16, (rows, 24), dtype=np.uint16)
        for i, rows in enumerate((16, 10, 3, 8))
    }
    made["norm"] = rng.normal(size=24).astype(np.float32)
    made["scale"] = np.asarray(1.0, np.float32)
    for earlier in range(1, step + 1):
        for name in ("layers.0.w", "layers.2.w", "norm"):
            made[name].flat[(earlier * 37) % made[name].size] += 1
    return made


def held(values: Model, rank: int, ranks: int) -> dict[str, Any]:
    """What one rank has of it: shards of the layers, whole copies of the others."""
    return {
        name: FakeDTensor(value, rank, ranks) if name.startswith("layers") else np.array(value)
        for name, value in values.items()
    }


class Ranks:
    """`size` publishers on one store; `stores` may differ by rank, to put a fault on one."""

    def __init__(
        self, size: int, store: Store, *, faulty: dict[int, Store] | None = None, **more: Any
    ):
        self.size = size
        self.meeting = Meeting(size, timeout=more.pop("timeout", 20.0))
        options = {"part_bytes": PART_BYTES, "anchor_every": 3, "workers": 1, **more}
        stores = faulty or {}
        made = on_ranks(
            size,
            lambda rank: Publisher(
                stores.get(rank, store),
                RUN,
                comms=ThreadComms(self.meeting, rank),
                **options,
            ),
        )
        for publisher in made:
            assert isinstance(publisher, Publisher), publisher
        self.publishers: list[Any] = made

    def each(self, work: Callable[[Any, int], Any]) -> list[Any]:
        return on_ranks(self.size, lambda rank: work(self.publishers[rank], rank))

    def publish(self, values: Model, step: int, **more: Any) -> list[Any]:
        return self.each(lambda p, rank: p.publish(held(values, rank, self.size), step, **more))


def one_process(versions: int, part_bytes: int) -> MemoryStore:
    store = MemoryStore()
    publisher = Publisher(store, RUN, part_bytes=part_bytes, anchor_every=3, writer="w", workers=1)
    for step in range(versions):
        publisher.publish(model(step), step)
    return store


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_write_exactly_what_one_process_writes(size: int) -> None:
    store = MemoryStore()
    ranks = Ranks(size, store, writer="w")
    for step in range(5):
        refs = ranks.publish(model(step), step)
        assert len(set(refs)) == 1, refs
    share = -(-sum(value.nbytes for value in model(0).values()) // size)
    assert contents(store) == contents(one_process(5, min(PART_BYTES, share)))
    for version in range(5):
        assert rebuilt(store, version) == bits_of(model(version))


def test_only_changes_travel_after_the_first_version() -> None:
    ranks = Ranks(4, MemoryStore())
    full = sum(value.nbytes for value in model(0).values())
    sent = []
    for step in range(3):
        before = sum(ranks.meeting.bytes_sent)
        ranks.publish(model(step), step)
        sent.append(sum(ranks.meeting.bytes_sent) - before)
    ranks.publish(model(2), 3)  # nothing changed
    assert sent[1] < sent[0]
    bits = ranks.publishers[0]._sharded._spreads[0].baseline
    assert sum(piece.data.nbytes for piece in bits.shard.values()) < full / 3
    assert all(
        sum(b.data.nbytes for b in p._sharded._spreads[0].baseline.owned.values()) < full / 2
        for p in ranks.publishers
    )


def test_ranks_send_each_other_the_change_and_each_looks_after_its_share() -> None:
    """16 tensors of 128 KiB, 1 % changed at random: under 1 % of the model travels."""
    rng = np.random.default_rng(1)
    values: Model = {
        f"layers.{i:02d}": rng.integers(0, 1 << 16, (256, 256), dtype=np.uint16) for i in range(16)
    }
    full = sum(value.nbytes for value in values.values())
    ranks = Ranks(4, MemoryStore(), part_bytes=1 << 30)
    ranks.publish(values, 0)
    before = sum(ranks.meeting.bytes_sent)
    for value in values.values():
        value.flat[rng.choice(value.size, value.size // 100, replace=False)] += 1
    assert ranks.publish(values, 1)[0].version == 1
    assert sum(ranks.meeting.bytes_sent) - before < 0.01 * full
    for publisher in ranks.publishers:
        baseline = publisher._sharded._spreads[0].baseline
        for kept in (baseline.owned, baseline.shard):
            assert sum(bits.data.nbytes for bits in kept.values()) == full // 4


@pytest.mark.parametrize("fault", [Fail(), LoseReply()], ids=["fail", "lose reply"])
@pytest.mark.parametrize("bad", [0, 1])
def test_case_073_a_rank_whose_put_fails_stops_all_and_the_retry_is_right(
    fault: Fail | LoseReply, bad: int
) -> None:
    """No manifest, no baseline moved, and the retry carries the right bits."""
    store = MemoryStore()
    broken = FaultStore(store)
    ranks = Ranks(2, store, faulty={bad: broken})
    ranks.publish(model(0), 0)
    changed = model(1)
    for name in ("layers.0.w", "layers.1.w", "layers.3.w", "norm"):  # every owner has to put
        changed[name].flat[1] += 1
    held_before = [id(p._sharded._spreads[0].baseline) for p in ranks.publishers]
    broken.add(Rule(fault, verb="put", prefix="objects/", nth=1))
    outcome = ranks.publish(changed, 1)
    assert isinstance(outcome[bad], StoreUnavailableError)
    assert isinstance(outcome[1 - bad], RankError)
    assert outcome[1 - bad].retry
    assert f"Rank {bad}" in str(outcome[1 - bad])
    assert Archive(store, RUN).newest(relist=True).version == 0
    assert [id(p._sharded._spreads[0].baseline) for p in ranks.publishers] == held_before
    for name in ("layers.1.w", "layers.3.w"):  # the retry comes with other bits
        changed[name].flat[5] += 3
    refs = ranks.publish(changed, 2)
    assert [ref.version for ref in refs] == [1, 1]
    assert rebuilt(store, 1) == bits_of(changed)


@pytest.mark.parametrize("times", [1, 4])
def test_a_lost_reply_to_the_commit_is_found_out(times: int) -> None:
    store = MemoryStore()
    broken = FaultStore(store)
    ranks = Ranks(2, store, faulty={0: broken})
    ranks.publish(model(0), 0)
    broken.add(Rule(LoseReply(), verb="put", prefix="versions/", times=times))
    outcome = ranks.publish(model(1), 1)
    assert isinstance(outcome[0], StoreUnavailableError)
    assert isinstance(outcome[1], RankError)
    for _ in range(times):
        refs = ranks.publish(model(2), 2)
        if not isinstance(refs[0], Exception):
            break
    assert refs[0] == refs[1]
    assert refs[0].version == 2
    assert rebuilt(store, 1) == bits_of(model(1))
    assert rebuilt(store, 2) == bits_of(model(2))
    assert Archive(store, RUN).manifest(2).anchor is None


def test_new_ranks_go_on_with_a_delta_whatever_their_number() -> None:
    store = MemoryStore()
    Ranks(2, store).publish(model(0), 0)
    for step, size in ((1, 3), (2, 1), (3, 4)):
        ranks = Ranks(size, store, anchor_every=100)
        assert ranks.publishers[0].newest.version == step - 1
        refs = ranks.publish(model(step), step)
        assert [ref.version for ref in refs] == [step] * size
        manifest = Archive(store, RUN).manifest(step)
        assert manifest.anchor is None
        assert manifest.changed <= 3
        assert rebuilt(store, step) == bits_of(model(step))


def test_a_tensor_that_came_or_went_makes_the_version_whole() -> None:
    store = MemoryStore()
    ranks = Ranks(2, store)
    ranks.publish(model(0), 0)
    other = {**model(1), "extra": np.ones(3, np.float32)}
    del other["scale"]
    ranks.publish(other, 1)
    assert Archive(store, RUN).manifest(1).anchor is not None
    assert rebuilt(store, 1) == bits_of(other)


def test_ranks_under_another_publisher_are_fenced() -> None:
    store = MemoryStore()
    ranks = Ranks(2, store)
    ranks.publish(model(0), 0)
    Publisher(store, RUN).publish(model(1), 1)
    for _ in range(2):
        outcome = ranks.publish(model(2), 2)
        assert isinstance(outcome[0], VersionConflictError)
        assert isinstance(outcome[1], RankError)
    assert Archive(store, RUN).newest(relist=True).version == 1


def test_repeating_the_last_step_writes_nothing() -> None:
    store = MemoryStore()
    ranks = Ranks(2, store)
    ranks.publish(model(0), 0)
    before = contents(store)
    refs = ranks.publish(model(0), 0)
    assert [ref.version for ref in refs] == [0, 0]
    assert contents(store) == before
    assert not ranks.publishers[1].last.written


def test_case_091_plain_and_sharded_tensors_mix_and_a_slow_rank_holds_nobody_up_for_good() -> None:
    """Case 091: no rank gathers (the fake fails the test if it does), rank 1 has no copy of the
    plain parameters, rank 0 is slow, and all take the same rounds."""
    store = MemoryStore()
    ranks = Ranks(2, store)

    def publish(publisher: Any, rank: int) -> Any:
        if rank == 0:
            time.sleep(0.2)
        tensors = held(model(0), rank, 2)
        if rank == 1:
            del tensors["norm"]
        return publisher.publish(tensors, 0)

    refs = ranks.each(publish)
    assert refs[0] == refs[1]
    assert rebuilt(store, 0) == bits_of(model(0))


def test_what_is_wrong_on_one_rank_is_an_error_on_all() -> None:
    store = MemoryStore()
    ranks = Ranks(2, store)
    steps = ranks.each(lambda p, rank: p.publish(held(model(0), rank, 2), rank))
    assert all(isinstance(error, ConfigError) for error in steps)
    empty = ranks.each(lambda p, rank: p.publish({} if rank else held(model(0), rank, 2), 0))
    assert isinstance(empty[0], RankError)
    assert isinstance(empty[1], ConfigError)
    missing = ranks.each(lambda p, rank: p.publish(held(model(0), rank, 3), 0))
    assert all(isinstance(error, TensorMismatchError) for error in missing)
    columns = ranks.each(
        lambda p, rank: p.publish({"w": FakeDTensor(np.ones((4, 4)), rank, 2, 1)}, 0)
    )
    assert all(isinstance(error, TensorMismatchError) for error in columns)
    assert Archive(store, RUN).newest() is None
    assert ranks.publish(model(0), 0)[0].version == 0


def test_poison_on_one_rank_is_refused_by_its_owner() -> None:
    store = MemoryStore()
    ranks = Ranks(2, store)
    ranks.publish(model(0), 0)
    poisoned = {**model(1), "norm": np.full(24, np.nan, np.float32)}
    outcome = ranks.publish(poisoned, 1)
    assert sorted(type(error).__name__ for error in outcome) == ["PoisonError", "RankError"]
    assert any(isinstance(error, PoisonError) and "'norm'" in str(error) for error in outcome)
    assert ranks.publish(poisoned, 1, allow_poison=True)[0].version == 1


def test_async_copies_before_it_returns_and_its_errors_come_with_the_job() -> None:
    store = MemoryStore()
    ranks = Ranks(2, store)

    def run(publisher: Any, rank: int) -> Any:
        values = model(0)
        job = publisher.publish_async(held(values, rank, 2), 0)
        for value in values.values():
            value.fill(0)
        bad = publisher.publish_async({}, 1)
        with pytest.raises(ConfigError):
            bad.result(10)
        return job.result(10)

    refs = ranks.each(run)
    assert refs[0] == refs[1]
    assert rebuilt(store, 0) == bits_of(model(0))


def test_a_rank_that_is_gone_ends_the_others_after_the_time_limit() -> None:
    ranks = Ranks(2, MemoryStore(), timeout=0.3)
    outcome = ranks.each(lambda p, rank: rank or p.publish(held(model(0), 0, 2), 0))
    assert isinstance(outcome[0], RankLostError)
    assert not outcome[0].retry


def test_what_ranks_do_not_do_is_said() -> None:
    with pytest.raises(ConfigError, match="Squashed"):
        Publisher(MemoryStore(), RUN, squash=4, comms=ThreadComms(Meeting(1), 0))
    ranks = Ranks(1, MemoryStore())
    ranks.publish(model(0), 0)
    with pytest.raises(ConfigError, match="one process"):
        ranks.publishers[0].rollback(0)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    ranks=st.integers(1, 6),
    part_bytes=st.integers(1, 200),
)
def test_every_byte_has_one_sender_and_every_tensor_one_owner(
    rows: list[int], ranks: int, part_bytes: int
) -> None:
    def layout(rank: int) -> tuple[Piece, ...]:
        counts = [len(np.array_split(np.arange(n), ranks)[rank]) for n in rows]
        return tuple(
            Piece(f"t{i}", "U8", (n, 5), rank, count * 5)
            for i, (n, count) in enumerate(zip(rows, counts, strict=True))
        )

    assignment = assign([layout(rank) for rank in range(ranks)], part_bytes=part_bytes)
    owned = [assignment.owned(rank) for rank in range(ranks)]
    assert sum(map(len, owned)) == len(rows)
    assert frozenset().union(*owned) == {f"t{i}" for i in range(len(rows))}
    for i, n in enumerate(rows):
        spans = assignment.spans[f"t{i}"]
        assert [s.start for s in spans] + [n * 5] == [0] + [s.end for s in spans]
    loads = [sum(rows[int(name[1:])] for name in names) for names in owned]
    biggest = max(max((sum(rows[int(n[1:])] for n in p) for p in assignment.parts), default=0), 1)
    assert max(loads) <= sum(rows) / ranks + biggest
