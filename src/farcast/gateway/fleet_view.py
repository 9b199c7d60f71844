"""The replicas of a run as a gateway knows them: from their records, and from what they answer.

A record is trusted for a while after it last *changed*, by this process's own clock, so that no
two machines have to agree on the time. Only time in which the store was seen counts: while it is
away nobody can write, and replicas that serve on without it are asked as before. Between two looks
at the store, answers tell more: which version a replica serves now, and that one is out of reach.

Refuses to send anything to a replica whose record names no plain http(s) address, and never fails
at one: anybody who may write a record would else stop the gateway, or take its requests with an
address that fails each time and so looks idle.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from farcast.engines.admission import Constraint
from farcast.fleet.leases import SILENT_SECONDS
from farcast.fleet.registry import Sighting

SHUN_SECONDS = 2.0
"""How long a replica that did not answer is asked last: about as long as a record takes."""

LOOKED_SECONDS = 3.0
"""Two looks further apart than this have an outage between them."""

_SERVING = ("serving", "staging")

_ADDRESS = re.compile(
    r"https?://"
    r"(?:[a-z0-9_][a-z0-9_-]{0,62}(?:\.[a-z0-9_-]{1,63}){0,32}\.?|\[[0-9a-f:.]{2,45}\])"
    r"(?::(?P<port>[0-9]{1,5}))?"
    r"(?:/[a-z0-9._~-]+)*",
    re.ASCII | re.IGNORECASE,
)
"""No user, query or fragment, and only hosts that can be looked up."""

_MAX_ADDRESS = 1024


class Member:
    """One replica. `load` counts the requests that this gateway has there; `changed` is when its
    record last did, in seconds of watching."""

    __slots__ = ("changed", "load", "name", "serving", "shunned", "updated", "url", "version")

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        self.version = -1
        self.serving = False
        self.load = 0
        self.updated = 0.0
        self.changed = 0.0
        self.shunned = 0.0


class Choice(NamedTuple):
    """A replica to ask, and whether it was found to suit."""

    member: Member
    suits: bool


class FleetView:
    """Used by one thread. `clock` is monotonic, `wall` is compared with the store's times once,
    for records that were there before this process."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._wall = wall
        self._members: dict[str, Member] = {}
        self._turn = 0
        self._looked: float | None = None
        self._watched = 0.0
        """Seconds in which the store was seen."""

    def update(self, sightings: Mapping[str, Sighting]) -> None:
        """Take in what the store says."""
        now = self._clock()
        self._watched += 0.0 if self._looked is None else min(now - self._looked, LOOKED_SECONDS)
        self._looked = now
        for name in self._members.keys() - sightings.keys():
            del self._members[name]
        for name, sighting in sightings.items():
            self._take(name, sighting)

    def usable(self) -> list[Member]:
        """Those that serve, as far as anybody knows."""
        oldest = self._watched - SILENT_SECONDS
        return [m for m in self._members.values() if m.serving and m.changed > oldest]

    def shun(self, member: Member) -> None:
        member.shunned = self._clock() + SHUN_SECONDS

    def ordered(self, constraint: Constraint, preferred: str | None) -> list[Choice]:
        """Whom to ask, best first: those that suit, the preferred one of them before the idlest,
        in turn among equals. The others come last: their version may have moved meanwhile."""
        self._turn += 1
        usable = self.usable()
        if len(usable) == 1:
            only = usable[0]
            return [Choice(only, constraint.refusal(only.version) is None)]
        return _in_order(usable, constraint, preferred, self._turn, self._clock())

    def _take(self, name: str, sighting: Sighting) -> None:
        record = sighting.record
        member = self._members.get(name)
        url = record.url.rstrip("/")
        if member is None or member.url != url:
            if not _is_address(url):
                self._members.pop(name, None)
                return
            member = self._members[name] = Member(name, url)
            age = self._wall() - sighting.modified
            member.changed = self._watched - max(0.0, age)
        elif record.updated != member.updated:
            member.changed = self._watched
        if record.updated != member.updated:
            member.updated = record.updated
            member.version = record.version
            member.serving = record.state in _SERVING


def _is_address(url: str) -> bool:
    found = _ADDRESS.fullmatch(url) if len(url) <= _MAX_ADDRESS else None
    return found is not None and 0 < int(found["port"] or 80) < 1 << 16


def _in_order(
    members: Iterable[Member],
    constraint: Constraint,
    preferred: str | None,
    turn: int,
    now: float,
) -> list[Choice]:
    choices = [Choice(m, constraint.refusal(m.version) is None) for m in members]
    start = turn % len(choices) if choices else 0
    turned = choices[start:] + choices[:start]

    def rank(choice: Choice) -> tuple[bool, bool, bool, int]:
        member = choice.member
        return (
            not choice.suits,
            member.shunned > now,
            member.name != preferred,
            member.load if choice.suits else -member.version,
        )

    return sorted(turned, key=rank)
