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
    one is published.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from msgspec.structs import replace as altered

from farcast.delta import AnyBits, Patch, entry_of, nbytes_of
from farcast.delta.crew import Crew, threads_for
from farcast.errors import (
    IntegrityError,
    LimitError,
    ObjectNotFoundError,
    RunMismatchError,
    TargetChangedError,
    UnknownVersionError,
)
from farcast.lineage import UNUSABLE, Costs, Manifest, ObjectRef, Plan, TrustedKey
from farcast.lineage import plan as plan_path
from farcast.replica.base import Draft, Goal, Target
from farcast.replica.freshness import Freshness, OnExpiry
from farcast.store import Store
from farcast.store.archive import Archive
from farcast.store.rebuilding import Chain, Finished
from farcast.types import TensorEntry, VersionRef

RESTARTS = 4
"""Plans tried in one `stage`: each restart is at least one retention period later."""

LOOK_BACK = 64
"""Versions before the newest that are compared with a target of unknown content: one request
each, where a full copy is the other choice."""

RELIST_EVERY = 32
"""Polls without news after which the store is listed: the next version by key may have been
removed before this replica asked for it."""


class Progress(NamedTuple):
    """`done` of `total` bytes; of the store's objects while fetching, of tensors while decoding."""

    phase: Literal["fetch", "decode"]
    done: int
    total: int


