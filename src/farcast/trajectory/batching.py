"""From single trajectories to whole GRPO groups that are fresh enough to learn from. Pure: no
store and no clock; `now` is passed in, in seconds of whatever clock the caller keeps to.

Every trajectory that is added ends in exactly one place: in a group that `take` returned, in
the dropped ones under one reason, or waiting. The rules, in the order they are applied:

    invalid   the group contradicts itself (sizes differ, more members than its size, or experts
              of models of different shapes), a member does not fit the model that is trained or
              the checkpoint that holds what waits, or a span names a version that was never
              published or has another root. Whole group.
    partial   a member was aborted, or a member did not come within `group_timeout`. Whole
              group, later members included: a baseline over the rest would be biased, since
              what is missing is mostly what was long.
    stale     the oldest token in the loss of any member is more than `max_staleness` versions
              older than the trainer's. Whole group. Judged at the moment of `take`.

A truncated answer (`finish_reason` "length") is an answer: it stays, with its reward.
Refuses to form a group from members of several, or to fill one up.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Annotated, Literal, NamedTuple

import msgspec

from farcast.errors import FormatError, TrajectoryTooLargeError
from farcast.trajectory.encoding import decode_batch, pack, seal
from farcast.trajectory.header import expert_shapes
from farcast.trajectory.wire import Trajectory
from farcast.types import Name

DropReason = Literal["invalid", "partial", "stale"]
REASONS: tuple[DropReason, ...] = ("invalid", "partial", "stale")

RootOf = Callable[[int], str | frozenset[str] | None]
"""The root of a version that was published, or the roots of one that is served in several formats;
None for a version that was not."""

CLOSED_GROUPS = 4096
"""Groups remembered after they left, so that a late member is not taken for a new group. A
member is late by at most what its worker has in flight; 4096 groups are far more than that."""


class Group(NamedTuple):
    """A whole group: `members` are ordered by id, so that a batch does not depend on arrival."""

    group_id: str
    members: tuple[Trajectory, ...]

    @property
    def oldest_version(self) -> int | None:
        """The oldest version that wrote a token in the loss of any member."""
        versions = [v for m in self.members if (v := oldest_version(m)) is not None]
        return min(versions, default=None)


def oldest_version(trajectory: Trajectory) -> int | None:
    """The oldest version that wrote a token in the loss, None when no token is in the loss."""
    mask = trajectory.loss_mask
    versions = [s.version for s in trajectory.spans if any(mask[s.start : s.end])]
    return min(versions, default=None)


def staleness_of(trajectory: Trajectory, version: int) -> int:
    """Versions between the trainer's and the oldest token in the loss; 0 without one."""
    oldest = oldest_version(trajectory)
    return 0 if oldest is None else version - oldest


