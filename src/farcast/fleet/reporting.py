"""A replica's account of itself: its record about once a second, a receipt for each commit.

A thread of its own writes both, so that a slow store holds up no token. While the store cannot
be reached receipts wait and the record is left out: it is rewritten anyway, and receipts are
evidence that must arrive. A receipt in whose place another stands is logged and left to
`farcast verify`: whoever may write there must not be able to end a replica that serves. Refuses to
go on after any other error: `check` raises it to the process's own loop.
"""

import logging
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Literal

from farcast.errors import FormatError, StoreUnavailableError, VersionConflictError
from farcast.fleet.connecting import ReplicaStore
from farcast.fleet.records import Receipt, ReplicaRecord
from farcast.fleet.registry import Registry
from farcast.types import VersionRef

WRITE_SECONDS = 1.0
RATE_SECONDS = 10.0
"""Tokens per second are a mean over this long: one batch of answers takes a few seconds."""

_LOG = logging.getLogger(__name__)

ReplicaState = Literal["joining", "serving", "staging", "waiting", "draining", "stopped", "failed"]


class ReplicaReporter:
    """Safe to call from several threads. Use as a context manager; leaving it writes the last
    word: "stopped", or "failed" when an error is on its way out."""

    def __init__(
        self,
        registry: Registry,
        replica_id: str,
        *,
        traffic: ReplicaStore | None = None,
        clock: Callable[[], float] = time.time,
        url: str = "",
    ) -> None:
        self._registry = registry
        self._id = replica_id
        self._store = traffic
        self._clock = clock
        self._url = url
        self._lock = threading.Lock()
        self._state: ReplicaState = "joining"
        self._ref: VersionRef | None = None
        self._tokens = 0
        self._trajectories = 0
        self._waiting_seconds = 0.0
        self._unread = 0
        self._bytes_full = 0
        self._commits = 0
        self._commit_seconds = 0.0
        self._rates: deque[tuple[float, int]] = deque()
        self._receipts: deque[Receipt] = deque()
        self._error: Exception | None = None
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="farcast-report", daemon=True)

    def __enter__(self) -> "ReplicaReporter":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.state("stopped" if error is None else "failed")
        self._left.set()
        self._thread.join()

    def check(self) -> None:
        """Raise what stopped the reports, if something did."""
        with self._lock:
            if self._error is not None:
                raise self._error

    def state(self, state: ReplicaState) -> None:
        with self._lock:
            self._state = state

    def committed(
        self,
        ref: VersionRef,
        *,
        staged_seconds: float,
        commit_seconds: float,
        bytes_fetched: int,
        bytes_full: int,
    ) -> None:
        """The engine's live weights were found to be `ref`, root included."""
        receipt = Receipt(
            replica_id=self._id,
            version=ref.version,
            root=ref.root,
            staged_seconds=staged_seconds,
            commit_seconds=commit_seconds,
            bytes_fetched=bytes_fetched,
        )
        with self._lock:
            self._ref = ref
            self._commits += 1
            self._bytes_full += bytes_full
            # The first commit loads a whole model before anything is served: no pause.
            if self._commits > 1:
                self._commit_seconds = max(self._commit_seconds, commit_seconds)
            self._receipts.append(receipt)

    def sampled(
        self, *, tokens: int, trajectories: int, waiting_seconds: float = 0.0, unread: int = 0
    ) -> None:
        """Totals since the process started; `unread` is how many groups the trainer has yet to
        read."""
        with self._lock:
            self._rates.append((self._clock(), tokens - self._tokens))
            self._tokens, self._trajectories = tokens, trajectories
            self._waiting_seconds, self._unread = waiting_seconds, unread

    def record(self) -> ReplicaRecord:
        """The record as it would be written now."""
        now = self._clock()
        with self._lock:
            while self._rates and self._rates[0][0] < now - RATE_SECONDS:
                self._rates.popleft()
            return ReplicaRecord(
                replica_id=self._id,
                state=self._state,
                version=-1 if self._ref is None else self._ref.version,
                root="" if self._ref is None else self._ref.root,
                tokens=self._tokens,
                tokens_per_second=sum(tokens for _, tokens in self._rates) / RATE_SECONDS,
                trajectories=self._trajectories,
                waiting_seconds=self._waiting_seconds,
                unread=self._unread,
                bytes_fetched=0 if self._store is None else self._store.traffic.bytes_down,
                bytes_relayed=0 if self._store is None else self._store.bytes_relayed,
                bytes_full=self._bytes_full,
                commits=self._commits,
                commit_seconds=self._commit_seconds,
                url=self._url,
                updated=now,
            )

    def _run(self) -> None:
        while True:
            leaving = self._left.wait(WRITE_SECONDS)
            try:
                self._write()
            except StoreUnavailableError:
                if leaving:
                    return
                continue
            except Exception as error:  # noqa: BLE001 - a thread that ends unseen would hide it
                with self._lock:
                    self._error = error
                return
            if leaving:
                return

    def _write(self) -> None:
        while self._receipts:
            try:
                self._registry.put_receipt(self._receipts[0])
            except (VersionConflictError, FormatError) as error:
                _LOG.error("A receipt could not be left: %s", error)
            self._receipts.popleft()
        self._registry.write_replica(self.record())


def default_id() -> str:
    """A name for this process that no other one has: host and process id."""
    host = re.sub(r"[^A-Za-z0-9.-]+", "-", socket.gethostname()).strip("-.") or "host"
    return f"{host[:64]}-{os.getpid()}"
