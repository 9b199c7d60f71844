"""`Subscriber`: brings a target to the newest version of a run, or to a named one.

The archive verifies what it reads and the target what it writes; this decides what to do:

 1. Go to the newest version, never back to an older one by itself: a store may answer with
    an old state. A version named with `to=` may be older.
 2. A target that claims no version is compared with the run's roots by hashing, so that a
    folder or model that is already right costs one delta, not an anchor.
 3. Objects that vanish while they are fetched were removed because newer versions exist: plan
    again without them, at most `RESTARTS` times.
 4. A base that isn't what its version says is the target's fault, not the store's: the target
    stops claiming it, and the next plan starts from an anchor.
 5. A damaged object is planned around: another delta or an anchor leads past it, or will once
    one is published. So is one whose bytes are right but whose content, decoded, is not what the
    version promises.
 6. A damaged or forged manifest is passed over if a later one can be reached without it. While
    there is nothing better to go to, what is wrong with it is raised.
 7. With a pinned key, what that key did not sign is never used, and an old state of the run is
    not taken for the newest (`farcast.replica.freshness`).
 8. Damage with no way around, a target that does not fit, an uncertain target: raise. Nothing
    was changed.

Example: the replica holds 7. Version 9 is newest. `plan()` shows 7 -> 8 -> 9 as two deltas,
`stage()` fetches both, folds them tensor by tensor and verifies 9 while 7 still serves, and
`commit(staged)` switches and returns 9.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from farcast.delta import nbytes_of
from farcast.errors import RunMismatchError, UnknownVersionError
from farcast.lineage import Costs, Manifest, Plan, TrustedKey
from farcast.lineage import plan as plan_path
from farcast.replica.base import Target
from farcast.replica.freshness import Freshness, OnExpiry
from farcast.replica.history import ByRoot, Without
from farcast.replica.staging import (
    Damage,
    DamagedError,
    OnProgress,
    Staged,
    Stager,
    SyncStats,
    VanishedError,
)
from farcast.store import Store
from farcast.store.archive import Archive
from farcast.types import VersionRef

RESTARTS = 4
"""Plans tried in one `stage`: each restart is at least one retention period later."""

LOOK_BACK = 64
"""Versions before the newest that are compared with a target of unknown content: one request
each, where a full copy is the other choice."""

LOOK_EVERY = 32
"""Polls in a row without news after which a replica asks whether its own version is still there,
and before that after 2, 4, 8 and 16. If it was removed, so was the next one before this replica
asked for it, and the store is listed. The second poll finds who was overtaken since the last news;
together they make three requests in a hundred."""

LATE_SECONDS = 30.0
"""Time since the last answer after which it asks at once: it slept, or the store was away, and
meanwhile a run may have gone far. Who polls as rarely as this can afford the request."""


class Subscriber:
    """Follows `run_id` in `store` with one target. One thread stages; any thread may commit.

    `on_progress` is called from the staging thread. `workers` bounds requests in flight.
    `threads` decode and verify tensors in host memory; None takes half of the cores that the
    process may run on, four at most.

    `served_format` names which of a run's formats is taken; None takes the one that each manifest
    names first.

    With `trusted_key` only versions that this key signed are taken, and a store that holds
    versions back is found out once the publisher's last timestamp has run out: nothing is taken
    any more (`on_expiry="warn"`: a warning is logged and kept in `warning`).

    With `costs`, the figures of the link, the path that takes the least time is chosen instead of
    the one with the fewest bytes.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        target: Target,
        *,
        on_progress: OnProgress | None = None,
        workers: int = 4,
        threads: int | None = None,
        served_format: str | None = None,
        trusted_key: TrustedKey | None = None,
        on_expiry: OnExpiry = "refuse",
        costs: Costs | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._archive = Archive(
            store,
            run_id,
            workers=workers,
            trusted=trusted_key,
            served_format=served_format,
            threads=threads,
        )
        self._freshness = Freshness(self._archive, on_expiry=on_expiry, clock=clock)
        self._target = target
        self._stager = Stager(self._archive, target, on_progress)
        self._costs = costs
        self._clock = clock
        self._quiet_polls = 0
        self._answered = clock()
        self._last = SyncStats()
        self._totals = SyncStats()

    @property
    def archive(self) -> Archive:
        return self._archive

    @property
    def target(self) -> Target:
        return self._target

    @property
    def ref(self) -> VersionRef | None:
        """The verified version that the target holds."""
        return self._target.ref

    @property
    def warning(self) -> str | None:
        """Why the store may be showing an old state of the run; None while it is known not to."""
        return self._freshness.warning

    @property
    def last(self) -> SyncStats:
        """Of the last commit."""
        return self._last

    @property
    def totals(self) -> SyncStats:
        """Of all commits by this object."""
        return self._totals

    def plan(self, to: VersionRef | int | None = None) -> Plan:
        """The cheapest way to `to`, or to the newest version; without steps if there is nothing
        to do. Raises `UnknownVersionError` while the run has no version."""
        plan = self._plan(to, (), ())
        if plan is None:
            raise self._no_version()
        return plan

    def stage(self, to: VersionRef | int | None = None) -> Staged | None:
        """Fetch, decode and verify beside what is served; None when there is nothing newer."""
        gone: set[int] = set()
        damaged: dict[str, Damage] = {}
        for _ in range(RESTARTS):
            try:
                plan = self._plan(to, gone, damaged)
            except UnknownVersionError:
                if damaged:  # no way around it
                    break
                raise
            if plan is None or not plan.steps:
                self._raise_damage_ahead(to, plan)
                return None
            try:
                return self._stager.stage(plan)
            except VanishedError as error:
                gone.add(error.version)
                self._archive.newest(relist=True)
            except DamagedError as error:
                damaged |= dict.fromkeys(error.digests, error.damage)
        for damage in damaged.values():
            raise damage
        raise UnknownVersionError(
            f"Objects of {len(gone)} versions of {self._archive.run_id!r} were removed while they "
            "were fetched; keep versions for longer, or sync again."
        )

    def commit(self, staged: Staged) -> VersionRef:
        """Switch the target to what was staged; see `Target.commit` for what an error leaves."""
        began = time.perf_counter()
        ref = self._target.commit(staged.draft)
        self._last = replace(staged.stats, commit_seconds=time.perf_counter() - began)
        self._totals += self._last
        return ref

    def sync(self, to: VersionRef | int | None = None) -> VersionRef:
        """Stage and commit; returns the version held, verified. Raises `UnknownVersionError`
        while the run has no version."""
        staged = self.stage(to)
        if staged is not None:
            with staged:
                return self.commit(staged)
        ref = self._target.ref
        if ref is None:
            raise self._no_version()
        return ref

    # --- deciding ----------------------------------------------------------------------------

    def _plan(
        self, to: VersionRef | int | None, gone: Collection[int], damaged: Collection[str]
    ) -> Plan | None:
        """None while the run has no version."""
        self._check_run()
        want = self._newest() if to is None else self._named(to)
        if to is None:
            want = self._freshness.check(want, self._target.newest)
        if want is None:
            return None
        have = self._target.ref or self._target.recognise(lambda: self._roots(want))
        stale = to is None and have is not None and want.version < have.version
        if have is not None and (stale or want.ref == have):
            entries = self._target.entries.values()
            size = sum(nbytes_of(entry.dtype, entry.shape) for entry in entries)
            return Plan(have=have, want=have, steps=(), bytes_full=size)
        if not gone and not damaged:
            return self._archive.plan(have, want.ref, self._costs)
        try:
            return plan_path(have, want.ref, Without(self._archive, gone, damaged), self._costs)
        except UnknownVersionError:
            damage = self._archive.damage_between(have, want.ref)
            if damage is not None and not damaged:
                raise damage from None
            raise

    def _raise_damage_ahead(self, to: VersionRef | int | None, plan: Plan | None) -> None:
        """There is nothing newer to go to: say so if that is because it cannot be used."""
        held = -1 if plan is None else plan.want.version
        ahead = [v for v in self._archive.damaged if v > held]
        if to is None and ahead:
            raise self._archive.damaged[max(ahead)]

    def _check_run(self) -> None:
        owner = self._target.run_id
        if owner not in (None, self._archive.run_id):
            raise RunMismatchError(
                f"The target belongs to the run {owner!r}, not to {self._archive.run_id!r}; "
                "use another target, or, if it may be overwritten, remove what says so: a folder's "
                ".farcast, an engine's seen.json in its scratch folder."
            )

    def _named(self, to: VersionRef | int) -> Manifest:
        if isinstance(to, int):
            return self._archive.manifest(to)
        manifest = self._archive.manifest(to.version)
        if manifest.ref != to:
            raise UnknownVersionError(
                f"The store holds {manifest.ref}, not {to}; name the version that it holds."
            )
        return manifest

    def _newest(self) -> Manifest | None:
        before = self._target.ref
        newest = self._archive.newest()
        if not _is_quiet(newest, before):
            self._quiet_polls = 0
        else:
            self._quiet_polls += 1
            if self._looks_further():
                newest = self._archive.newest(relist=True)
        self._answered = self._clock()
        return newest

    def _looks_further(self) -> bool:
        """Whether the store has to be listed, as the next version may be there under no key that
        this replica asks for. Now and then it is listed whatever is there, ever more rarely:
        versions without the served format, and those removed out of turn, leave gaps too."""
        polls = self._quiet_polls
        doubled = polls > 1 and polls.bit_count() == 1
        if doubled and polls >= LOOK_EVERY:
            return True
        late = self._clock() - self._answered >= LATE_SECONDS
        return (late or doubled or polls % LOOK_EVERY == 0) and self._archive.overtaken()

    def _no_version(self) -> UnknownVersionError:
        served = self._archive.served_format
        what = "version" if served is None else f"version served as {served}"
        return UnknownVersionError(
            f"The run {self._archive.run_id!r} has no {what} yet; wait for its trainer."
        )

    def _roots(self, want: Manifest) -> Mapping[str, VersionRef]:
        """The versions that a target may already hold: those a plan from nothing would read about
        anyway, and the first; if it is none of these, what came shortly before."""
        try:
            known = self._archive.manifests_for(None, want.ref)
        except UnknownVersionError:  # the anchor is gone; a base at hand may still do
            known = {want.version: want}
        if 0 not in known:
            with contextlib.suppress(UnknownVersionError):
                known[0] = self._archive.manifest(0)
        return ByRoot(known, lambda: self._archive.before(want.version, LOOK_BACK))


def _is_quiet(newest: Manifest | None, held: VersionRef | None) -> bool:
    return held is not None and newest is not None and newest.version <= held.version
