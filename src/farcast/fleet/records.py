"""Records that live in the store so that people and processes can see a run.

Mutable ones are rewritten in place and may be read stale; nothing exact rests on them.
Put-once ones are evidence: `farcast verify` compares them with what the store rebuilds.

    fleet/trainer.json                   TrainerRecord   trainer -> workers, people   rewritten
    fleet/replicas/<replica>.json        ReplicaRecord   replica -> people            rewritten
    fleet/steps/<version>.json           StepRecord      trainer -> verify, people    put once
    fleet/receipts/<replica>/<version>   Receipt         replica -> verify            put once
    fleet/clock/mark                     nothing         anybody who asks the store's time
"""

from typing import Annotated, Literal

import msgspec

from farcast.types import MAX_VERSION, Digest, Name

MAX_REPLICA_BYTES = 1 << 14
"""A replica's record or receipt: a few hundred bytes. Whoever looks at a run reads all of them."""

MAX_RECORD_BYTES = 1 << 22
"""The trainer's record names every worker there ever was: 16,384 long names take 2.5 MB."""

MAX_STEP_BYTES = 1 << 26
"""A step's record names every trajectory that it used: 65,536 of them take 1.6 MB."""

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Version = Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)]
"""What does not fit in a key's twelve digits is no version, and would not sort as a number."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Measure = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
"""Bounded so that sums and ratios of what anybody wrote stay finite numbers."""

Root = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?\\Z")]
"""A digest, or "" for none."""

Address = Annotated[str, msgspec.Meta(max_length=1024, pattern="^[!-~]*\\Z")]
"""Shown to people, so without anything that a terminal would obey."""


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class TrainerRecord(_Wire, frozen=True, kw_only=True):
    """What workers need of the trainer: is the run going on, and how far it has read."""

    run_id: Name
    state: Literal["starting", "training", "done", "stopped"]
    version: Version
    step: Count
    positions: dict[Name, Count] = {}
    """By worker: the next sequence number the trainer will read. Unread batches are the backlog."""
    updated: Seconds = 0.0


class ReplicaRecord(_Wire, frozen=True, kw_only=True):
    """A replica's own account of itself. `updated` is its clock; the store's own time of the
    object says when it was last written."""

    replica_id: Name
    state: Literal["joining", "serving", "staging", "waiting", "draining", "stopped", "failed"]
    version: Annotated[int, msgspec.Meta(ge=-1, le=MAX_VERSION)]
    """-1 before the first verified version."""
    root: Root = ""
    tokens: Count = 0
    tokens_per_second: Measure = 0.0
    trajectories: Count = 0
    waiting_seconds: Seconds = 0.0
    """Since it started: held up by the trainer's backlog, or by the store."""
    unread: Count = 0
    """Groups of its that the trainer has yet to read."""
    bytes_fetched: Count = 0
    """All that it read, wherever it came from."""
    bytes_relayed: Count = 0
    """Of these, what a relay gave: the rest crossed the line to the store."""
    bytes_full: Count = 0
    """What full copies of the same versions would have moved."""
    commits: Count = 0
    commit_seconds: Seconds = 0.0
    """Longest pause of a commit so far."""
    url: Address = ""
    """Where it answers requests; empty if nobody can ask it anything."""
    updated: Seconds = 0.0


class StepRecord(_Wire, frozen=True, kw_only=True):
    """One optimizer step, under the version that it published.

    `root` is computed from the trainer's own live tensors, not taken from the manifest.
    A trainer that resumes from the checkpoint of step s writes `resumed_from = s` in every
    later record: records of earlier incarnations with a step above s are void, since their
    optimizer steps were lost with the crash and their trajectories are read again.
    """

    version: Version
    step: Count
    root: Digest
    incarnation: Name
    resumed_from: Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)] = -1
    reward_mean: Measure = 0.0
    reward_std: Measure = 0.0
    loss: Measure | None = 0.0
    grad_norm: Measure | None = 0.0
    """None where it was not a finite number, which JSON cannot hold: the step changed nothing."""
    staleness_mean: Measure = 0.0
    staleness_max: Count = 0
    consumed: tuple[Name, ...] = ()
    """Ids of the trajectories that entered this step's gradient."""
    dropped: dict[Name, tuple[Name, ...]] = {}
    """Ids left out since the step before, by reason: "stale", "partial", "invalid"."""
    tokens: Count = 0
    changed: Count = 0
    elements: Count = 0
    bytes_sent: Count = 0
    bytes_full: Count = 0
    step_seconds: Seconds = 0.0
    blocked_seconds: Seconds = 0.0
    """Time the training loop waited for publishing."""
    waited_seconds: Seconds = 0.0
    """Time the training loop waited for trajectories."""


class Receipt(_Wire, frozen=True, kw_only=True):
    """A replica committed `version` and recomputed `root` from the weights its engine holds."""

    replica_id: Name
    version: Version
    root: Digest
    staged_seconds: Seconds
    commit_seconds: Seconds
    bytes_fetched: Count
