"""How many replicas a run wants: enough that the trainer never waits, and no more. Pure.

The trainer uses `demand` trajectories a second while it does not wait; a replica makes `throughput`
of them while nothing holds it up. So the run wants

    demand * (1 + headroom) / throughput

replicas, rounded up. Three observations overrule this sum, since it is only as good as its means:
a trainer that waits although it should not wants one more, if it has waited in steps that were all
taken with the replicas that serve now; one whose unread backlog is a whole step wants no more than
there are; and where trajectories come too late to be used, one fewer.

`Scaler` keeps this steady. Up goes at once, at most to twice what serves, since a trainer that
waits costs more than a replica. Down goes to the most that was wanted during `calm_seconds`, and
those that are on their way count as there: so what takes long to start is not started twice, and
what one noisy step asks for is not stopped by the next one.

Worked example: 64 trajectories a step, 20 s a step without waiting, replicas of 0.9 a second:
3.2 * 1.15 / 0.9 = 4.1, so 5. With 2 serving: 4 first, 5 once these serve.

Refuses to guess: while the trainer was not heard of, or nothing is known of either rate, what is
there stays.
"""

import math
from collections import deque

import msgspec
from msgspec.structs import replace

from farcast.errors import ConfigError

AMPLE_BACKLOG = 1.0
"""Steps' worth of unread trajectories from which on more replicas only make them older."""

STEPS = 5
"""The trainer's rates are means over so many of its last steps."""

_HAIR = 1e-9
"""3.0000000001 replicas are three."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy keeps to."""

    least: int = 1
    most: int = 8
    headroom: float = 0.15
    """Answers differ in length, and a step takes the slowest groups of its share."""
    tolerated_waiting: float = 0.02
    """Share of its time that the trainer may wait."""
    tolerated_stale: float = 0.05
    """Share of trajectories that may be dropped as too old."""
    calm_seconds: float = 180.0

    def check(self) -> "Limits":
        """Raises `ConfigError` for limits that nothing satisfies."""
        if not 0 <= self.least <= self.most:
            raise ConfigError(
                f"At least {self.least} and at most {self.most} replicas cannot be; correct --min "
                "or --max."
            )
        return self


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet and its trainer over the last few steps."""

    serving: int
    coming: int = 0
    """Started, and not serving yet."""
    throughput: float = 0.0
    """Trajectories a second of one replica that nothing holds up; 0 where it is not known."""
    demand: float = 0.0
    """Trajectories a second that the trainer uses while it does not wait; 0: not known."""
    waiting: float = 0.0
    """Share of its time that the trainer waited for trajectories."""
    backlog: float = 0.0
    """Unread trajectories, in steps of the trainer."""
    stale: float = 0.0
    """Share of trajectories that were dropped as too old."""
    step: int = 0
    """The trainer's."""
    settled: bool = True
    """The steps that `waiting` is of were all taken with those that serve now."""

    @property
    def there(self) -> int:
        return self.serving + self.coming


def wanted_replicas(load: Load, limits: Limits) -> int:
    """How many replicas these figures ask for, by themselves."""
    if load.demand <= 0 or load.throughput <= 0:
        return _within(load.there, limits)
    needed = load.demand * (1 + limits.headroom) / load.throughput - _HAIR
    wanted = math.ceil(min(needed, limits.most))
    waits = load.waiting > limits.tolerated_waiting
    if waits and load.settled and not load.coming:
        wanted = max(wanted, load.serving + 1)
    if not waits:
        if load.backlog >= AMPLE_BACKLOG:
            wanted = min(wanted, load.there)
        if load.stale > limits.tolerated_stale:
            wanted = min(wanted, load.there - 1)
    return _within(wanted, limits)


class Scaler:
    """The policy with a memory. `now` is any clock that only goes forward."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits.check()
        self._wanted: deque[tuple[float, int]] = deque()
        self._since: float | None = None
        self._serving = -1
        self._changed_at = 0

    def decide(self, load: Load, now: float) -> int:
        """How many replicas there should be now."""
        limits = self._limits
        if load.serving != self._serving:
            self._serving, self._changed_at = load.serving, load.step
        settled = load.settled and load.step - self._changed_at >= STEPS
        wanted = wanted_replicas(replace(load, settled=settled), limits)
        self._wanted.append((now, wanted))
        self._since = now if self._since is None else self._since
        while now - self._wanted[0][0] > limits.calm_seconds:
            self._wanted.popleft()
        if wanted >= load.there:
            return min(wanted, max(load.there, _within(2 * load.serving, limits), 1))
        if now - self._since < limits.calm_seconds:  # not watched for long enough to give up any
            return _within(load.there, limits)
        most = max(asked for _, asked in self._wanted)
        return _within(min(load.there, most), limits)


def _within(count: int, limits: Limits) -> int:
    return min(max(count, limits.least), limits.most)
