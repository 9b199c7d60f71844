"""The thread that follows a run for an engine: poll, stage while the engine serves, commit.

What each failure means, and what is done about it:

    nothing newer                        wait for the next poll
    retryable (store away, overtaken)    nothing changed: wait longer each time (see `Pace`)
    bytes that do not verify             nothing changed: the same; the version may be mended
    target uncertain, or anything else   give up: replace the engine; `failure` says why
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from farcast.engines.pace import Pace
from farcast.errors import (
    FarcastError,
    FormatError,
    IntegrityError,
    TargetUncertainError,
    UnknownVersionError,
)
from farcast.replica import Staged, Subscriber
from farcast.types import VersionRef

_LOG = logging.getLogger(__name__)


class Commit(NamedTuple):
    """A version that went live. `pause_seconds` is how long the engine stood still for it."""

    ref: VersionRef
    staged_seconds: float
    pause_seconds: float
    bytes_fetched: int
    bytes_full: int


class Follower:
    """Keeps the subscriber's target at the newest version. `gate` is held around each commit;
    `on_commit` runs in this thread, after it; `on_held` whenever there is nothing newer."""

    def __init__(
        self,
        subscriber: Subscriber,
        gate: Callable[[], AbstractContextManager[None]],
        *,
        poll_seconds: float,
        on_commit: Callable[[Commit], None],
        on_held: Callable[[], None] = lambda: None,
    ) -> None:
        self._subscriber = subscriber
        self._gate = gate
        self._poll_seconds = poll_seconds
        self._on_commit = on_commit
        self._on_held = on_held
        self._stop = threading.Event()
        self._committing = threading.Lock()
        self._thread: threading.Thread | None = None
        self.staging = False
        self.failure: FarcastError | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="farcast-follow", daemon=True)
        self._thread.start()

    def leave(self, patience: float) -> bool:
        """Begin no further commit, and wait for one that is under way: a process that ended in the
        middle would leave the engine paused, between two versions. False if it took longer than
        `patience` seconds. What is being staged goes on until `close`, or the process ends."""
        self._stop.set()
        held = self._committing.acquire(timeout=max(0.0, patience))
        if held:
            self._committing.release()
        return held

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        pace = Pace(self._poll_seconds)
        while not self._stop.is_set() and self.failure is None:
            try:
                moved = self._advance()
            except FarcastError as error:
                if not _harmless(error):
                    self.failure = error
                    return
                _LOG.warning("No newer version could be staged: %s", error)
                self._stop.wait(pace.after_failure())
            except Exception as error:  # noqa: BLE001 - serving on silently would hide a bug
                self.failure = TargetUncertainError(
                    f"Following the run failed unexpectedly ({type(error).__name__}); "
                    "restart this replica and report it."
                )
                self.failure.__cause__ = error
                return
            else:
                if moved:
                    pace.moved()
                else:
                    self._stop.wait(pace.after_quiet())

    def _advance(self) -> bool:
        """One version further, if there is a newer one."""
        self.staging = True
        try:
            staged = self._subscriber.stage()
            with self._committing:
                return self._go_to(staged)
        finally:
            self.staging = False

    def _go_to(self, staged: Staged | None) -> bool:
        if staged is None:
            if not self._stop.is_set():
                self._on_held()
            return False
        try:
            if self._stop.is_set():
                return False
            self._on_commit(self._commit(staged))
        finally:
            staged.discard()
        return True

    def _commit(self, staged: Staged) -> Commit:
        with self._gate():
            began = time.perf_counter()
            ref = self._subscriber.commit(staged)
            pause = time.perf_counter() - began
        stats = self._subscriber.last
        return Commit(
            ref=ref,
            staged_seconds=stats.fetch_seconds + stats.decode_seconds,
            pause_seconds=pause,
            bytes_fetched=stats.bytes_fetched,
            bytes_full=stats.bytes_full,
        )


def _harmless(error: FarcastError) -> bool:
    """Whether the target is as it was, so that trying again is right."""
    return error.retry or isinstance(error, IntegrityError | FormatError | UnknownVersionError)
