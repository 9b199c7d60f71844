"""What a run's records say of its load, for the scaling policy. No I/O, `now` is passed in."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from farcast.fleet.observe import FleetSnapshot
from farcast.fleet.records import StepRecord
from farcast.fleet.scaling import STEPS, Load

WINDOW_SECONDS = 60.0
"""A replica's rate is a mean over this long, a few batches of answers."""

SHORTEST_SECONDS = 5.0
"""Of work that a rate is taken from: less says nothing."""

_SERVING = ("serving", "staging", "waiting")


class _Tally(NamedTuple):
    at: float
    trajectories: int
    waiting_seconds: float


class LoadMeter:
    """Takes in snapshots, about one a second, and turns them into a `Load`."""

    def __init__(self, *, groups_per_step: int) -> None:
        self._groups_per_step = groups_per_step
        self._tallies: dict[str, deque[_Tally]] = {}

    def measure(self, snapshot: FleetSnapshot, now: float, *, coming: int = 0) -> Load:
        """`coming` replicas were started and are not in the records as serving."""
        serving = serving_replicas(snapshot)
        for name in self._tallies.keys() - serving:
            del self._tallies[name]
        for name in serving:
            self._take(name, snapshot, now)
        rates = [rate for name in serving if (rate := self._rate(name)) is not None]
        trained = [record for record in snapshot.steps if record.consumed][-STEPS:]
        used = sum(len(record.consumed) for record in trained)
        seconds = sum(record.step_seconds for record in trained)
        waited = sum(record.waited_seconds for record in trained)
        return Load(
            serving=len(serving),
            coming=coming,
            throughput=sum(rates) / len(rates) if rates else 0.0,
            demand=used / seconds if seconds > 0 else 0.0,
            waiting=waited / (waited + seconds) if seconds > 0 else 0.0,
            backlog=_unread(snapshot, serving) / self._groups_per_step,
            stale=_stale_share(trained, used),
            step=snapshot.step,
        )

    def _take(self, name: str, snapshot: FleetSnapshot, now: float) -> None:
        record = snapshot.replicas[name].record
        tallies = self._tallies.setdefault(name, deque())
        if tallies and record.trajectories < tallies[-1].trajectories:
            tallies.clear()  # it began anew
        tallies.append(_Tally(now, record.trajectories, record.waiting_seconds))
        while len(tallies) > 2 and now - tallies[1].at >= WINDOW_SECONDS:
            tallies.popleft()

    def _rate(self, name: str) -> float | None:
        """Trajectories a second of work; None while that was too short."""
        first, last = self._tallies[name][0], self._tallies[name][-1]
        worked = (last.at - first.at) - (last.waiting_seconds - first.waiting_seconds)
        made = last.trajectories - first.trajectories
        return made / worked if worked >= SHORTEST_SECONDS and made else None


def serving_replicas(snapshot: FleetSnapshot) -> list[str]:
    """Those that sample, or would if they might."""
    return [
        name
        for name, (record, _) in sorted(snapshot.replicas.items())
        if snapshot.life(name) == "alive" and record.version >= 0 and record.state in _SERVING
    ]


def _unread(snapshot: FleetSnapshot, serving: Sequence[str]) -> int:
    """Groups that wait for the trainer."""
    return sum(snapshot.replicas[name].record.unread for name in serving)


def _stale_share(trained: Sequence[StepRecord], used: int) -> float:
    stale = sum(len(record.dropped.get("stale", ())) for record in trained)
    return stale / (stale + used) if stale else 0.0
