"""The header of a batch: one msgpack record a trajectory, with everything but its columns. Pure.

A field that was added after the first format stands at the end of its record and is left out where
it says nothing; `Header.format` says which format a header needs.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec

from farcast.errors import FormatError, LimitError
from farcast.trajectory.checks import Columns, check_trajectory
from farcast.trajectory.columns import Stored, store
from farcast.trajectory.wire import (
    MAX_EXPERT_LAYERS,
    MAX_EXPERTS_PER_TOKEN,
    MAX_FEEDBACK,
    MAX_TOKENS,
    MAX_TURNS,
    FinishReason,
    Role,
    RoutedExperts,
    Trajectory,
    Turn,
)
from farcast.types import MAX_VERSION, Digest, Name, PolicySpan

MAX_BATCH_TRAJECTORIES = 1 << 16
MAX_HEADER_BYTES = 1 << 24
MAX_POLICIES = 1 << 14
"""Distinct (version, root) pairs of one batch."""

_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
_Text = Annotated[str, msgspec.Meta(max_length=1 << 16)]
_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class Policy(_Wire, frozen=True):
    version: Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)]
    root: Digest


class _Span(_Wire, frozen=True):
    start: _Size
    end: _Size
    policy: Annotated[int, msgspec.Meta(ge=0, lt=MAX_POLICIES)]


class _Turn(_Wire, frozen=True):
    role: Role
    start: _Size
    end: _Size
    started: float
    ended: float
    feedback: Annotated[str, msgspec.Meta(max_length=MAX_FEEDBACK)] = ""


class ExpertShape(_Wire, frozen=True):
    """What the routed experts of all records of a batch have in common."""

    layers: Annotated[int, msgspec.Meta(ge=1, le=MAX_EXPERT_LAYERS)]
    top_k: Annotated[int, msgspec.Meta(ge=1, le=MAX_EXPERTS_PER_TOKEN)]
    width: Annotated[int, msgspec.Meta(ge=1, le=2)]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return self.layers * self.top_k * self.width


class Record(_Wire, frozen=True):
    """A trajectory without its columns. `value_runs` is 0 where log-probs stand exactly where
    the mask is set; `routed` is the number of tokens whose experts are known."""

    id: Name
    group_id: Name
    group_size: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    worker_id: Name
    tokens: _Size
    values: _Size
    mask_runs: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS + 1)]
    value_runs: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS + 1)]
    spans: Annotated[tuple[_Span, ...], msgspec.Meta(max_length=MAX_TURNS)]
    turns: Annotated[tuple[_Turn, ...], msgspec.Meta(max_length=MAX_TURNS)]
    reward: float
    rewards: Annotated[dict[_Text, float], msgspec.Meta(max_length=1 << 10)]
    finish_reason: FinishReason
    task: _Text
    seed: _Int64
    temperature: float
    top_p: float
    engine: _Text
    metadata: Annotated[dict[_Text, _Text], msgspec.Meta(max_length=1 << 12)]
    top_k: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0
    routed: _Size = 0


class Header(_Wire, frozen=True):
    run_id: Name
    width: Annotated[int, msgspec.Meta(ge=1, le=4)]
    policies: Annotated[tuple[Policy, ...], msgspec.Meta(max_length=MAX_POLICIES)]
    records: Annotated[tuple[Record, ...], msgspec.Meta(max_length=MAX_BATCH_TRAJECTORIES)]
    experts: ExpertShape | None = None

    @property
    def format(self) -> int:
        """The lowest format that can say this, which is the one it is written in."""
        new = self.experts is not None or any(t.feedback for r in self.records for t in r.turns)
        return 2 if new else 1


def describe(
    trajectories: Sequence[Trajectory], columns: Sequence[Columns], run_id: str, width: int
) -> tuple[bytes, Header, list[Stored]]:
    """The header's bytes, and the header as read back through its own types: what a reader would
    refuse, a writer cannot send."""
    policies: dict[Policy, int] = {}
    if len(trajectories) > MAX_BATCH_TRAJECTORIES:
        raise LimitError(
            f"The batch holds over {MAX_BATCH_TRAJECTORIES} trajectories; write several batches."
        )
    stored = [store(c) for c in columns]
    shape = _shape_of(trajectories)
    try:
        pairs = zip(trajectories, stored, strict=True)
        records = [_written(_record(t, s, policies)) for t, s in pairs]
        said = (run_id, width, tuple(policies), records, *((shape,) if shape else ()))
        header = msgspec.msgpack.encode(said, order="deterministic")
    except (TypeError, ValueError, OverflowError) as error:
        raise FormatError(
            f"A trajectory holds a value of a kind that cannot be written ({error}); correct it."
        ) from error
    if len(policies) > MAX_POLICIES:
        raise LimitError(f"The batch names over {MAX_POLICIES} versions; write several batches.")
    if len(header) > MAX_HEADER_BYTES:
        raise LimitError(
            f"Turns, spans and metadata take over {MAX_HEADER_BYTES} bytes; write several batches."
        )
    return header, read_header(header), stored


def _record(t: Trajectory, stored: Stored, policies: dict[Policy, int]) -> Record:
    spans = tuple(
        _Span(s.start, s.end, policies.setdefault(Policy(s.version, s.root), len(policies)))
        for s in t.spans
    )
    turns = tuple(_Turn(u.role, u.start, u.end, u.started, u.ended, u.feedback) for u in t.turns)
    return Record(
        id=t.id,
        group_id=t.group_id,
        group_size=t.group_size,
        worker_id=t.worker_id,
        tokens=len(t.token_ids),
        values=int(stored.present.sum()),
        mask_runs=len(stored.mask_runs),
        value_runs=len(stored.value_runs),
        spans=spans,
        turns=turns,
        reward=t.reward,
        rewards=t.rewards,
        finish_reason=t.finish_reason,
        task=t.task,
        seed=t.seed,
        temperature=t.temperature,
        top_p=t.top_p,
        engine=t.engine,
        metadata=t.metadata,
        top_k=t.top_k,
        routed=t.experts.tokens if t.experts else 0,
    )


def _written(record: Record) -> tuple[Any, ...]:
    """A record as it is written: what was added to it since the first format is left out where it
    says nothing, so that what needs no later format has the bytes of the first."""
    turns = tuple(_without(msgspec.structs.astuple(turn), "") for turn in record.turns)
    fields = msgspec.structs.astuple(msgspec.structs.replace(record, turns=turns))
    return _without(_without(fields, 0), 0) if not record.routed else fields


def _without(fields: tuple[Any, ...], default: object) -> tuple[Any, ...]:
    """Fields but for the last where that is the default."""
    return fields[:-1] if fields[-1] == default else fields


def expert_shapes(trajectories: Iterable[Trajectory]) -> set[ExpertShape]:
    """The shapes of the models that routed these; one batch, and one group, has one at most."""
    return {
        ExpertShape(t.experts.layers, t.experts.top_k, t.experts.width)
        for t in trajectories
        if t.experts is not None
    }


def _shape_of(trajectories: Sequence[Trajectory]) -> ExpertShape | None:
    shapes = expert_shapes(trajectories)
    if len(shapes) > 1:
        raise LimitError(
            "The trajectories were routed by models of different shapes; write several batches."
        )
    return next(iter(shapes), None)


def read_header(data: bytes) -> Header:
    try:
        return msgspec.msgpack.decode(data, type=Header)
    except msgspec.DecodeError as error:
        raise FormatError(
            f"A batch's header is not valid ({error}); correct the trajectory or discard the batch."
        ) from error


def trajectory_of(
    r: Record, policies: Sequence[Policy], columns: Columns, experts: RoutedExperts | None
) -> Trajectory:
    """Put a trajectory together again, and check it."""
    if any(span.policy >= len(policies) for span in r.spans):
        raise FormatError("A span of the batch names no policy of the batch; discard it.")
    trajectory = Trajectory(
        id=r.id,
        group_id=r.group_id,
        group_size=r.group_size,
        worker_id=r.worker_id,
        token_ids=tuple(columns.ids.tolist()),
        logprobs=tuple(columns.logprobs.tolist()),
        loss_mask=tuple(columns.mask.tolist()),
        spans=tuple(
            PolicySpan(s.start, s.end, policies[s.policy].version, policies[s.policy].root)
            for s in r.spans
        ),
        turns=tuple(
            Turn(
                role=t.role,
                start=t.start,
                end=t.end,
                started=t.started,
                ended=t.ended,
                feedback=t.feedback,
            )
            for t in r.turns
        ),
        reward=r.reward,
        rewards=r.rewards,
        finish_reason=r.finish_reason,
        task=r.task,
        seed=r.seed,
        temperature=r.temperature,
        top_p=r.top_p,
        engine=r.engine,
        metadata=r.metadata,
        top_k=r.top_k,
        experts=experts,
    )
    check_trajectory(trajectory, columns)
    return trajectory
