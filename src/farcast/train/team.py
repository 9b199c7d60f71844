"""The ranks that train one model: who decides, and how the others learn of it.

Rank 0 leads: it alone reads trajectories, decides on groups and when to stop. The others follow
what it says, so that every rank takes the same collectives in the same order. A rank alone is a
team too, and nothing is sent.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from farcast.publish.comms import Comms, Rounds
from farcast.trajectory import Group, decode_batch
from farcast.trajectory.encoding import pack, seal

Waiting = Literal["waiting"]
Choice = list[Group] | Waiting | None
"""Groups to learn from; "waiting" while there are none; None to stop."""

LEADS_EVERY = 20.0
"""Seconds after which a leader that waits says so: far inside the time limit of a round."""


class _Told(msgspec.Struct, frozen=True, array_like=True):
    kind: Literal["groups", "waiting", "stop"]
    sizes: list[int] = []
    batches: list[bytes] = []


class Team:
    """The ranks of `comms`; this process alone without."""

    def __init__(self, comms: Comms | None = None) -> None:
        self.rank = 0 if comms is None else comms.rank
        self.size = 1 if comms is None else comms.size
        self._rounds = None if comms is None or comms.size == 1 else Rounds(comms)

    @property
    def leads(self) -> bool:
        """Whether this rank decides and records."""
        return self.rank == 0

    def choose(self, choice: Callable[[], Choice], run_id: str) -> Choice:
        """What the leader's `choice` returns, on every rank; it is called on the leader only."""
        if self._rounds is None:
            return choice()
        made: list[Choice] = []

        def make() -> bytes:
            made.append(choice())
            return _encode(made[0], run_id)

        told = self._rounds.broadcast(make)
        return made[0] if made else _decode(told)

    def sums(self, values: Sequence[float]) -> list[float]:
        """Sums over the ranks of each of `values`."""
        return [sum(column) for column in zip(*self.rows(values), strict=True)]

    def rows(self, values: Sequence[float]) -> list[list[float]]:
        """The `values` of each rank."""
        if self._rounds is None:
            return [list(values)]
        told = self._rounds.share(lambda: msgspec.msgpack.encode(list(values)))
        return [msgspec.msgpack.decode(data, type=list[float]) for data in told]

    def common(self, numbers: Sequence[int]) -> list[int]:
        """Those of `numbers` that every rank has, sorted."""
        if self._rounds is None:
            return sorted(numbers)
        told = self._rounds.share(lambda: msgspec.msgpack.encode(list(numbers)))
        sets = [set(msgspec.msgpack.decode(data, type=list[int])) for data in told]
        return sorted(set.intersection(*sets))

    def together(self, work: Callable[[], None]) -> None:
        """Do `work` on every rank; nobody goes on before all are done, or all raise."""
        if self._rounds is None:
            work()
            return

        def make() -> bytes:
            work()
            return b""

        self._rounds.share(make)


def _encode(choice: Choice, run_id: str) -> bytes:
    if choice is None:
        return msgspec.msgpack.encode(_Told("stop"))
    if choice == "waiting":
        return msgspec.msgpack.encode(_Told("waiting"))
    members = [member for group in choice for member in group.members]
    payloads = pack(members, run_id=run_id)
    batches = [seal(payload, number) for number, payload in enumerate(payloads)]
    return msgspec.msgpack.encode(_Told("groups", [len(g.members) for g in choice], batches))


def _decode(data: bytes) -> Choice:
    told = msgspec.msgpack.decode(data, type=_Told)
    if told.kind != "groups":
        return None if told.kind == "stop" else "waiting"
    members = [t for batch in told.batches for t in decode_batch(batch).trajectories]
    groups, start = [], 0
    for size in told.sizes:
        taken = tuple(members[start : start + size])
        groups.append(Group(taken[0].group_id, taken))
        start += size
    return groups
