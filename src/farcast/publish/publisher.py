"""The trainer's end of the line: served tensors in, durable versions out.

The rules:

 1. Objects first, then the manifest, then the baseline: a version is visible only when all its
    bytes are durable, and the next delta starts from what is visible.
 2. An error leaves the baseline, so the next version carries the changes of both.
 3. A commit whose reply was lost may have happened. The next version then finds its place taken
    by this publisher's own manifest, moves the baseline there, and goes one further.
 4. A place taken by anybody else's manifest fences this publisher for good: two trainers on one
    run would tear it apart, and only one of them can win.
 5. Publishing exactly what the newest version holds, for the same step, changes nothing: a
    trainer that comes back may repeat its last step. `repeats=False` gives it the next number.
 6. A place taken by a manifest that nobody can use is left behind: the version goes one further.
 7. What is given is never written into, and may be overwritten as soon as a call returns.

With `comms`, every rank of a sharded model publishes its own shards; see `sharded`. Refuses to
gather shards, to derive served tensors from master weights, and to retry.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

from msgspec.structs import replace

from farcast.delta import AnyBits
from farcast.errors import (
    ConfigError,
    FarcastError,
    ObjectNotFoundError,
    VersionConflictError,
)
from farcast.formats import canonical_names
from farcast.lineage import (
    UNUSABLE,
    Manifest,
    Signer,
    TrustedKey,
    check_anchor_every,
    check_squash,
    encode_manifest,
)
from farcast.publish.comms import Comms
from farcast.publish.drafting import Base, Draft, Drafting
from farcast.publish.job import PublishJob
from farcast.publish.lines import (
    Newest,
    derived,
    draft_lines,
    joined_manifest,
    load_newest,
    make_lines,
    parse_recipes,
)
from farcast.publish.parts import PART_BYTES
from farcast.publish.pieces import Where, layout_of, localised
from farcast.publish.poison import check_poison
from farcast.publish.reports import PublishReport, PublishTotals
from farcast.publish.shard_formats import Holding
from farcast.publish.sharded import ShardedVersions
from farcast.publish.snapshot import Bits, Snapshots, comes_over, views
from farcast.publish.timestamps import VALID_SECONDS, Timestamps
from farcast.store.archive import Archive
from farcast.store.base import Store
from farcast.store.collecting import GRACE, Garbage, collect_garbage
from farcast.store.rebuilding import Weights
from farcast.types import NAME_PATTERN, TensorEntry, VersionRef

Tensors = Mapping[str, Any] | Iterable[tuple[str, Any]]

_T = TypeVar("_T")

_LOG = logging.getLogger(__name__)


class Publisher:
    """Publishes versions of the run `run_id` into `store`. One per trainer process.

    Numbers are its own: one more than the newest version in the store, from 0. In a store that
    holds versions it starts by rebuilding the newest; `reanchor=True` lets it go on with a full
    copy where that is damaged beyond repair. Memory: one copy of the served bits (the
    baseline), and a second one once `publish_async` was used, both where the tensors lie: those on
    a CUDA device are copied there, and only changes and digests come to the host.

    `squash=4` also publishes, with every 4th version, the change from 4 before, with every 16th
    that from 16 before and so on: a replica that comes back late then reads O(log n) objects, for
    up to one more delta's worth of upload a version and level.

    With `comms` every rank has a publisher and calls `publish` in step, with the shards it holds
    (DTensors, sharded by rows) and with plain tensors: nothing is gathered, one manifest commits
    all, and an error on one rank is an error on all. See docs/decisions/sharded.md.

    With `signer` manifests are signed, and a signed timestamp says for `timestamp_seconds` what is
    newest (None: none is written); only what `trusted_key` signed is continued (None: the
    signer's own key). Every rank needs both. See docs/trust.md.

    With `formats` (`bf16`, `fp8_block`, `int4_g32-scale1.5`: see docs/formats.md) what is given are
    master weights, and every version is served in each of these formats, the first of which is the
    one that readers take who ask for none. One manifest names them all. Memory: a baseline each.

    `threads` compare, code and hash tensors in host memory; None takes half of the cores that the
    process may run on, four at most. The bytes don't depend on it.

    `fork_of` begins a run as another run's version: the first version must have its root, and
    names it as its origin.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        *,
        anchor_every: int = 20,
        squash: int | None = None,
        served_format: str = "bf16",
        formats: Sequence[str] = (),
        writer: str | None = None,
        reanchor: bool = False,
        repeats: bool = True,
        part_bytes: int = PART_BYTES,
        workers: int = 4,
        threads: int | None = None,
        comms: Comms | None = None,
        signer: Signer | None = None,
        trusted_key: TrustedKey | None = None,
        timestamp_seconds: float | None = VALID_SECONDS,
        fork_of: VersionRef | None = None,
    ) -> None:
        check_anchor_every(anchor_every)
        check_squash(squash)
        if squash is not None and comms is not None:
            raise ConfigError("Squashed deltas need one process; publish from ranks without them.")
        recipes = parse_recipes(formats, served_format=served_format)
        writer = f"publisher-{secrets.token_hex(6)}" if writer is None else writer
        for what, name in (("run", run_id), ("format", served_format), ("writer", writer)):
            _check_name(what, name)
        if trusted_key is None and signer is not None:
            trusted_key = signer.public
        if fork_of is not None and fork_of.run_id == run_id:
            raise ConfigError(f"{run_id!r} can't be a fork of itself; give the new run another id.")
        self._archive = Archive(
            store, run_id, workers=workers, trusted=trusted_key, threads=threads
        )
        self._how = Drafting(
            archive=self._archive,
            writer=writer,
            served_format=served_format,
            anchor_every=anchor_every,
            squash=squash,
            part_bytes=part_bytes,
            repeats=repeats,
            threads=self._archive.threads,
            fork_of=fork_of,
            signer=signer,
        )
        leads = comms is None or comms.rank == 0
        self._timestamps = (
            Timestamps(store, signer, valid_seconds=timestamp_seconds)
            if signer is not None and timestamp_seconds is not None and leads
            else None
        )
        self._reanchor = reanchor
        self._turn = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="farcast-publish")
        self._closed = False
        self._snapshots = Snapshots()
        self._lines = make_lines(self._how, recipes)
        self._doubtful: list[Manifest] = []
        self._fenced: str | None = None
        self._last: PublishReport | None = None
        self._totals = PublishTotals()
        self._check_run()
        self._sharded = (
            None if comms is None else ShardedVersions(self._lines, comms, reanchor=reanchor)
        )
        self._held: Newest | None = self._loaded() if comms is None else None
        self._announce()

    @property
    def newest(self) -> VersionRef | None:
        """The version that the next delta starts from; None before the first."""
        newest = self._newest
        return None if newest is None else newest.ref

    @property
    def newest_step(self) -> int | None:
        """Optimizer steps that `newest` has taken."""
        newest = self._newest
        return None if newest is None else newest.step

    @property
    def formats(self) -> tuple[str, ...]:
        """The served formats that are derived here from masters; none where served tensors are
        handed over."""
        return tuple(line.recipe.name for line in self._lines if line.recipe is not None)

    @property
    def is_sharded(self) -> bool:
        """Whether every rank publishes its own shards, through `comms`."""
        return self._sharded is not None

    @property
    def _newest(self) -> Manifest | None:
        if self._sharded is not None:
            return self._sharded.newest
        return None if self._held is None else self._held.manifest

    @property
    def last(self) -> PublishReport | None:
        """The report of the last version published here."""
        return self._last

    @property
    def totals(self) -> PublishTotals:
        """Sums over the versions published here."""
        return self._totals

    def publish(self, tensors: Tensors, step: int, *, allow_poison: bool = False) -> VersionRef:
        """Publish the served tensors after `step` optimizer steps; durable on return.

        torch or numpy tensors of any dtype by name, on any device; (name, tensor) pairs too. With
        `formats` these are masters, and what is given as bits is served as it is.
        Raises `PoisonError` where a tensor lost every finite value since the last version.
        """
        started = time.perf_counter()
        with self._turn:
            if self._sharded is not None:
                report = self._publish_shards(
                    self._sharded, lambda: self._holding(tensors, step), step, allow_poison
                )
                return self._record(report, waited=time.perf_counter() - started).ref
            self._check_call(step)
            if self._derives or not isinstance(tensors, Mapping) or _any_away(tensors):
                targets, owned = self._taken(tensors), True
            else:
                targets, owned = [views(tensors)], False
            report = self._publish(targets, step, owned=owned, allow_poison=allow_poison)
            return self._record(report, waited=time.perf_counter() - started).ref

    def publish_async(
        self, tensors: Tensors, step: int, *, allow_poison: bool = False
    ) -> PublishJob:
        """Like `publish`, but returns as soon as the tensors are copied, or derived.

        One version is on its way at a time: a second call waits for the first to end, well or
        not, and the wait is counted in `waited_seconds`.
        """
        started = time.perf_counter()
        self._turn.acquire()
        try:
            if self._sharded is not None:
                return self._start_shards(self._sharded, tensors, step, allow_poison)
            self._check_call(step)
            targets = self._taken(tensors)
            waited = time.perf_counter() - started

            def publish() -> PublishReport:
                return self._publish(targets, step, owned=True, allow_poison=allow_poison)

            future = self._pool.submit(self._run, publish, step, waited)
        except BaseException:
            self._turn.release()
            raise
        return PublishJob(future)

    def rollback(self, version: int) -> VersionRef:
        """Publish the content of an earlier version, and its step, as a new version.

        Nothing is rewritten: replicas go on to the new version as to any other.
        """
        if self._sharded is not None:
            raise ConfigError("Roll back from one process: close the ranks' publishers first.")
        started = time.perf_counter()
        with self._turn:
            step = self._archive.manifest(version).step
            self._check_call(step)
            targets: list[Bits] = [{**line.reader.rebuild(version)} for line in self._lines]
            report = self._publish(targets, step, owned=True, allow_poison=True)
            return self._record(report, waited=time.perf_counter() - started).ref

    def collect_garbage(
        self, *, keep: int, pinned: Collection[int] = (), grace: float = GRACE
    ) -> Garbage:
        """Remove versions that neither the newest `keep` nor the `pinned` ones need, between two
        versions: what replicas hold belongs into `pinned`. Returns what was removed. Of several
        ranks one calls it, while none publishes."""
        with self._turn:
            self._check_fence()
            newest = self._archive.newest()
            if newest is not None and newest != self._newest:
                raise VersionConflictError(
                    f"Version {newest.version} is not the one this publisher published last; "
                    "leave the store to the trainer that did."
                )
            return collect_garbage(self._archive, keep=keep, pinned=pinned, grace=grace)

    def close(self) -> None:
        """Wait for the version on its way, and publish no more. Its error stays with its job."""
        with self._turn:
            self._closed = True
        self._pool.shutdown()
        if self._timestamps is not None:
            self._timestamps.close()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- one version -------------------------------------------------------------------------

    def _run(self, publish: Callable[[], PublishReport], step: int, waited: float) -> PublishReport:
        """The rest of `publish_async`, in the background; ends the turn that it began."""
        try:
            return self._record(publish(), waited=waited)
        except Exception as error:
            told = str(error) if isinstance(error, FarcastError) else type(error).__name__
            _LOG.warning("Step %d was not published: %s", step, told)
            raise
        finally:
            self._turn.release()

    @property
    def _derives(self) -> bool:
        return self._lines[0].recipe is not None

    def _taken(self, tensors: Tensors) -> list[Bits]:
        """What is to be published in each format, in memory that nobody else knows."""
        if not self._derives:
            return [self._snapshots.take(tensors)]
        if self._held is None or self._doubtful:
            # Sticky formats go on from the newest version, which a lost reply may have moved.
            self._held = self._reloaded(self._held)
        return derived(self._lines, tensors, self._held.bases)

    def _publish(
        self, targets: Sequence[Bits], step: int, *, owned: bool, allow_poison: bool
    ) -> PublishReport:
        if not targets[0]:
            raise _nothing_to_publish()
        if self._held is None:
            self._held = self._reloaded(None)
        if not allow_poison:
            for base, target in zip(self._held.bases, targets, strict=True):
                check_poison({} if base.weights is None else base.weights.bits, target)
        while True:
            held = self._held
            drafts = draft_lines(self._lines, held.bases, targets, step)
            repeated = held.manifest if drafts[0].repeated else None
            manifest = repeated or joined_manifest(self._lines, drafts)
            if self._is_newest(repeated) if repeated else self._committed(manifest):
                break
            self._held = self._reloaded(held)
        if repeated is None:
            self._advance(held, drafts, manifest, targets, owned=owned)
        return _report(
            manifest,
            repeated=repeated is not None,
            encode_seconds=sum(draft.encode_seconds for draft in drafts),
            put_seconds=sum(draft.put_seconds for draft in drafts),
        )

    def _is_newest(self, manifest: Manifest) -> bool:
        """Whether nothing was published since, by a commit whose reply was lost or by others."""
        return self._archive.newest() == manifest

    def _committed(self, manifest: Manifest) -> bool:
        """Commit, or find that an earlier commit of this publisher holds the place, or damage."""
        # Every object that the manifest names is durable by now: put_objects has returned.
        self._doubtful.append(manifest)
        try:
            self._archive.commit_manifest(manifest)
        except VersionConflictError as error:
            if self._archive.committed(manifest.version) in self._doubtful:
                return False
            self._fence(str(error))
            raise
        except UNUSABLE as error:
            if not self._how.gives_up(manifest, error):
                raise
            return False
        self._doubtful.clear()
        self._how.given_up.clear()
        return True

    def _advance(
        self,
        held: Newest,
        drafts: Sequence[Draft],
        manifest: Manifest,
        targets: Sequence[Bits],
        *,
        owned: bool,
    ) -> None:
        """Move the baselines to `targets`, which the store holds by now."""
        # An interrupt before the last line leaves no baseline at all, and the next version
        # begins by rebuilding it from the store: half of one must never be compared with.
        self._held = None
        bases = []
        for line, base, draft, target in zip(self._lines, held.bases, drafts, targets, strict=True):
            before = {} if base.weights is None else base.weights.bits
            if owned and not self._derives:
                self._snapshots.give_back(before)
            known = {} if base.weights is None or owned else base.weights.entries
            after = target if owned else _kept(before, known, draft, target)
            for undo in draft.undo:
                line.history.add(undo, keep=self._how.squash or 0)
            view = draft.manifest
            bases.append(
                Base(
                    newest=view,
                    weights=Weights(ref=view.ref, bits=after, entries=draft.entries),
                )
            )
        self._held = Newest(manifest=manifest, bases=tuple(bases))

    # --- many ranks --------------------------------------------------------------------------

    def _holding(self, tensors: Tensors, step: int) -> Holding:
        """A copy of what this rank holds. Raises what a call with such arguments deserves."""
        self._check_call(step)
        where: dict[str, Where] = {}
        given: set[str] = set()
        bits = self._snapshots.take(localised(tensors, where, given))
        if not bits:
            raise _nothing_to_publish()
        names = canonical_names(where)
        return Holding(bits, layout_of(bits, where), frozenset(names[name] for name in given))

    def _start_shards(
        self, sharded: ShardedVersions, tensors: Tensors, step: int, allow_poison: bool
    ) -> PublishJob:
        """`publish_async` with the turn already taken. What is wrong with the arguments is raised
        by the job: the other ranks have to learn of it, and that takes a round."""
        started = time.perf_counter()
        take = _outcome_of(lambda: self._holding(tensors, step))
        waited = time.perf_counter() - started

        def publish() -> PublishReport:
            return self._publish_shards(sharded, take, step, allow_poison)

        return PublishJob(self._pool.submit(self._run, publish, step, waited))

    def _publish_shards(
        self,
        sharded: ShardedVersions,
        take: Callable[[], Holding],
        step: int,
        allow_poison: bool,
    ) -> PublishReport:
        try:
            landed, spare = sharded.publish(take, step, allow_poison=allow_poison)
        except VersionConflictError:
            if self._timestamps is not None:
                self._timestamps.stop()
            raise
        if not self._derives:
            self._snapshots.give_back(spare)
        return _report(
            landed.manifest,
            repeated=landed.repeated,
            encode_seconds=landed.encode_seconds,
            put_seconds=landed.put_seconds,
        )

    # --- start -------------------------------------------------------------------------------

    def _check_run(self) -> None:
        try:
            self._archive.open_run()
        except ObjectNotFoundError:
            return  # a run needs no record to have versions

    def _loaded(self, before: Newest | None = None) -> Newest:
        """The newest version in the store, with its bits in every format."""
        bases = None if before is None else before.bases
        return load_newest(self._lines, bases, reanchor=self._reanchor)

    def _reloaded(self, before: Newest | None) -> Newest:
        """The newest version again, which must still be this publisher's own."""
        self._held = None
        for line in self._lines:
            line.history.clear()
        held = self._loaded(before)
        newest = held.manifest
        if newest is not None and newest.writer != self._how.writer:
            self._fence(
                f"version {newest.version} was published by {newest.writer!r}; "
                "let one trainer publish to a run."
            )
            self._check_fence()
        return held

    # --- small parts -------------------------------------------------------------------------

    def _check_call(self, step: int) -> None:
        self._check_fence()
        if self._closed:
            raise ConfigError("This publisher was closed; make a new one.")
        if step < 0:
            raise ConfigError(f"step is {step}; it counts optimizer steps from 0.")

    def _fence(self, why: str) -> None:
        """Somebody else publishes to the run: never publish or vouch for a version again."""
        self._fenced = why
        if self._timestamps is not None:
            self._timestamps.stop()

    def _announce(self) -> None:
        newest = self._newest
        if self._timestamps is not None and newest is not None:
            self._timestamps.announce(newest.ref)

    def _check_fence(self) -> None:
        if self._fenced is not None:
            raise VersionConflictError(f"This publisher was superseded: {self._fenced}")

    def _record(self, report: PublishReport, *, waited: float) -> PublishReport:
        self._last = replace(report, waited_seconds=waited)
        self._totals = self._totals.plus(self._last)
        self._announce()
        return self._last


