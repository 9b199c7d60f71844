"""Enough replicas that the trainer never waits, and no more: the policy alone, and in a played run
with a backlog, slow starts and noise."""

import math
import random
from collections import deque
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from farcast.errors import ConfigError
from farcast.fleet.load import LoadMeter
from farcast.fleet.observe import FleetSnapshot
from farcast.fleet.records import ReplicaRecord, StepRecord
from farcast.fleet.registry import Sighting
from farcast.fleet.scaling import Limits, Load, Scaler, wanted_replicas

LIMITS = Limits(least=1, most=64)

rates = st.one_of(st.just(0.0), st.floats(1e-3, 1e4))
shares = st.floats(0, 1)
loads = st.builds(
    Load,
    serving=st.integers(0, 100),
    coming=st.integers(0, 20),
    throughput=rates,
    demand=rates,
    waiting=shares,
    backlog=st.floats(0, 20),
    stale=shares,
)
limits = st.builds(
    lambda least, more: Limits(least=least, most=least + more),
    st.integers(0, 9),
    st.integers(0, 90),
)


@given(loads, limits)
def test_the_answer_keeps_to_the_limits(load: Load, limits: Limits) -> None:
    assert limits.least <= wanted_replicas(load, limits) <= limits.most
    assert 0 <= Scaler(limits).decide(load, 0.0) <= max(limits.most, 1)


@given(loads, st.floats(1, 10))
def test_a_hungrier_trainer_never_wants_fewer(load: Load, factor: float) -> None:
    more = replace(load, demand=load.demand * factor)
    if load.demand > 0:
        assert wanted_replicas(more, LIMITS) >= wanted_replicas(load, LIMITS)
    hungrier = replace(load, waiting=min(1.0, load.waiting + 0.1))
    assert wanted_replicas(hungrier, LIMITS) >= wanted_replicas(load, LIMITS)


@given(loads, st.floats(1, 10))
def test_faster_replicas_never_have_to_be_more(load: Load, factor: float) -> None:
    if load.throughput > 0:
        faster = replace(load, throughput=load.throughput * factor)
        assert wanted_replicas(faster, LIMITS) <= wanted_replicas(load, LIMITS)


@given(loads)
def test_a_whole_step_of_backlog_starts_nobody(load: Load) -> None:
    full = replace(load, backlog=1.5, waiting=0.0)
    assert wanted_replicas(full, LIMITS) <= max(load.there, LIMITS.least)


@given(loads)
def test_nothing_known_changes_nothing(load: Load) -> None:
    for unknown in (replace(load, demand=0.0), replace(load, throughput=0.0)):
        assert wanted_replicas(unknown, LIMITS) == min(max(load.there, 1), LIMITS.most)


def test_the_worked_example() -> None:
    load = Load(serving=2, throughput=0.9, demand=64 / 20, waiting=0.4)
    assert wanted_replicas(load, LIMITS) == 5
    assert Scaler(LIMITS).decide(load, 0.0) == 4
    assert Scaler(LIMITS).decide(replace(load, serving=4), 0.0) == 5


def test_fewer_only_after_a_while_in_which_nobody_asked_for_more() -> None:
    scaler = Scaler(LIMITS)
    calm = Load(serving=6, throughput=1.0, demand=2.0)
    assert [scaler.decide(calm, now) for now in (0, 60, 120, 179)] == [6] * 4
    hungry = replace(calm, demand=3.4)
    assert scaler.decide(hungry, 180) == 4  # never more than 4 were wanted in that time
    assert scaler.decide(replace(calm, serving=4), 200) == 4
    assert scaler.decide(replace(calm, serving=4), 361) == 3


def test_limits_that_nothing_satisfies() -> None:
    with pytest.raises(ConfigError, match="--min"):
        Scaler(Limits(least=3, most=2))


class Played(NamedTuple):
    waiting: float
    """Share of the last third that the trainer waited."""
    counts: list[int]
    started: int


class PlayedFleet:
    """A trainer and replicas, a second at a time: a step of `need` trajectories takes `step`
    seconds, a replica makes `rate` a second unless `room` of its are unread, and takes `start`
    seconds to come up. What the meter sees is what the records would say."""

    def __init__(
        self, *, need: int, step: float, rate: float, start: int = 30, room: int = 64, seed: int = 0
    ) -> None:
        self.need, self.step, self.rate, self.start, self.room = need, step, rate, start, room
        self.rng = random.Random(seed)
        self.coming: deque[int] = deque()
        self.unread: list[float] = []
        self.read = 0.0
        self.busy_until = -1.0
        self.waited = [0.0]
        self.steps: list[tuple[float, float]] = []

    def second(self, now: int) -> None:
        while self.coming and self.coming[0] <= now:
            self.coming.popleft()
            self.unread.append(0.0)
        for index, unread in enumerate(self.unread):
            if unread < self.room:
                self.unread[index] += self.rate * self.rng.uniform(0.5, 1.5)
        if now < self.busy_until:
            return
        for index, unread in enumerate(self.unread):  # it reads what there is while it waits
            taken = min(unread, self.need - self.read)
            self.unread[index], self.read = unread - taken, self.read + taken
        if self.read < self.need:
            self.waited[-1] += 1
            return
        self.read = 0.0
        seconds = self.step * self.rng.uniform(0.9, 1.1)
        self.busy_until = now + seconds
        self.steps.append((seconds, self.waited[-1]))
        self.waited.append(0.0)

    def load(self) -> Load:
        last = self.steps[-5:]
        seconds, waited = (sum(x) for x in zip(*last, strict=True)) if last else (0.0, 0.0)
        return Load(
            serving=len(self.unread),
            coming=len(self.coming),
            throughput=self.rate * self.rng.uniform(0.9, 1.1) if self.unread else 0.0,
            demand=len(last) * self.need / seconds if seconds else 0.0,
            waiting=waited / (waited + seconds) if seconds else 0.0,
            backlog=sum(self.unread) / self.need,
            step=len(self.steps),
        )

    def have(self, wanted: int, now: int) -> int:
        started = 0
        while len(self.unread) + len(self.coming) < wanted:
            self.coming.append(now + self.start)
            started += 1
        while len(self.unread) + len(self.coming) > wanted:
            if self.coming:
                self.coming.pop()
            else:
                self.unread.pop()
        return started


