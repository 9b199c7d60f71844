"""Replicas of one run under one launcher, as many as are wanted.

`scale` says how many; `tend` brings it about and minds those that are there: one that crashed is
started again a bounded number of times, one that runs and yet says nothing (a hung machine, a
blocked process) is replaced, one that was asked to leave and does not is ended. What a replica
leaves behind needs no care here: what it acknowledged is in the store and counts once, and what it
had not is sampled by others. Works with any `Launcher`.

Refuses to call a replica hung while nobody can see the store, or soon after: an outage silences all
of them at once.
"""

import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from farcast.errors import ConfigError
from farcast.fleet.launcher import Handle, Launcher, ProcessSpec
from farcast.fleet.observe import FleetSnapshot
from farcast.fleet.restarts import MOST, Restarts

HUNG_SECONDS = 60.0
"""How long a replica's lease must be seen dead, on top of the time after which it is."""

STARTING_SECONDS = 600.0
"""A worker loads its libraries and a model before it says anything."""

GAP_SECONDS = 15.0
"""Two looks at the store further apart than this have an outage between them."""

GRACE_SECONDS = 120.0

ChangeKind = Literal["started", "leaving", "left", "crashed", "restarted", "replaced", "given up"]


class Change(NamedTuple):
    """Something that happened to a member, for people."""

    kind: ChangeKind
    name: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.kind}" + (f": {self.text}" if self.text else "")


class _Member:
    def __init__(self, handle: Handle, started: float) -> None:
        self.handle = handle
        self.started = started
        self.dead_since: float | None = None


class Crew:
    """`spec` makes the command line of a replica's name, `prefix` and a number."""

    def __init__(
        self,
        launcher: Launcher,
        spec: Callable[[str], ProcessSpec],
        *,
        prefix: str = "r",
        grace: float = GRACE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._launcher = launcher
        self._spec = spec
        self._prefix = prefix
        self._grace = grace
        self._clock = clock
        self._members: dict[str, _Member] = {}
        self._leaving: dict[str, tuple[Handle, float]] = {}
        self._restarts = Restarts(clock=clock)
        self._waiting: set[str] = set()
        """Crashed, and to be started again."""
        self._changes: list[Change] = []
        self._looked: float | None = None

    @property
    def names(self) -> list[str]:
        """Members, those included that will be started again."""
        return sorted([*self._members, *self._waiting])

    def scale(self, wanted: int) -> None:
        """Have `wanted` members: start some, or ask some to leave. Waits for nothing."""
        while len(self._members) + len(self._waiting) < wanted:
            self._start(self._free_name(), "started")
        for name in self._surplus(wanted):
            self._dismiss(name)

    def tend(self, snapshot: FleetSnapshot | None) -> list[Change]:
        """Mind everybody; returns what happened since the last call. `snapshot` is None while
        the store cannot be seen."""
        self._mind_exits()
        self._mind_hung(snapshot)
        for name, number, _ in self._restarts.due():
            self._waiting.discard(name)
            self._start(name, "restarted", f"after a crash, {number} of at most {MOST} times")
        changes, self._changes = self._changes, []
        return changes

    def close(self) -> None:
        """Ask all to leave, wait for them within their grace, and end the rest."""
        self._waiting.clear()
        for name in list(self._members):
            self._dismiss(name)
        until = self._clock() + self._grace
        for handle, _ in self._leaving.values():
            self._launcher.stop(handle, grace=max(0.0, until - self._clock()))
        self._leaving.clear()

    # --- inside ------------------------------------------------------------------------------

    def _start(self, name: str, kind: ChangeKind, text: str = "") -> None:
        self._members[name] = _Member(self._launcher.start(self._spec(name)), self._clock())
        self._restarts.started(name)
        self._changes.append(Change(kind, name, text))

    def _dismiss(self, name: str) -> None:
        if name in self._waiting:
            self._waiting.discard(name)
            self._restarts.forget(name)
            self._changes.append(Change("left", name))
            return
        handle = self._members.pop(name).handle
        self._launcher.ask(handle)
        self._leaving[name] = (handle, self._clock() + self._grace)
        self._changes.append(Change("leaving", name))

    def _surplus(self, wanted: int) -> list[str]:
        """Those to give up: first who does not run, then who started last and has least to lose."""
        count = len(self._members) + len(self._waiting) - wanted
        running = sorted(reversed(self._members), key=lambda name: -self._members[name].started)
        return [*sorted(self._waiting), *running][: max(0, count)]

    def _free_name(self) -> str:
        """The lowest free number: a name that is used again goes on with its own sequence."""
        number = 1
        taken = self._members.keys() | self._waiting | self._leaving.keys()
        while f"{self._prefix}{number}" in taken:
            number += 1
        return f"{self._prefix}{number}"

    def _mind_exits(self) -> None:
        for name, (handle, until) in list(self._leaving.items()):
            if self._launcher.poll(handle) is None and self._clock() >= until:
                self._launcher.kill(handle)
            if self._launcher.poll(handle) is not None:
                del self._leaving[name]
                self._changes.append(Change("left", name))
        for name, member in list(self._members.items()):
            status = self._launcher.poll(member.handle)
            if status is not None:
                del self._members[name]
                self._changes.append(self._after_exit(name, status, member.handle))

    def _after_exit(self, name: str, status: int, handle: Handle) -> Change:
        """By chance, a crash is worth another start; a mistake of the user's is not."""
        words = self._launcher.words(handle).removeprefix("farcast: ")
        if status == 0:
            return Change("left", name, words)
        how = f"status {status}: {words}" if status > 0 else f"signal {-status}"
        restart = None if status == ConfigError.exit_code else self._restarts.crashed(name)
        if restart is None:
            return Change("given up", name, how)
        self._waiting.add(name)
        return Change("crashed", name, f"{how}; it starts again in {restart.pause:.0f} s")

    def _mind_hung(self, snapshot: FleetSnapshot | None) -> None:
        now = self._clock()
        if snapshot is None:
            return
        if self._looked is not None and now - self._looked > GAP_SECONDS:
            for member in self._members.values():
                member.dead_since = None
        self._looked = now
        for name, member in list(self._members.items()):
            if self._is_hung(name, member, snapshot, now):
                member.handle = self._launcher.restart(member.handle, grace=0.0)
                member.started, member.dead_since = now, None
                self._changes.append(
                    Change("replaced", name, f"it said nothing for {snapshot.age(name):.0f} s")
                )

    def _is_hung(self, name: str, member: _Member, snapshot: FleetSnapshot, now: float) -> bool:
        heard = name in snapshot.replicas and snapshot.life(name) != "dead"
        if heard or now - member.started < STARTING_SECONDS:
            member.dead_since = None
            return False
        if member.dead_since is None:
            member.dead_since = now
        return now - member.dead_since >= HUNG_SECONDS and name in snapshot.replicas
