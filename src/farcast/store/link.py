"""A store behind an emulated link: bandwidth each way and a round trip per request.

Emulates time only: every call reaches the store below unchanged. Transfers that overlap
share the bandwidth equally, as streams on one link do; up and down do not disturb each other.
Refuses nothing and loses nothing; for faults see `farcast.store.testing`.
"""

import heapq
import threading
import time
from collections.abc import Callable, Iterator

from farcast.config import LinkConfig
from farcast.store.base import ObjectInfo, Store

LIST_PAGE = 1000
"""Objects in one answer to a list request, as S3 pages them."""

_LISTED_BYTES = 250
"""About what one object takes in a list answer besides its key, as S3 writes it."""


class SharedPipe:
    """One direction of a link. Streams in it at the same time get equal shares of `rate`.

    Kept as a fluid: `_level` is how many bytes a stream that was always there would have got.
    A stream of n bytes that starts at level L is through at level L + n, and the level rises
    by rate / streams a second, so completion times are exact however late a thread wakes.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._level = 0.0
        self._time = 0.0
        self._ends: list[float] = []

    def start(self, size: int, now: float) -> float:
        """Begin a stream of `size` bytes; returns the level at which it is through."""
        self._advance(now)
        end = self._level + size
        heapq.heappush(self._ends, end)
        return end

    def remaining(self, end: float, now: float) -> float:
        """Seconds until the stream is through if no other one starts."""
        self._advance(now)
        level, seconds, streams = self._level, 0.0, len(self._ends)
        for other in sorted(self._ends):
            if level >= end:
                break
            reached = min(other, end)
            seconds += (reached - level) * streams / self._rate
            level, streams = reached, streams - 1
        return seconds

    def _advance(self, now: float) -> None:
        while self._ends and self._time < now:
            rise = self._rate / len(self._ends)
            through = self._time + (self._ends[0] - self._level) / rise
            if through > now:
                self._level += rise * (now - self._time)
                break
            self._time, self._level = through, heapq.heappop(self._ends)
        self._time = max(self._time, now)


class LinkedStore:
    """`store` as seen from the far end of `link`. Threads that use one object share its link."""

    def __init__(
        self,
        store: Store,
        link: LinkConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._half_trip = link.rtt / 2
        self._up = SharedPipe(link.rate)
        self._down = SharedPipe(link.rate)
        self._lock = threading.Lock()
        self._clock = clock
        self._sleep = sleep

    @property
    def url(self) -> str:
        return self._store.url

    def __repr__(self) -> str:
        return f"LinkedStore({self._store!r})"

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        self._carry(self._up, memoryview(data).nbytes)
        try:
            self._store.put(key, data, if_absent=if_absent)
        finally:
            self._sleep(self._half_trip)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self._fetch(lambda: self._store.get(key, max_bytes=max_bytes))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._fetch(lambda: self._store.get_range(key, start, length))

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        return self._paged(self._store.list(prefix, start_after=start_after))

    def delete(self, key: str) -> None:
        self._sleep(self._half_trip)
        try:
            self._store.delete(key)
        finally:
            self._sleep(self._half_trip)

    def _fetch(self, read: Callable[[], bytes]) -> bytes:
        self._sleep(self._half_trip)
        size = 0
        try:
            data = read()
            size = len(data)
            return data
        finally:
            self._carry(self._down, size)

    def _paged(self, listing: Iterator[ObjectInfo]) -> Iterator[ObjectInfo]:
        while True:
            self._sleep(self._half_trip)
            page = [info for _, info in zip(range(LIST_PAGE), listing, strict=False)]
            self._carry(self._down, sum(len(info.key) + _LISTED_BYTES for info in page))
            yield from page
            if len(page) < LIST_PAGE:
                return

    def _carry(self, pipe: SharedPipe, size: int) -> None:
        """Half a round trip, and the time `size` bytes take beside what else is in the pipe."""
        with self._lock:
            end = pipe.start(size, self._clock())
        while True:
            with self._lock:
                seconds = pipe.remaining(end, self._clock())
            if seconds <= 0:
                break
            self._sleep(seconds)
        self._sleep(self._half_trip)
