"""A run in one record: what it learned, what it moved, and whether everything agreed. Pure."""

import statistics
from collections.abc import Sequence

import msgspec

from farcast.config import RunConfig
from farcast.fleet.accounting import effective_steps
from farcast.fleet.audit import AuditReport
from farcast.fleet.events import FleetEvent
from farcast.fleet.records import StepRecord

FIFTHS = 5
"""The first and the last fifth of the steps are compared: one step's reward is noise."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`summary.json`. Rewards are means over steps; spreads are standard deviations over the
    same steps. `trajectories_submitted == trajectories_consumed + trajectories_stale`."""

    run_id: str
    model: str
    task: str
    seed: int
    link: str | None
    seconds: float
    steps: int
    versions_published: int
    versions_verified: int
    anchors_verified: int
    receipts_verified: int
    spans_verified: int
    roots_match: bool
    differences: tuple[str, ...]
    reward_first: float
    reward_first_spread: float
    reward_last: float
    reward_last_spread: float
    trajectories_submitted: int
    trajectories_consumed: int
    trajectories_stale: int
    trajectories_dropped: dict[str, int]
    trajectories_unread: int
    """Part of the stale ones: never read, or still waiting for their group, when the run ended."""
    staleness_mean: float
    staleness_max: int
    tokens_trained: int
    bytes_sent: int
    bytes_full: int
    bytes_sent_deltas: int
    bytes_full_deltas: int
    """The same two sums over versions without an anchor: the steady state."""
    compression_factor: float
    changed_fraction: float
    """Mean over versions of the elements that changed."""
    trainer_blocked_seconds: float
    trainer_waited_seconds: float
    replicas_killed: int
    replicas_joined: int
    replicas_restarted: int
    """Started again after a crash that was not planned."""
    trainer_resumed: int


def summarise(
    config: RunConfig,
    steps: Sequence[StepRecord],
    events: Sequence[FleetEvent],
    report: AuditReport,
    *,
    link: str | None,
    seconds: float,
) -> Summary:
    """Put a finished run into numbers. Steps lost with a crash count for bytes, not for rewards."""
    kept = effective_steps(steps).kept
    trained = [record for record in kept if record.consumed]
    fifth = max(1, len(trained) // FIFTHS)
    first = [record.reward_mean for record in trained[:fifth]]
    last = [record.reward_mean for record in trained[-fifth:]]
    changes = [r.changed / r.elements for r in steps if r.version > 0 and r.elements]
    deltas = [record for record in steps if record.version not in report.anchor_versions]
    sent, full = sum(r.bytes_sent for r in steps), sum(r.bytes_full for r in steps)
    weights = [len(record.consumed) for record in trained]
    return Summary(
        run_id=config.run_id,
        model=config.model,
        task=config.task.name,
        seed=config.train.seed,
        link=link,
        seconds=seconds,
        steps=max((record.step for record in kept), default=0),
        versions_published=report.versions_published,
        versions_verified=report.versions_verified,
        anchors_verified=report.anchors_verified,
        receipts_verified=report.receipts_verified,
        spans_verified=report.spans_verified,
        roots_match=report.roots_match,
        differences=report.differences,
        reward_first=_mean(first),
        reward_first_spread=_spread(first),
        reward_last=_mean(last),
        reward_last_spread=_spread(last),
        trajectories_submitted=report.account.submitted,
        trajectories_consumed=report.account.consumed,
        trajectories_stale=report.account.stale,
        trajectories_dropped=report.account.dropped,
        trajectories_unread=report.account.unread,
        staleness_mean=_mean([r.staleness_mean for r in trained], weights),
        staleness_max=max((record.staleness_max for record in trained), default=0),
        tokens_trained=sum(record.tokens for record in trained),
        bytes_sent=sent,
        bytes_full=full,
        bytes_sent_deltas=sum(record.bytes_sent for record in deltas),
        bytes_full_deltas=sum(record.bytes_full for record in deltas),
        compression_factor=full / sent if sent else 0.0,
        changed_fraction=_mean(changes),
        trainer_blocked_seconds=sum(record.blocked_seconds for record in steps),
        trainer_waited_seconds=sum(record.waited_seconds for record in steps),
        replicas_killed=sum(event.kind == "killed" for event in events),
        replicas_joined=sum(event.kind == "joined" for event in events),
        replicas_restarted=sum(event.kind == "restarted" for event in events),
        trainer_resumed=sum(event.kind == "resumed" for event in events),
    )


def _mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    return statistics.fmean(values, weights) if values else 0.0


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
