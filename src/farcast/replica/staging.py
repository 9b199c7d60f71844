"""Following a plan: its objects fetched, decoded beside what is served, and verified.

`Stager` does one plan or raises; what to do about an error is the subscriber's business:

    VanishedError         an object is gone from the store
    DamagedError          objects that are not what their digests say, or whose bits, once decoded,
                          are not what the manifest promises
    TargetChangedError    the base is not what the target says that it holds; it claims nothing now
    any other             the target could not be read or written

Refuses to choose a plan, and to change anything that a reader of the target can see.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, TypeAlias

from farcast.delta import AnyBits, Patch, entry_of, nbytes_of, root_of
from farcast.delta.crew import Crew, threads_for
from farcast.errors import (
    FormatError,
    IntegrityError,
    LimitError,
    ObjectNotFoundError,
    TargetChangedError,
)
from farcast.lineage import ObjectRef, Plan
from farcast.replica.base import Draft, Goal, Target
from farcast.store.archive import Archive
from farcast.store.rebuilding import Chain, Finished, check_figures
from farcast.types import TensorEntry, VersionRef

Damage: TypeAlias = FormatError | IntegrityError | LimitError
DAMAGE = (FormatError, IntegrityError, LimitError)


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
    """A verified version beside the one that is served. Commit it, or discard it: `with staged:`
    discards what was not committed. A folder is locked for as long as this object is there."""

    plan: Plan
    draft: Draft
    stats: SyncStats

    @property
    def ref(self) -> VersionRef:
        return self.plan.want

    def discard(self) -> None:
        """Drop what was prepared. Safe to call twice, and after a commit."""
        self.draft.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


class VanishedError(Exception):
    """An object of `version` is gone from the store."""

    def __init__(self, version: int) -> None:
        super().__init__(version)
        self.version = version


class DamagedError(Exception):
    """`damage` shows that at least one of `objects` must not be used."""

    def __init__(self, objects: Iterable[ObjectRef], damage: Damage) -> None:
        super().__init__(str(damage))
        self.digests = [ref.digest for ref in objects]
        self.damage = damage


class _UndecodedError(Exception):
    """A tensor could not be made of what was fetched and of what the target holds."""

    def __init__(self, damage: Damage) -> None:
        super().__init__(str(damage))
        self.damage = damage


class _Fetched(NamedTuple):
    ref: ObjectRef
    patch: Patch

    def names(self, name: str) -> bool:
        return name in self.patch.entries or name in self.patch.removed


class Stager:
    """Prepares versions of `archive` for `target`. `on_progress` is called from the thread that
    stages."""

    def __init__(self, archive: Archive, target: Target, on_progress: OnProgress | None) -> None:
        self._archive = archive
        self._target = target
        self._on_progress = on_progress

    def stage(self, plan: Plan) -> Staged:
        """The sealed draft of a plan that has steps."""
        began = time.perf_counter()
        fetched = list(self._fetched(plan))
        decoding = time.perf_counter()
        chain, goal = self._chain(plan, fetched)
        draft = self._target.begin(goal)
        try:
            self._fill(draft, chain, fetched, from_base=plan.steps[0].kind == "delta")
            draft.seal()
        except BaseException:
            draft.discard()
            raise
        stats = SyncStats(
            versions=1,
            objects=plan.objects,
            bytes_fetched=plan.bytes,
            bytes_full=plan.bytes_full,
            fetch_seconds=decoding - began,
            decode_seconds=time.perf_counter() - decoding,
        )
        return Staged(plan=plan, draft=draft, stats=stats)

    # --- fetching ----------------------------------------------------------------------------

    def _fetched(self, plan: Plan) -> Iterator[Sequence[_Fetched]]:
        """The patches of each step. All objects are asked for in one row, across steps."""
        stream = self._archive.get_objects(ref for step in plan.steps for ref in step.objects)
        done = 0
        for step in plan.steps:
            patches = []
            for ref in step.objects:
                try:
                    patch = Patch.open(next(stream))
                except ObjectNotFoundError as error:
                    raise VanishedError(step.version) from error
                except DAMAGE as error:  # shorter, longer, other bytes, or no delta
                    raise DamagedError([ref], error) from error
                patches.append(_Fetched(ref, patch))
                done += ref.size
                self._report("fetch", done, plan.bytes)
            yield patches

    def _chain(self, plan: Plan, fetched: Sequence[Sequence[_Fetched]]) -> tuple[Chain, Goal]:
        """What makes the version's tensors, and which they are, checked against its root."""
        try:
            chain = Chain([[one.patch for one in step] for step in fetched])
            goal = self._goal(plan, fetched)
            if root_of(goal.entries) != goal.ref.root:
                raise IntegrityError(
                    f"The tensors that the store lists for {goal.ref} do not have that root; "
                    "do not use that version."
                )
        except DAMAGE as error:
            raise DamagedError([one.ref for step in fetched for one in step], error) from error
        check_figures(goal.entries, self._archive.manifest(goal.ref.version))  # no way around it
        return chain, goal

    def _goal(self, plan: Plan, fetched: Sequence[Sequence[_Fetched]]) -> Goal:
        held = self._target.entries
        entries = dict(held) if plan.steps[0].kind == "delta" else {}
        for step in fetched:
            for _, patch in step:
                for name in patch.removed:
                    entries.pop(name, None)
                for name, entry in patch.entries.items():
                    entries[name] = TensorEntry(entry.dtype, entry.shape, entry.digest)
        changed = frozenset(name for name, entry in entries.items() if held.get(name) != entry)
        return Goal(base=plan.have, ref=plan.want, entries=entries, changed=changed)

    # --- decoding ----------------------------------------------------------------------------

    def _fill(
        self,
        draft: Draft,
        chain: Chain,
        fetched: Sequence[Sequence[_Fetched]],
        *,
        from_base: bool,
    ) -> None:
        sizes = _sizes(draft)
        done, total = 0, sum(sizes.values())

        def decoded(name: str, base: AnyBits | None) -> Finished:
            try:
                return chain.finish(name, base, owned=self._target.gives_copies)
            except DAMAGE as error:
                raise _UndecodedError(error) from error

        def work(task: tuple[str, AnyBits | None]) -> Finished | AnyBits:
            name, base = task
            if threads_for([] if base is None else [base], 2) == 1:
                return base  # for the caller's own thread
            return decoded(name, base)

        with Crew(self._archive.threads) as crew:
            made = crew.each(work, self._bases(sizes, chain, from_base=from_base))
            for name, size in sizes.items():
                try:
                    found = next(made)
                    if isinstance(found, AnyBits):
                        found = decoded(name, found)
                except _UndecodedError as error:
                    self._blame(name)
                    objects = [one.ref for step in fetched for one in step if one.names(name)]
                    raise DamagedError(objects, error.damage) from error.damage
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


def _sizes(draft: Draft) -> Mapping[str, int]:
    """Bytes of each awaited tensor, in the draft's order."""
    entries = draft.goal.entries
    return {name: nbytes_of(entries[name].dtype, entries[name].shape) for name in draft.awaited}
