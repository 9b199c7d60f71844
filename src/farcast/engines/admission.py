"""Who may generate while versions come and go: the gate between requests and commits.

One lock covers the version check, the version that a request starts with, and the commit. So a
request that asked for version 12 is never started at 11, and none is told one version while it
begins under another.

    phase        entered when                 requests that come now                in flight
    open         the start; after a commit    in, if the version suits              any
    draining     a commit asks for the gate   in_place: those that may cross go in, all go on
                                              the others wait; drain: all wait
    committing   the last one to drain left   wait                                  may cross

A request *may cross* a commit unless it is pinned to an exact version, or its engine can't say
afterwards which version wrote which token. Beside the phase a gate is *closed* while it has no
version, its engine is out of sight, or the replica is leaving: then nothing enters.

Refuses to decide what a commit does: it only finds the moment for it.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import msgspec

from farcast.engines.http_engine import label_of
from farcast.errors import FarcastError
from farcast.types import VersionRef

Mode = Literal["in_place", "drain"]
Phase = Literal["open", "draining", "committing"]
Refusal = Literal["not_ready", "full", "behind", "passed"]

REMEMBERED = 4096
"""Versions whose labels are known: more than may pass while one answer is written."""

POLL_SECONDS = 0.2
"""How often a drain looks whether it has taken too long."""


class Constraint(msgspec.Struct, frozen=True):
    """What a request asks of the version that serves it. Both None: any version will do."""

    min_version: int | None = None
    exact_version: int | None = None

    def refusal(self, version: int) -> Refusal | None:
        """Why `version` does not suit, None if it does."""
        exact = self.exact_version
        if exact is not None and exact != version:
            return "behind" if version < exact else "passed"
        if self.min_version is not None and version < self.min_version:
            return "behind"
        return None


ANY = Constraint()


class NotAdmittedError(FarcastError):
    """A request that can't be served now. `refusal` says why: "behind" and "passed" are about
    the version, "full" and "not_ready" about the replica."""

    retry = True

    def __init__(self, message: str, refusal: Refusal) -> None:
        super().__init__(message)
        self.refusal = refusal


class Ticket:
    """A request inside the gate. `ref` was live, `epoch` counted the commits and `life` the
    engines that came back with other weights, when it came in. `cut` is called, from another
    thread, if the request outlasts a drain."""

    __slots__ = ("crosses", "cut", "epoch", "life", "ref")

    def __init__(
        self, ref: VersionRef, epoch: int, life: int, *, crosses: bool, cut: Callable[[], None]
    ) -> None:
        self.ref = ref
        self.epoch = epoch
        self.life = life
        self.crosses = crosses
        self.cut = cut


class Exit(NamedTuple):
    """What was live when a request left. An unchanged epoch means that no commit fell inside. Not
    `same_engine`: the engine came back with other weights meanwhile, so nobody can say what wrote
    the answer."""

    ref: VersionRef
    epoch: int
    same_engine: bool


class AdmissionGate:
    """Safe to use from any thread. `current` tells the verified version that the engine holds;
    it is asked at the end of each commit. `on_change` is called, outside the lock and from any
    thread, whenever those that wait should ask again."""

    def __init__(
        self,
        current: Callable[[], VersionRef | None],
        *,
        mode: Mode = "in_place",
        limit: int = 256,
        drain_seconds: float = 120.0,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._current = current
        self.mode: Mode = mode
        self._limit = limit
        self._drain_seconds = drain_seconds
        self._on_change = on_change
        self._lock = threading.Condition()
        self._phase: Phase = "open"
        self._closed: str | None = "The replica has no verified version yet; wait until it has."
        self._lost: str | None = None
        self._leaving: str | None = None
        self._ref: VersionRef | None = None
        self._epoch = 0
        self._life = 0
        self._inside: set[Ticket] = set()
        self._whole = 0
        self._served: dict[str, VersionRef] = {}
        self.cut_off = 0
        """Requests that outlasted a drain and were ended."""

    @property
    def ref(self) -> VersionRef | None:
        """The version that is served; None while nothing is."""
        with self._lock:
            return None if self._shut() else self._ref

    def served(self, label: str) -> VersionRef | None:
        """The version that this gate has served under an engine's label, None if it has not."""
        return self._served.get(label)

    @property
    def held(self) -> VersionRef | None:
        """The version that the engine held when a commit last ended, served or not."""
        return self._ref

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def in_flight(self) -> int:
        return len(self._inside)

    @property
    def closed_because(self) -> str | None:
        """One sentence on why nothing is served; None if something is."""
        with self._lock:
            return self._shut()

    def enter(
        self, constraint: Constraint, *, crosses: bool, cut: Callable[[], None]
    ) -> Ticket | None:
        """A ticket, or None if the request has to wait for a commit to pass. Raises
        `NotAdmittedError` if it can't be served now. `crosses`: the engine will tell which
        version wrote which token, so that a commit may fall into the request."""
        with self._lock:
            ref = self._require_open()
            refusal = constraint.refusal(ref.version)
            if refusal is not None:
                raise _not_this_version(refusal, constraint, ref)
            crosses = crosses and constraint.exact_version is None and self.mode == "in_place"
            if self._phase == "committing" or (self._phase == "draining" and not crosses):
                return None
            if len(self._inside) >= self._limit:
                raise NotAdmittedError(
                    f"The replica already serves {self._limit} requests; try again, or another.",
                    "full",
                )
            ticket = Ticket(ref, self._epoch, self._life, crosses=crosses, cut=cut)
            self._inside.add(ticket)
            self._whole += not crosses
            return ticket

    def leave(self, ticket: Ticket) -> Exit:
        """The request is over; says what is live at this moment. Call it once, and for a ticket
        that crosses not while a commit is at work: its outcome is not known yet."""
        with self._lock:
            self._inside.remove(ticket)
            if not ticket.crosses:
                self._whole -= 1
                if not self._whole:
                    self._lock.notify_all()
            ref = ticket.ref if self._ref is None else self._ref
            return Exit(ref, self._epoch, ticket.life == self._life)

    @contextmanager
    def commit(self) -> Iterator[None]:
        """Around a commit. Waits until nothing is inside that may not cross it; what takes
        longer than `drain_seconds` is cut off, so that one request can't hold up a version."""
        self._set(phase="draining")
        try:
            self._drain()
            yield
        finally:
            self._settle()

    def lose(self, reason: str) -> None:
        """The engine is out of sight: nothing enters until `regain`."""
        self._set(lost=reason)

    def regain(self) -> None:
        """The engine is back, and holds what it held."""
        self._set(lost=None)

    def forget(self, reason: str) -> None:
        """The engine is back without the version: nothing enters until the next commit."""
        with self._lock:
            self._ref, self._closed, self._lost = None, reason, None
            self._life += 1
        self._on_change()

    def close(self) -> None:
        """The replica is leaving: nothing enters any more, what is inside goes on."""
        with self._lock:
            self._leaving = "The replica is about to stop; use another."
        self._on_change()

    # --- inside ------------------------------------------------------------------------------

    def _shut(self) -> str | None:
        return self._leaving or self._lost or self._closed

    def _require_open(self) -> VersionRef:
        shut = self._shut()
        if shut is not None or self._ref is None:
            raise NotAdmittedError(shut or "Nothing is served yet; try again.", "not_ready")
        return self._ref

    def _set(self, *, phase: Phase | None = None, lost: str | None = "") -> None:
        with self._lock:
            self._phase = phase or self._phase
            if lost != "":
                self._lost = lost
        self._on_change()

    def _drain(self) -> None:
        until = time.monotonic() + self._drain_seconds
        with self._lock:
            while self._whole:
                if self._lock.wait_for(lambda: not self._whole, timeout=POLL_SECONDS):
                    break
                if time.monotonic() < until:
                    continue
                until = time.monotonic() + self._drain_seconds
                late = [ticket for ticket in self._inside if not ticket.crosses]
                self.cut_off += len(late)
                for ticket in late:
                    ticket.cut()
            self._phase = "committing"

    def _settle(self) -> None:
        """Learn what the engine holds now, whether the commit went well or not."""
        try:
            ref = self._current()
            closed = None if ref else "The engine holds no verified version; wait until it does."
        except FarcastError as error:
            ref, closed = None, str(error)
        with self._lock:
            self._epoch += 1
            self._phase, self._ref, self._closed = "open", ref, closed
            if ref is not None:
                self._served[label_of(ref)] = ref
                while len(self._served) > REMEMBERED:
                    del self._served[next(iter(self._served))]
        self._on_change()


def _not_this_version(
    refusal: Refusal, constraint: Constraint, ref: VersionRef
) -> NotAdmittedError:
    exact = constraint.exact_version
    if refusal == "passed":
        text = f"version {exact}, and has gone on to {ref.version}; ask another replica"
    elif exact is not None:
        text = f"version {exact} yet, but {ref.version}; try again later or ask another replica"
    else:
        low = constraint.min_version
        text = f"version {low} yet, but {ref.version}; try again later or ask another replica"
    return NotAdmittedError(f"This replica does not serve {text}.", refusal)