def play(fleet: PlayedFleet, limits: Limits, *, first: int = 1, seconds: int = 3600) -> Played:
    scaler = Scaler(limits)
    started = fleet.have(first, 0)
    counts = []
    tail = 0.0
    for now in range(seconds):
        before = sum(fleet.waited)
        fleet.second(now)
        if now % 5 == 0:
            started += fleet.have(scaler.decide(fleet.load(), now), now)
        counts.append(len(fleet.unread) + len(fleet.coming))
        if now >= 2 * seconds // 3:
            tail += sum(fleet.waited) - before
    return Played(tail / (seconds - 2 * seconds // 3), counts, started)


@pytest.mark.parametrize(
    ("need", "step", "rate", "first"),
    [(64, 20, 0.9, 1), (64, 20, 0.9, 20), (512, 30, 1.3, 1), (64, 60, 4.0, 5), (32, 10, 0.25, 2)],
)
def test_a_played_fleet_settles_where_the_trainer_does_not_wait(
    need: int, step: float, rate: float, first: int
) -> None:
    played = play(PlayedFleet(need=need, step=step, rate=rate), LIMITS, first=first)
    needed = need / step / rate
    tail = played.counts[-1200:]
    assert played.waiting <= 0.05
    assert math.ceil(needed) <= min(tail)
    assert max(tail) <= math.ceil(needed * 1.15 * 1.12) + 1
    assert len({*tail}) <= 2
    turns = [b - a for a, b in zip(played.counts, played.counts[1:], strict=False) if a != b]
    assert len(turns) <= 12  # it does not swing


def test_it_follows_a_trainer_that_changes_its_pace() -> None:
    fleet = PlayedFleet(need=64, step=20, rate=1.0)
    scaler = Scaler(LIMITS)
    fleet.have(1, 0)
    seen = {}
    for now in range(5400):
        fleet.step = 20 if now < 1800 or now >= 3600 else 8
        fleet.second(now)
        if now % 5 == 0:
            fleet.have(scaler.decide(fleet.load(), now), now)
        seen[now] = len(fleet.unread)
    assert 4 <= seen[1799] <= 5
    assert 9 <= seen[3599] <= 11
    assert 4 <= seen[5399] <= 5


def snapshot(
    *replicas: ReplicaRecord, steps: tuple[StepRecord, ...] = (), now: float = 100.0
) -> FleetSnapshot:
    return FleetSnapshot(None, steps, {r.replica_id: Sighting(r, now) for r in replicas}, now)


def replica(name: str, made: int, waited: float = 0.0, **fields: object) -> ReplicaRecord:
    told = {"state": "serving", "version": 1, **fields}
    return ReplicaRecord(
        replica_id=name,
        trajectories=made,
        waiting_seconds=waited,
        **told,  # type: ignore[arg-type]
    )


def trained(version: int, **fields: float) -> StepRecord:
    ids = tuple(f"t{version}-{i}" for i in range(8))
    return StepRecord(
        version=version,
        step=version,
        root="0" * 64,
        incarnation="a",
        consumed=ids,
        dropped={"stale": ids[:2]},
        **fields,  # type: ignore[arg-type]
    )


def test_the_meter_reads_rates_from_records() -> None:
    meter = LoadMeter(groups_per_step=4)
    steps = tuple(trained(v, step_seconds=2.0, waited_seconds=2.0) for v in range(1, 9))
    meter.measure(snapshot(replica("a", 10), replica("b", 0)), 0.0)
    load = meter.measure(
        snapshot(
            replica("a", 50, waited=10.0, unread=3),
            replica("b", 20, state="waiting", unread=1),
            replica("c", 0, state="joining", version=-1),
            replica("d", 9, state="stopped"),
            steps=steps,
        ),
        20.0,
        coming=1,
    )
    assert load.serving == 2
    assert load.coming == 1
    assert load.throughput == pytest.approx((40 / 10 + 20 / 20) / 2)
    assert load.demand == pytest.approx(4.0)
    assert load.waiting == pytest.approx(0.5)
    assert load.backlog == pytest.approx(1.0)
    assert load.stale == pytest.approx(0.2)


def test_a_replica_that_began_anew_is_measured_anew() -> None:
    meter = LoadMeter(groups_per_step=4)
    for now, made in ((0.0, 100), (10.0, 120), (20.0, 0), (26.0, 6)):
        load = meter.measure(snapshot(replica("a", made)), now)
    assert load.throughput == pytest.approx(1.0)
    assert meter.measure(snapshot(), 30.0).throughput == 0.0
