"""When a follower asks next. Pure: outcomes in, seconds out; chance is passed in.

    after the first answer   a random part of the interval: what started together drifts apart
    nothing newer            the interval, give or take a tenth
    failed                   twice the last wait, give or take a quarter, up to a bound

Replicas that were started by one command, or that one outage held up, would otherwise ask in the
same moment for ever. Worked example, one second: 0.4, 1.03, 0.96; then the store is away: 1.9,
4.2, 7.7; then it is back: 1.05.
"""

import random

LONGEST_WAIT_SECONDS = 30.0

_QUIET_SPREAD, _FAILED_SPREAD = 0.1, 0.25


class Pace:
    """The waits of one follower whose interval is `poll_seconds`."""

    def __init__(self, poll_seconds: float, chance: random.Random | None = None) -> None:
        self._poll_seconds = poll_seconds
        self._chance = random.Random() if chance is None else chance
        self._wait = poll_seconds
        self._started = False

    def moved(self) -> None:
        """It worked, and there may be more: ask again at once."""
        self._wait = self._poll_seconds

    def after_quiet(self) -> float:
        """There was nothing newer."""
        self._wait = self._poll_seconds
        if not self._started:
            self._started = True
            return self._poll_seconds * self._chance.random()
        return self._wait * self._spread(_QUIET_SPREAD)

    def after_failure(self) -> float:
        """It did not work, and may later."""
        self._wait = min(2 * self._wait, max(LONGEST_WAIT_SECONDS, self._poll_seconds))
        return self._wait * self._spread(_FAILED_SPREAD)

    def _spread(self, width: float) -> float:
        return 1 + width * (2 * self._chance.random() - 1)
