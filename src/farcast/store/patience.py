"""A store that waits out outages: for whoever has nothing but the store to go on with.

Wraps any store. An error that says `retry` (the store away, throttling, a lost reply) is no
reason to end while `seconds` have not passed since the call first failed: the same call is made
again, after pauses that grow. Any other error passes at once: a full disk, refused credentials and
damaged bytes do not mend by waiting. Each outage is told when it begins, about once a minute while
it lasts, and when it is over, once for all threads.

A create that is repeated may find its own object: `ObjectExistsError` then means what `Store.put`
says it may mean, and the caller compares contents.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from farcast.errors import StoreError
from farcast.store.base import ObjectInfo, Store

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 15.0
TELL_SECONDS = 60.0

_T = TypeVar("_T")


class PatientStore:
    """`store`, with outages of up to `seconds` waited out.

    `wait(seconds)` sleeps, and returns True to give up at once (the process is to stop): the
    error is then raised. `tell` gets a line for people.
    """

    def __init__(
        self,
        store: Store,
        seconds: float,
        *,
        wait: Callable[[float], bool],
        tell: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._seconds = seconds
        self._wait = wait
        self._tell = tell
        self._clock = clock
        self._lock = threading.Lock()
        self._since: float | None = None
        self._told = 0.0

    @property
    def url(self) -> str:
        return self._store.url

    def __repr__(self) -> str:
        return f"PatientStore({self._store!r}, {self._seconds:g})"

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        self._patiently(lambda: self._store.put(key, data, if_absent=if_absent))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self._patiently(lambda: self._store.get(key, max_bytes=max_bytes))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._patiently(lambda: self._store.get_range(key, start, length))

    def delete(self, key: str) -> None:
        self._patiently(lambda: self._store.delete(key))

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        return self._list(prefix, start_after)

    def _list(self, prefix: str, start_after: str | None) -> Iterator[ObjectInfo]:
        """A list that breaks off goes on after the last object that it gave."""
        after = start_after
        listing = self._store.list(prefix, start_after=after)
        broken = False

        def advance() -> ObjectInfo | None:
            nonlocal listing, broken
            if broken:
                listing = self._store.list(prefix, start_after=after)
            broken = True
            found = next(listing, None)
            broken = False
            return found

        while (info := self._patiently(advance)) is not None:
            after = info.key
            yield info

    def _patiently(self, call: Callable[[], _T]) -> _T:
        began: float | None = None
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                result = call()
            except StoreError as error:
                if not error.retry:
                    self._answered()  # it refused, but it is there
                    raise
                now = self._clock()
                began = now if began is None else began
                if now - began >= self._seconds:
                    raise
                self._missed(error, now)
                if self._wait(min(pause, began + self._seconds - now)):
                    raise
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            else:
                self._answered()
                return result

    def _missed(self, error: StoreError, now: float) -> None:
        with self._lock:
            begins = self._since is None
            if self._since is None:
                self._since = now
            if not begins and now - self._told < TELL_SECONDS:
                return
            self._told = now
            away = now - self._since
        self._tell(
            f"the store does not answer, trying again for up to {self._seconds:.0f} s "
            f"({away:.0f} s so far): {error}"
        )

    def _answered(self) -> None:
        with self._lock:
            if self._since is None:
                return
            away, self._since = self._clock() - self._since, None
        self._tell(f"the store answers again, after {away:.0f} s")
