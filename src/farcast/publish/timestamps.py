"""The signed word on what is newest, kept fresh in the background.

A timestamp is written at once when a version was committed and again well before it runs out, so
a reader that sees one that ran out knows that the trainer is gone or the store holds something
back. Writing one never holds up a publish, and a failure is tried again: the worst it can do is
that replicas stay careful for a while.

Refuses to go on once the publisher is fenced: its newest version is not the run's any more.
"""

import logging
import threading
import time
from collections.abc import Callable

from farcast.errors import ConfigError, FarcastError
from farcast.lineage import TIMESTAMP_KEY, Signer, Timestamp, encode_timestamp
from farcast.store.base import Store
from farcast.types import VersionRef

VALID_SECONDS = 900.0
"""How long a store can show an old world unnoticed, and a trainer be away unremarked."""

REFRESHES = 3
"""Written this often within its validity, so that one lost put alarms nobody."""

RETRY_SECONDS = 5.0

SKEW_SECONDS = 60.0
"""A clock this far from the store's is worth a word: readers compare with clocks of their own."""

_LOG = logging.getLogger(__name__)


class Timestamps:
    """Says which version is newest, from a thread of its own until `close`."""

    def __init__(
        self,
        store: Store,
        signer: Signer,
        *,
        valid_seconds: float = VALID_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not 1 <= valid_seconds <= 365 * 86400:
            raise ConfigError(
                f"A timestamp valid for {valid_seconds:g} seconds helps nobody; use 1 to a year's."
            )
        self._store = store
        self._signer = signer
        self._valid = valid_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._ref: VersionRef | None = None
        self._closed = False
        self._compared = False
        self._thread: threading.Thread | None = None

    def announce(self, ref: VersionRef) -> None:
        """`ref` is committed and the newest."""
        with self._lock:
            if self._closed:
                return
            self._ref = ref
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="farcast-timestamps", daemon=True
                )
                self._thread.start()
        self._news.set()

    def close(self) -> None:
        """Write no more; what was announced is written before this returns."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._news.set()
        if thread is not None:
            thread.join()

    def stop(self) -> None:
        """Write no more, not even what was announced: somebody else publishes now."""
        with self._lock:
            self._ref = None
        self.close()

    def write(self, ref: VersionRef) -> None:
        """Put a fresh timestamp that names `ref`."""
        now = int(self._clock())
        timestamp = Timestamp(
            run_id=ref.run_id,
            version=ref.version,
            root=ref.root,
            issued=now,
            expires=now + int(self._valid),
        )
        self._store.put(TIMESTAMP_KEY, encode_timestamp(self._signer.sign(timestamp)))
        if not self._compared:
            self._compared = True
            self._compare_clocks(now)

    def _run(self) -> None:
        wait, closed = 0.0, False
        while not closed:
            self._news.wait(wait)
            self._news.clear()
            with self._lock:
                ref, closed = self._ref, self._closed
            if ref is None:
                continue
            try:
                self.write(ref)
                wait = self._valid / REFRESHES
            except FarcastError as error:
                _LOG.warning("The timestamp of %s could not be written: %s", ref, error)
                wait = min(RETRY_SECONDS, self._valid / REFRESHES)

    def _compare_clocks(self, now: float) -> None:
        """Warn of a clock that would make readers believe in a frozen world, or in no freeze."""
        for info in self._store.list("", start_after=TIMESTAMP_KEY[:-1]):
            if info.key == TIMESTAMP_KEY and abs(info.modified - now) > SKEW_SECONDS:
                _LOG.warning(
                    "This machine's clock is %+.0f seconds from the store's; replicas judge "
                    "timestamps by clocks of their own, so set it right.",
                    now - info.modified,
                )
            return