def _report(
    manifest: Manifest, *, repeated: bool, encode_seconds: float, put_seconds: float
) -> PublishReport:
    objects = sum(ref.size for ref in manifest.objects)
    views = manifest.views
    return PublishReport(
        ref=manifest.ref,
        step=manifest.step,
        written=not repeated,
        anchor=manifest.anchor is not None,
        changed=0 if repeated else sum(view.changed for view in views),
        elements=sum(view.elements for view in views),
        bytes_sent=0 if repeated else objects + len(encode_manifest(manifest)),
        bytes_full=sum(view.bytes_full for view in views),
        encode_seconds=encode_seconds,
        put_seconds=put_seconds,
        waited_seconds=0.0,
    )


def _kept(
    before: Mapping[str, AnyBits],
    known: Mapping[str, TensorEntry],
    draft: Draft,
    target: Bits,
) -> Bits:
    """A copy of `target` in the memory of `before`; what did not change is shared, unless it
    lies elsewhere: on the host after a restart, while the trainer's tensors are on a device."""
    return {
        name: before[name]
        if known.get(name) == draft.entries[name] and bits.lies_with(before[name])
        else bits.copied(before.get(name))
        for name, bits in target.items()
    }


def _any_away(tensors: Mapping[str, Any]) -> bool:
    return any(map(comes_over, tensors.values()))


def _outcome_of(work: Callable[[], _T]) -> Callable[[], _T]:
    """Do `work` now; what it returned or raised, whenever it is asked for."""
    future: Future[_T] = Future()
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001 - raised by whoever asks
        future.set_exception(error)
    return future.result


def _nothing_to_publish() -> ConfigError:
    return ConfigError(
        "There is no tensor to publish; a generator that was used up looks like this."
    )


def _check_name(what: str, name: str) -> None:
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(
            f"{name[:60]!r} is no name for a {what}; use letters, digits and . _ -, "
            "beginning with a letter or digit, at most 128."
        )