class _Waiting:
    """A group of which something arrived."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.members: dict[str, Trajectory] = {}

    @property
    def whole(self) -> bool:
        return any(len(self.members) == m.group_size for m in self.members.values())

    @property
    def agrees(self) -> bool:
        """Whether the members can be of one group."""
        members = self.members.values()
        return len({m.group_size for m in members}) == 1 and len(expert_shapes(members)) <= 1


class _GroupState(msgspec.Struct, forbid_unknown_fields=True):
    group_id: Name
    waited: float
    batches: list[bytes]


class _State(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    run_id: Name
    groups: list[_GroupState]
    closed: list[tuple[Name, DropReason]]
    dropped: dict[DropReason, list[Name]]
    totals: dict[DropReason, int]
    repeated: int


def is_root(root: str, known: str | frozenset[str] | None) -> bool:
    """Whether `root` is what `known`, of a `RootOf`, says."""
    return root in known if isinstance(known, frozenset) else root == known


class GroupBatcher:
    """Holds what arrived until it is whole groups. Its state is part of the checkpoint, next to
    the receiver's: what the receiver has passed and no step has used is held here.

    Read only as much as the next step lacks: what stays in the store is what holds workers back.
    `fits` says whether the model can compute with a trajectory: its token ids, its length.
    """

    def __init__(
        self,
        run_id: str,
        *,
        max_staleness: int,
        group_timeout: float,
        fits: Callable[[Trajectory], bool] = lambda _: True,
    ) -> None:
        self._run_id = run_id
        self._max_staleness = max_staleness
        self._group_timeout = group_timeout
        self._fits = fits
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._closed: OrderedDict[str, DropReason] = OrderedDict()
        self._dropped: dict[DropReason, list[str]] = {reason: [] for reason in REASONS}
        self._totals: dict[DropReason, int] = dict.fromkeys(REASONS, 0)
        self._repeated = 0

    @property
    def totals(self) -> dict[DropReason, int]:
        """Trajectories dropped so far, by reason."""
        return dict(self._totals)

    @property
    def repeated(self) -> int:
        """Trajectories left out because one with the same id is waiting in the same group."""
        return self._repeated

    @property
    def waiting(self) -> int:
        """Trajectories held, in whole groups and in others."""
        return sum(len(group.members) for group in self._waiting.values())

    def whole_groups(self) -> int:
        """Whole groups held; some may be found stale or invalid when they are taken."""
        return sum(group.whole for group in self._waiting.values())

    def add(self, trajectories: Iterable[Trajectory], *, now: float) -> None:
        """Take in what the receiver returned."""
        for trajectory in trajectories:
            reason = self._closed.get(trajectory.group_id)
            if reason is not None:
                self._drop(reason, trajectory.id)
                continue
            group = self._waiting.setdefault(trajectory.group_id, _Waiting(now))
            if trajectory.id in group.members:
                self._repeated += 1
                continue
            group.members[trajectory.id] = trajectory
            if not group.agrees or not self._fits(trajectory):
                self._close(trajectory.group_id, "invalid")
            elif trajectory.finish_reason == "aborted":
                self._close(trajectory.group_id, "partial")

    def take(
        self, groups: int, *, version: int, now: float, root_of: RootOf | None = None
    ) -> list[Group]:
        """Exactly `groups` whole and fresh groups, the longest waiting first, or none yet.

        `version` is the one whose weights the next step starts from. What is stale, late or
        invalid by now is dropped on the way, also when the answer is none. `root_of` lets spans
        be compared with what was published; without it only versions above `version` are known
        to be wrong.
        """
        self._expire(now)
        for group_id, group in list(self._waiting.items()):
            reason = self._judge(group, version, root_of) if group.whole else None
            if reason is not None:
                self._close(group_id, reason)
        whole = [group_id for group_id, group in self._waiting.items() if group.whole]
        if len(whole) < groups:
            return []
        return [self._release(group_id) for group_id in whole[:groups]]

    def drain_dropped(self) -> dict[str, tuple[str, ...]]:
        """Ids dropped since the last call, by reason. Reasons without any are left out."""
        drained: dict[str, tuple[str, ...]] = {
            reason: tuple(ids) for reason, ids in self._dropped.items() if ids
        }
        self._dropped = {reason: [] for reason in REASONS}
        return drained

    def state(self, *, now: float) -> bytes:
        """Everything held, trajectories included, for the checkpoint. A group that no batch can
        hold is dropped as invalid: it would end the run now, and again after each resume."""
        groups = []
        for group_id, group in list(self._waiting.items()):
            try:
                packed = self._packed(group)
            except (FormatError, TrajectoryTooLargeError):
                self._close(group_id, "invalid")
            else:
                groups.append(_GroupState(group_id, float(now - group.since), packed))
        return msgspec.msgpack.encode(
            _State(
                run_id=self._run_id,
                groups=groups,
                closed=list(self._closed.items()),
                dropped=self._dropped,
                totals=self._totals,
                repeated=self._repeated,
            )
        )

    def restore(self, state: bytes, *, now: float) -> None:
        """Continue where `state` was taken. A group has waited as long as it had then."""
        try:
            read = msgspec.msgpack.decode(state, type=_State)
        except msgspec.DecodeError as error:
            raise FormatError(
                f"The batcher's state is not valid ({error}); use another checkpoint."
            ) from error
        if read.run_id != self._run_id:
            raise FormatError(
                f"The batcher's state is of run {read.run_id}, not {self._run_id}; "
                "use a checkpoint of this run."
            )
        waiting: OrderedDict[str, _Waiting] = OrderedDict()
        for held in read.groups:
            group = waiting.setdefault(held.group_id, _Waiting(now - held.waited))
            for batch in held.batches:
                group.members.update({t.id: t for t in decode_batch(batch).trajectories})
        self._waiting = waiting
        self._closed = OrderedDict(read.closed)
        self._dropped = {reason: list(read.dropped.get(reason, ())) for reason in REASONS}
        self._totals = {reason: read.totals.get(reason, 0) for reason in REASONS}
        self._repeated = read.repeated

    def _packed(self, group: _Waiting) -> list[bytes]:
        payloads = pack(tuple(group.members.values()), run_id=self._run_id)
        return [seal(payload, number) for number, payload in enumerate(payloads)]

    def _expire(self, now: float) -> None:
        for group_id, group in list(self._waiting.items()):
            if not group.whole and now - group.since >= self._group_timeout:
                self._close(group_id, "partial")

    def _judge(self, group: _Waiting, version: int, root_of: RootOf | None) -> DropReason | None:
        members = group.members.values()
        for span in (span for member in members for span in member.spans):
            if span.version > version:
                return "invalid"
            if root_of is not None and not is_root(span.root, root_of(span.version)):
                return "invalid"
        if any(staleness_of(member, version) > self._max_staleness for member in members):
            return "stale"
        return None

    def _release(self, group_id: str) -> Group:
        group = self._waiting.pop(group_id)
        self._remember(group_id, "invalid")
        return Group(group_id, tuple(sorted(group.members.values(), key=lambda m: m.id)))

    def _close(self, group_id: str, reason: DropReason) -> None:
        """Drop a group and whatever of it comes later."""
        group = self._waiting.pop(group_id)
        self._remember(group_id, reason)
        for member in group.members:
            self._drop(reason, member)

    def _remember(self, group_id: str, reason: DropReason) -> None:
        self._closed[group_id] = reason
        while len(self._closed) > CLOSED_GROUPS:
            self._closed.popitem(last=False)

    def _drop(self, reason: DropReason, trajectory_id: str) -> None:
        self._dropped[reason].append(trajectory_id)
        self._totals[reason] += 1
