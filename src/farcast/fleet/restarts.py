"""When a replica that crashed may start again: soon, then later, and not for ever.

A crash by chance (a full memory, a lost machine) is worth another start. One that repeats is not:
after `MOST` starts in a row the replica is left alone, and the run goes on without it. A replica
that served for `STEADY_SECONDS` has shown that it can, and begins anew. Pure but for the clock
that is passed in.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

MOST = 3
FIRST_PAUSE_SECONDS = 2.0
STEADY_SECONDS = 300.0


class Restart(NamedTuple):
    """The `number`-th start again of a replica in a row, in `pause` seconds."""

    name: str
    number: int
    pause: float


class Restarts:
    """The crashes of one sitting's replicas."""

    def __init__(self, *, most: int = MOST, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._started: dict[str, float] = {}
        self._numbers: dict[str, int] = {}
        self._due: dict[str, float] = {}

    @property
    def waiting(self) -> bool:
        """Some replica will be started again."""
        return bool(self._due)

    def started(self, name: str) -> None:
        self._started[name] = self._clock()
        self._due.pop(name, None)

    def forget(self, name: str) -> None:
        """It is not wanted any more."""
        self._due.pop(name, None)

    def crashed(self, name: str) -> Restart | None:
        """What will be done about it; None when it was started often enough."""
        now = self._clock()
        if now - self._started.get(name, now) >= STEADY_SECONDS:
            self._numbers.pop(name, None)
        number = self._numbers.get(name, 0) + 1
        if number > self._most:
            return None
        self._numbers[name] = number
        pause = FIRST_PAUSE_SECONDS * 2.0 ** (number - 1)
        self._due[name] = now + pause
        return Restart(name, number, pause)

    def due(self) -> list[Restart]:
        """Those whose pause is over. Starting one is said by `started`."""
        now = self._clock()
        return [
            Restart(name, self._numbers[name], 0.0) for name, at in self._due.items() if at <= now
        ]
