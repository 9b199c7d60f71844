"""Does everything a run recorded agree? Pure: records in, differences out.

Two rules. *Roots*: one version has one root, whoever says so: the store's rebuild, the manifest,
the trainer's own live tensors, each replica's live engine, and the spans inside trajectories.
*Exactly once*: every submitted trajectory is in exactly one place: a step's gradient, a list of
dropped ones, or not read by the end. Refuses nothing: it lists what differs, and the caller
decides.

A trainer that crashed and resumed from the checkpoint of step s lost its steps above s. Their
records are void: those optimizer steps are not in the weights, and their trajectories were read
again.

    incarnation  step 1  2  3  4          crash; the newest checkpoint is of step 2
    "a"               |  |  void void
    "b"               .  .  3  4  5       resumed_from = 2
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from farcast.fleet.records import Receipt, StepRecord

MAX_LISTED = 20
"""Differences of one kind beyond this are counted, not listed: one cause makes thousands."""


class Effective(msgspec.Struct, frozen=True):
    """The step records that count, those that do not, and what is wrong with the sequence."""

    kept: tuple[StepRecord, ...]
    void: tuple[StepRecord, ...]
    differences: tuple[str, ...]


def effective_steps(records: Iterable[StepRecord]) -> Effective:
    """Tell steps that are in the weights from those lost with a crash."""
    kept: list[StepRecord] = []
    void: list[StepRecord] = []
    differences: list[str] = []
    incarnations: list[str] = []
    for record in sorted(records, key=lambda r: r.version):
        if not incarnations or record.incarnation != incarnations[-1]:
            if record.incarnation in incarnations:
                differences.append(
                    f"version {record.version}: trainer {record.incarnation} wrote after "
                    "another had taken over"
                )
            incarnations.append(record.incarnation)
            void += [r for r in kept if r.step > record.resumed_from]
            kept = [r for r in kept if r.step <= record.resumed_from]
        if kept and record.step not in (kept[-1].step, kept[-1].step + 1):
            differences.append(
                f"version {record.version}: step {record.step} follows step {kept[-1].step}"
            )
        kept.append(record)
    return Effective(tuple(kept), tuple(void), tuple(differences))


class Published(msgspec.Struct, frozen=True):
    """What the manifest of a version says, next to what the store's bytes rebuild to.

    A rebuilt root is "" where that way does not exist for this version, or failed.
    """

    version: int
    step: int
    root: str
    by_delta: str = ""
    by_anchor: str = ""
    others: tuple[str, ...] = ()
    """The roots of the same version in other served formats."""


class SpanClaim(msgspec.Struct, frozen=True, order=True):
    """Some trajectory says that `version` with `root` wrote tokens of it."""

    version: int
    root: str


def compare_roots(
    published: Sequence[Published],
    steps: Effective,
    receipts: Iterable[Receipt],
    claims: Mapping[SpanClaim, str],
) -> list[str]:
    """Every place where a version's root differs. `claims` gives one trajectory id for each. What
    is said of versions before the oldest in the store is not compared: they were removed."""
    roots = {p.version: p.root for p in published}
    others = {p.version: p.others for p in published}
    differences = [
        f"version {p.version}: the store rebuilds {rebuilt[:12]} by its {way}, "
        f"the manifest says {p.root[:12]}"
        for p in published
        for way, rebuilt in (("deltas", p.by_delta), ("anchor", p.by_anchor))
        if rebuilt not in ("", p.root)
    ]

    oldest = min(roots, default=0)

    def check(version: int, root: str, who: str) -> None:
        if version < oldest:
            return
        if version not in roots:
            differences.append(f"version {version}: {who} names it, the store has no manifest")
        elif roots[version] != root and root not in others[version]:
            differences.append(
                f"version {version}: {who} says {root[:12]}, "
                f"the manifest says {roots[version][:12]}"
            )

    for record in (*steps.kept, *steps.void):
        check(record.version, record.root, "the trainer")
    for receipt in receipts:
        check(receipt.version, receipt.root, f"replica {receipt.replica_id}")
    for claim, trajectory in sorted(claims.items()):
        check(claim.version, claim.root, f"trajectory {trajectory}")
    return differences


def unrecorded_versions(published: Sequence[Published], steps: Effective) -> list[str]:
    """Versions that no trainer vouches for, unless their step was lost with a crash.

    The newest may lack its record while the trainer is between the two writes.
    """
    recorded = {r.version for r in (*steps.kept, *steps.void)}
    resumed = [r for r in steps.kept if r.resumed_from >= 0]
    return [
        f"version {p.version}: the trainer left no record of it"
        for p in published[:-1]
        if p.version not in recorded
        and not any(r.version > p.version and r.resumed_from < p.step for r in resumed)
    ]


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Where every submitted trajectory went."""

    submitted: int
    resent: int
    """Written a second time by a worker that lost an answer; readers know them by their id."""
    consumed: int
    stale: int
    """Left out because their tokens were too old, those not read by the end included."""
    dropped: dict[str, int]
    """The trainer's own count, by reason."""
    unread: int
    """Stale "after the end": submitted, never read or still waiting for their group."""
    differences: tuple[str, ...]


def account(submitted: Iterable[str], steps: Effective) -> Account:
    """Check that each id stands in exactly one place."""
    given = Counter(submitted)
    used = Counter(id_ for record in steps.kept for id_ in record.consumed)
    left = Counter(id_ for record in steps.kept for ids in record.dropped.values() for id_ in ids)
    reasons = Counter[str]()
    for record in steps.kept:
        reasons.update({reason: len(ids) for reason, ids in record.dropped.items()})
    differences = [
        *_listed("was trained on twice", (i for i, n in used.items() if n > 1)),
        *_listed("was dropped twice", (i for i, n in left.items() if n > 1)),
        *_listed("was trained on and dropped", used.keys() & left.keys()),
        *_listed("was counted but is not in the store", (used.keys() | left.keys()) - given.keys()),
    ]
    unread = given.keys() - used.keys() - left.keys()
    return Account(
        submitted=len(given),
        resent=given.total() - len(given),
        consumed=len(used),
        stale=len(given) - len(used),
        dropped=dict(sorted(reasons.items())),
        unread=len(unread),
        differences=tuple(differences),
    )


def _listed(what: str, ids: Iterable[str]) -> list[str]:
    found = sorted(ids)
    lines = [f"trajectory {id_} {what}" for id_ in found[:MAX_LISTED]]
    if len(found) > MAX_LISTED:
        lines.append(f"{len(found) - MAX_LISTED} more trajectories: {what}")
    return lines
