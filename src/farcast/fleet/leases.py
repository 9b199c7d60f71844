"""Who of a run is alive, told by the store's own time. Pure but for the clock that is passed in.

A replica's lease is its record: a thread of its own rewrites it about once a second, whatever the
replica's main thread does. The store says when the record was last written, and what time it is
now. So no two machines' clocks are ever compared, and a machine whose clock is an hour off is
neither dead nor immortal.

    rewritten within SILENT_SECONDS     alive
    not for longer                      silent: a slow line, a pause of its machine
    not for DEAD_SECONDS                dead: its version needs no keeping, another may be started
    its last word was that it left      left

Being dead is an opinion and never a fact. One that comes back goes on under its own name: what it
sends stands under its own sequence numbers and counts once, and if the version that it holds is
gone it takes a newer one. So refuses nothing, and nothing exact may rest on it.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal

from farcast.errors import StoreAccessError, StoreFullError
from farcast.fleet.registry import Registry, Sighting

SILENT_SECONDS = 10.0
"""A replica writes its record about once a second; ten times that without one is silence."""

DEAD_SECONDS = 60.0
"""Longer than a machine is stopped for to be moved, or a store refuses with "slow down"."""

MARK_SECONDS = 60.0
"""How often the store is asked for its time again. Between, this machine counts seconds."""

Life = Literal["alive", "silent", "dead", "left"]

_LEFT = ("stopped", "failed")


class StoreClock:
    """The store's time as far as anybody can know it: never later than it is.

    A time that the store gave for something already written has passed there. Each such time,
    counted on by this machine's steady clock, is a bound from below, and the highest holds. A
    lease thus looks younger than it is, by less than a request takes, and never older.
    """

    def __init__(
        self, mark: Callable[[], float], *, steady: Callable[[], float] = time.monotonic
    ) -> None:
        """`mark` writes something and returns the store's time of it."""
        self._mark = mark
        self._steady = steady
        self._lock = threading.Lock()
        self._ahead: float | None = None
        self._asked: float | None = None

    def now(self) -> float:
        """Raises what the store raises. Who may not write there knows only what `saw` told."""
        begun = self._steady()
        if self._asked is None or begun - self._asked >= MARK_SECONDS:
            written: float | None = None
            with contextlib.suppress(StoreAccessError, StoreFullError):
                written = self._mark()
            with self._lock:
                self._asked = begun
                if written is not None:
                    # Begun anew: a clock here may have stood still, or the store's been set.
                    self._ahead = written - self._steady()
        return self._steady() + (self._ahead or 0.0)

    def saw(self, modified: float) -> None:
        """The store says that something was written at this time."""
        ahead = modified - self._steady()
        with self._lock:
            self._ahead = ahead if self._ahead is None else max(self._ahead, ahead)


def life(sighting: Sighting, now: float) -> Life:
    """How a replica stands at `now`, by the store's clock."""
    if sighting.record.state in _LEFT:
        return "left"
    return life_of(now - sighting.modified)


def life_of(age: float) -> Life:
    """How something stands whose record was rewritten `age` seconds ago."""
    if age > DEAD_SECONDS:
        return "dead"
    return "silent" if age > SILENT_SECONDS else "alive"


def held_versions(replicas: Mapping[str, Sighting], now: float) -> frozenset[int]:
    """Versions that replicas with a lease stand on: not to be removed."""
    return frozenset(
        sighting.record.version
        for sighting in replicas.values()
        if sighting.record.version >= 0 and life(sighting, now) in ("alive", "silent")
    )


def clock_of(registry: Registry, *, steady: Callable[[], float] = time.monotonic) -> StoreClock:
    """The clock of the store that holds these records."""
    return StoreClock(registry.mark_time, steady=steady)
