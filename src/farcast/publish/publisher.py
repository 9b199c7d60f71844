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
 6. What is given is never written into, and may be overwritten as soon as a call returns.

Refuses to gather shards, to derive served tensors from master weights, and to retry.
"""

import logging
import secrets
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from msgspec.structs import replace

from farcast.errors import (
    ConfigError,
    FarcastError,
    FormatError,
    IntegrityError,
    ObjectNotFoundError,
    UnknownVersionError,
    VersionConflictError,
)
from farcast.lineage import Manifest, check_anchor_every, check_squash
from farcast.publish.drafting import Base, Draft, Drafting, draft_version
from farcast.publish.history import History
from farcast.publish.job import PublishJob
from farcast.publish.parts import PART_BYTES
from farcast.publish.poison import check_poison
from farcast.publish.reports import PublishReport, PublishTotals
from farcast.publish.snapshot import Bits, Snapshots, copied, on_device, views
from farcast.store.archive import Archive
from farcast.store.base import Store
from farcast.store.collecting import GRACE, Garbage, collect_garbage
from farcast.store.rebuilding import Weights
from farcast.types import NAME_PATTERN, VersionRef

Tensors = Mapping[str, Any] | Iterable[tuple[str, Any]]

_LOG = logging.getLogger(__name__)


class Publisher:
    """Publishes versions of the run `run_id` into `store`. One per trainer process.

    Numbers are its own: one more than the newest version in the store, from 0. In a store that
    holds versions it starts by rebuilding the newest; `reanchor=True` lets it go on with a full
    copy where that is damaged beyond repair. Memory: one copy of the served bits (the
    baseline), and a second one once `publish_async` was used.

    `squash=4` also publishes, with every 4th version, the change from 4 before, with every 16th
    that from 16 before and so on: a replica that comes back late then reads O(log n) objects, for
    up to one more delta's worth of upload a version and level.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        *,
        anchor_every: int = 20,
        squash: int | None = None,
        served_format: str = "bf16",
        writer: str | None = None,
        reanchor: bool = False,
        repeats: bool = True,
        part_bytes: int = PART_BYTES,
        workers: int = 4,
    ) -> None:
        check_anchor_every(anchor_every)
        check_squash(squash)
        writer = f"publisher-{secrets.token_hex(6)}" if writer is None else writer
        for what, name in (("run", run_id), ("format", served_format), ("writer", writer)):
            _check_name(what, name)
        self._archive = Archive(store, run_id, workers=workers)
        self._how = Drafting(
            archive=self._archive,
            writer=writer,
            served_format=served_format,
            anchor_every=anchor_every,
            squash=squash,
            part_bytes=part_bytes,
            repeats=repeats,
        )
        self._reanchor = reanchor
        self._turn = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="farcast-publish")
        self._closed = False
        self._snapshots = Snapshots()
        self._history = History()
        self._doubtful: list[Manifest] = []
        self._fenced: str | None = None
        self._last: PublishReport | None = None
        self._totals = PublishTotals()
        self._check_run()
        self._base: Base | None = self._loaded()

    @property
    def newest(self) -> VersionRef | None:
        """The version that the next delta starts from; None before the first."""
        base = self._base
        return None if base is None or base.newest is None else base.newest.ref

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

        torch or numpy tensors of any dtype by name, on any device; (name, tensor) pairs too.
        Raises `PoisonError` where a tensor lost every finite value since the last version.
        """
        started = time.perf_counter()
        with self._turn:
            self._check_call(step)
            if isinstance(tensors, Mapping) and not any(map(on_device, tensors.values())):
                target, owned = views(tensors), False
            else:
                target, owned = self._snapshots.take(tensors), True
            report = self._publish(target, step, owned=owned, allow_poison=allow_poison)
            return self._record(report, waited=time.perf_counter() - started).ref

    def publish_async(
        self, tensors: Tensors, step: int, *, allow_poison: bool = False
    ) -> PublishJob:
        """Like `publish`, but returns as soon as the tensors are copied.

        One version is on its way at a time: a second call waits for the first to end, well or
        not, and the wait is counted in `waited_seconds`.
        """
        started = time.perf_counter()
        self._turn.acquire()
        try:
            self._check_call(step)
            target = self._snapshots.take(tensors)
            waited = time.perf_counter() - started
            future = self._pool.submit(self._finish, target, step, waited, allow_poison)
        except BaseException:
            self._turn.release()
            raise
        return PublishJob(future)

    def rollback(self, version: int) -> VersionRef:
        """Publish the content of an earlier version, and its step, as a new version.

        Nothing is rewritten: replicas go on to the new version as to any other.
        """
        step = self._archive.manifest(version).step
        return self.publish(self._archive.rebuild(version), step, allow_poison=True)

    def collect_garbage(
        self, *, keep: int, pinned: Collection[int] = (), grace: float = GRACE
    ) -> Garbage:
        """Remove versions that neither the newest `keep` nor the `pinned` ones need, between two
        versions: what replicas hold belongs into `pinned`. Returns what was removed."""
        with self._turn:
            self._check_fence()
            newest = self._archive.newest()
            if newest is not None and (self._base is None or newest != self._base.newest):
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

    def _finish(self, target: Bits, step: int, waited: float, allow_poison: bool) -> PublishReport:
        """The rest of `publish_async`, in the background; ends the turn that it began."""
        try:
            report = self._publish(target, step, owned=True, allow_poison=allow_poison)
            return self._record(report, waited=waited)
        except Exception as error:
            told = str(error) if isinstance(error, FarcastError) else type(error).__name__
            _LOG.warning("Step %d was not published: %s", step, told)
            raise
        finally:
            self._turn.release()

    def _publish(
        self, target: Bits, step: int, *, owned: bool, allow_poison: bool
    ) -> PublishReport:
        if not target:
            raise ConfigError(
                "There is no tensor to publish; a generator that was used up looks like this."
            )
        if self._base is None:
            self._base = self._reloaded(None)
        if not allow_poison and self._base.weights is not None:
            check_poison(self._base.weights.bits, target)
        while True:
            base = self._base
            draft = draft_version(self._how, base, self._history, target, step)
            if draft.repeated or self._committed(draft.manifest):
                break
            self._base = self._reloaded(base.weights)
        if not draft.repeated:
            self._advance(base, draft, target, owned=owned)
        return _report(draft)

    def _committed(self, manifest: Manifest) -> bool:
        """Commit, or find that an earlier commit of this publisher holds the place."""
        # Every object that the manifest names is durable by now: put_objects has returned.
        self._doubtful.append(manifest)
        try:
            self._archive.commit_manifest(manifest)
        except VersionConflictError as error:
            if self._archive.manifest(manifest.version) in self._doubtful:
                return False
            self._fenced = str(error)
            raise
        self._doubtful.clear()
        return True

    def _advance(self, base: Base, draft: Draft, target: Bits, *, owned: bool) -> None:
        """Move the baseline to `target`, which the store holds by now."""
        # An interrupt before the last line leaves no baseline at all, and the next version
        # begins by rebuilding it from the store: half of one must never be compared with.
        self._base = None
        before = {} if base.weights is None else base.weights.bits
        if owned:
            self._snapshots.give_back(before)
            after = target
        else:
            known = {} if base.weights is None else base.weights.entries
            after = {
                name: before[name]
                if known.get(name) == draft.entries[name]
                else copied(bits, before.get(name))
                for name, bits in target.items()
            }
        for undo in draft.undo:
            self._history.add(undo, keep=self._how.squash or 0)
        weights = Weights(ref=draft.manifest.ref, bits=after, entries=draft.entries)
        self._base = Base(newest=draft.manifest, weights=weights)

    # --- start -------------------------------------------------------------------------------

    def _check_run(self) -> None:
        try:
            self._archive.open_run()
        except ObjectNotFoundError:
            return  # a run needs no record to have versions

    def _loaded(self, have: Weights | None = None) -> Base:
        """The newest version in the store, with its bits."""
        newest = self._archive.newest()
        if newest is None:
            return Base(newest=None, weights=None)
        try:
            return Base(newest=newest, weights=self._archive.restore(newest.version, have))
        except (IntegrityError, FormatError, ObjectNotFoundError, UnknownVersionError) as error:
            if self._reanchor:
                _LOG.warning("%s can't be rebuilt; the next is published in full.", newest.ref)
                return Base(newest=newest, weights=None)
            error.add_note(
                f"The newest version {newest.ref} can't be rebuilt; "
                "reanchor=True goes on with a full copy."
            )
            raise

    def _reloaded(self, have: Weights | None) -> Base:
        """The newest version again, which must still be this publisher's own."""
        self._base = None
        self._history.clear()
        base = self._loaded(have)
        if base.newest is not None and base.newest.writer != self._how.writer:
            self._fenced = (
                f"version {base.version} was published by {base.newest.writer!r}; "
                "let one trainer publish to a run."
            )
            self._check_fence()
        return base

    # --- small parts -------------------------------------------------------------------------

    def _check_call(self, step: int) -> None:
        self._check_fence()
        if self._closed:
            raise ConfigError("This publisher was closed; make a new one.")
        if step < 0:
            raise ConfigError(f"step is {step}; it counts optimizer steps from 0.")

    def _check_fence(self) -> None:
        if self._fenced is not None:
            raise VersionConflictError(f"This publisher was superseded: {self._fenced}")

    def _record(self, report: PublishReport, *, waited: float) -> PublishReport:
        self._last = replace(report, waited_seconds=waited)
        self._totals = self._totals.plus(self._last)
        return self._last


def _report(draft: Draft) -> PublishReport:
    manifest = draft.manifest
    return PublishReport(
        ref=manifest.ref,
        step=manifest.step,
        written=not draft.repeated,
        anchor=manifest.anchor is not None,
        changed=0 if draft.repeated else manifest.changed,
        elements=manifest.elements,
        bytes_sent=draft.bytes_sent,
        bytes_full=manifest.bytes_full,
        encode_seconds=draft.encode_seconds,
        put_seconds=draft.put_seconds,
        waited_seconds=0.0,
    )


def _check_name(what: str, name: str) -> None:
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(
            f"{name[:60]!r} is no name for a {what}; use letters, digits and . _ -, "
            "beginning with a letter or digit, at most 128."
        )