OnProgress: TypeAlias = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True)
class SyncStats:
    """What a way to a version cost; `bytes_full` is what a raw copy would have moved."""

    versions: int = 0
    objects: int = 0
    bytes_fetched: int = 0
    bytes_full: int = 0
    fetch_seconds: float = 0.0
    decode_seconds: float = 0.0
    commit_seconds: float = 0.0

    def __add__(self, other: "SyncStats") -> "SyncStats":
        return SyncStats(
            versions=self.versions + other.versions,
            objects=self.objects + other.objects,
            bytes_fetched=self.bytes_fetched + other.bytes_fetched,
            bytes_full=self.bytes_full + other.bytes_full,
            fetch_seconds=self.fetch_seconds + other.fetch_seconds,
            decode_seconds=self.decode_seconds + other.decode_seconds,
            commit_seconds=self.commit_seconds + other.commit_seconds,
        )


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A verified version beside the one that is served. Commit it, or discard it."""

    plan: Plan
    draft: Draft
    stats: SyncStats

    @property
    def ref(self) -> VersionRef:
        return self.plan.want

    def discard(self) -> None:
        self.draft.discard()


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
        self._costs = costs
        self._on_progress = on_progress
        self._quiet_polls = 0
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
        damaged: dict[str, IntegrityError | LimitError] = {}
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
                return self._stage(plan)
            except _VanishedError as error:
                gone.add(error.version)
                self._archive.newest(relist=True)
            except _DamagedError as error:
                damaged[error.digest] = error.damage
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
            try:
                return self.commit(staged)
            finally:
                staged.discard()
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
            return plan_path(have, want.ref, _Without(self._archive, gone, damaged), self._costs)
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
        newest = self._archive.newest(relist=self._quiet_polls >= RELIST_EVERY)
        quiet = before is not None and newest is not None and newest.version <= before.version
        self._quiet_polls = (self._quiet_polls + 1) % (RELIST_EVERY + 1) if quiet else 0
        return newest

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
        return _Roots(known, lambda: self._archive.before(want.version, LOOK_BACK))

    # --- staging -----------------------------------------------------------------------------

    def _stage(self, plan: Plan) -> Staged:
        began = time.perf_counter()
        steps = list(self._fetched(plan))
        fetched = time.perf_counter()
        draft = self._target.begin(self._goal(plan, steps))
        try:
            self._fill(draft, Chain(steps), from_base=plan.steps[0].kind == "delta")
            draft.seal()
        except BaseException:
            draft.discard()
            raise
        stats = SyncStats(
            versions=1,
            objects=plan.objects,
            bytes_fetched=plan.bytes,
            bytes_full=plan.bytes_full,
            fetch_seconds=fetched - began,
            decode_seconds=time.perf_counter() - fetched,
        )
        return Staged(plan=plan, draft=draft, stats=stats)

    def _fetched(self, plan: Plan) -> Iterator[Sequence[Patch]]:
        """The patches of each step. All objects are asked for in one row, across steps."""
        stream = self._archive.get_objects(ref for step in plan.steps for ref in step.objects)
        done = 0
        for step in plan.steps:
            patches = []
            for ref in step.objects:
                try:
                    data = next(stream)
                except ObjectNotFoundError as error:
                    raise _VanishedError(step.version) from error
                except (IntegrityError, LimitError) as error:  # shorter, other, or longer bytes
                    raise _DamagedError(ref, error) from error
                patches.append(Patch.open(data))
                done += len(data)
                self._report("fetch", done, plan.bytes)
            yield patches

    def _goal(self, plan: Plan, steps: Sequence[Sequence[Patch]]) -> Goal:
        held = self._target.entries
        entries = dict(held) if plan.steps[0].kind == "delta" else {}
        for patches in steps:
            for patch in patches:
                for name in patch.removed:
                    entries.pop(name, None)
                for name, entry in patch.entries.items():
                    entries[name] = TensorEntry(entry.dtype, entry.shape, entry.digest)
        changed = frozenset(name for name, entry in entries.items() if held.get(name) != entry)
        return Goal(base=plan.have, ref=plan.want, entries=entries, changed=changed)

    def _fill(self, draft: Draft, chain: Chain, *, from_base: bool) -> None:
        sizes = _sizes(draft)
        done, total = 0, sum(sizes.values())

        def finish(task: tuple[str, AnyBits | None]) -> Finished | AnyBits:
            name, base = task
            if threads_for([] if base is None else [base], 2) == 1:
                return base  # for the caller's own thread
            return chain.finish(name, base, owned=self._target.gives_copies)

        with Crew(self._archive.threads) as crew:
            made = crew.each(finish, self._bases(sizes, chain, from_base=from_base))
            for name, size in sizes.items():
                try:
                    found = next(made)
                    if isinstance(found, AnyBits):
                        found = chain.finish(name, found, owned=self._target.gives_copies)
                except IntegrityError:
                    self._blame(name)
                    raise
                if found is None:
                    raise IntegrityError(
                        f"The tensor {name[:80]!r} of {draft.goal.ref} is listed but removed; "
                        "do not use that version."
                    )
                draft.add(name, *found)
                done += size
                self._report("decode", done, total)

    def _bases(
        self, names: Iterable[str], chain: Chain, *, from_base: bool
    ) -> Iterator[tuple[str, AnyBits | None]]:
        """Each tensor as the target holds it, read by this thread a little before its turn; of one
        that comes whole, where it shall lie."""
        for name in names:
            if from_base and self._target.holds(name):
                yield name, self._target.read(name)
            else:
                yield name, self._target.place_of(name) if chain.is_whole(name) else None

    def _blame(self, name: str) -> None:
        """Raise `TargetChangedError` if it was the base that did not hold what it should."""
        expected = self._target.entries.get(name)
        if expected is not None and entry_of(self._target.read(name)) != expected:
            ref = self._target.ref
            self._target.forget()
            raise TargetChangedError(
                f"The target no longer holds {ref}: {name[:80]!r} was changed by somebody else. "
                "Nothing was written; sync again to restore it from an anchor."
            )

    def _report(self, phase: Literal["fetch", "decode"], done: int, total: int) -> None:
        if self._on_progress is not None:
            self._on_progress(Progress(phase, done, total))


class _Roots(Mapping[str, VersionRef]):
    """Versions by root: those of `near`, and once that is not enough those of `further`."""

    def __init__(
        self, near: Mapping[int, Manifest], further: Callable[[], Mapping[int, Manifest]]
    ) -> None:
        self._known = _by_root(near)
        self._further: Callable[[], Mapping[int, Manifest]] | None = further

    def __getitem__(self, root: str) -> VersionRef:
        further = self._further
        if root not in self._known and further is not None:
            self._known |= _by_root(further())
            self._further = None
        return self._known[root]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def _by_root(manifests: Mapping[int, Manifest]) -> dict[str, VersionRef]:
    return {manifest.root: manifest.ref for _, manifest in sorted(manifests.items())}


class _VanishedError(Exception):
    """An object of `version` is gone from the store."""

    def __init__(self, version: int) -> None:
        super().__init__(version)
        self.version = version


class _DamagedError(Exception):
    """The object `ref` in the store is not what its digest says."""

    def __init__(self, ref: ObjectRef, damage: IntegrityError | LimitError) -> None:
        super().__init__(ref.digest)
        self.digest = ref.digest
        self.damage = damage


class _Without(Mapping[int, Manifest]):
    """The manifests of an archive, as if those of `gone` and the objects of `damaged` (digests)
    were not there."""

    def __init__(self, archive: Archive, gone: Collection[int], damaged: Collection[str]) -> None:
        self._archive = archive
        self._gone = gone
        self._damaged = damaged

    def __getitem__(self, version: int) -> Manifest:
        if version in self._gone:
            raise KeyError(version)
        try:
            manifest = self._archive.manifest(version)
        except (UnknownVersionError, *UNUSABLE):  # the archive has noted what is wrong
            raise KeyError(version) from None
        return altered(
            manifest,
            anchor=manifest.anchor if self._whole(manifest.anchor or ()) else None,
            deltas=tuple(delta for delta in manifest.deltas if self._whole(delta.objects)),
        )

    def _whole(self, objects: Iterable[ObjectRef]) -> bool:
        return not any(ref.digest in self._damaged for ref in objects)

    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _sizes(draft: Draft) -> dict[str, int]:
    """Bytes of each awaited tensor, in the draft's order."""
    entries = draft.goal.entries
    return {name: nbytes_of(entries[name].dtype, entries[name].shape) for name in draft.awaited}
