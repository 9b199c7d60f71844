"""Rebuilds everything a store holds and compares it with what everybody recorded.

Every version is rebuilt twice where that is possible: through the chain of deltas, and from its
own anchor. One rebuilt copy is kept and patched in place, and only tensors that a patch touched
are hashed again; after the last version all of them are, from the bits. So a version of a large
model costs what its delta holds, and the memory is one copy and one object.

Refuses to stop at the first fault: a version that cannot be rebuilt is listed, and the walk goes
on from the next anchor. Only a store that cannot be read at all raises.

Garbage collection removes the oldest versions up to an anchor. So what is older than the first
version there is, was collected, if that one stands by itself; it is counted, and what was recorded
of it is compared with nothing. A hole between two versions is a loss.
"""

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from farcast.delta import Patch, TensorBits, root_of, tensor_digest
from farcast.errors import FarcastError, IntegrityError, StoreAccessError, StoreUnavailableError
from farcast.fleet.accounting import (
    Account,
    Published,
    SpanClaim,
    account,
    compare_roots,
    effective_steps,
    unrecorded_versions,
)
from farcast.fleet.finding import open_archive, versions_in
from farcast.fleet.registry import Registry
from farcast.fleet.saying import plain
from farcast.lineage import Manifest, ObjectRef, TrustedKey
from farcast.store import Store
from farcast.store.archive import Archive
from farcast.trajectory.encoding import MAX_BATCH_BYTES, decode_batch
from farcast.trajectory.keys import TRAJECTORIES_PREFIX, batch_key
from farcast.trajectory.wire import Trajectory
from farcast.types import TensorEntry

Progress = Callable[[str, int, int], None]
"""What is being done, how many are done, of how many."""


_T = TypeVar("_T")


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `farcast verify` found. `differences` is empty when everything agrees."""

    run_id: str
    versions_published: int
    versions_verified: int
    anchors_verified: int
    anchor_versions: tuple[int, ...]
    steps_recorded: int
    steps_void: int
    """Recorded, then lost with a crash of the trainer before its next checkpoint."""
    receipts_verified: int
    spans_verified: int
    versions_collected: int
    """Removed by garbage collection: all that are older than the oldest there is."""
    claims_collected: int
    """Receipts and spans that name these: nothing is left to compare them with."""
    roots_match: bool
    account: Account
    differences: tuple[str, ...]


def _damaged_files(archive: Archive) -> list[str]:
    """The run's small files that a replica could not fetch."""
    damaged = []
    for name, ref in archive.open_run().assets.items():
        try:
            archive.get_object(ref)
        except (StoreUnavailableError, StoreAccessError):
            raise
        except FarcastError as error:
            damaged.append(f"the run's {name}: {error}")
    return damaged


def audit(
    store: Store,
    *,
    trusted: TrustedKey | None = None,
    progress: Progress = lambda *_: None,
) -> AuditReport:
    """Check the run in `store`. Reads all of it, writes nothing. With `trusted`, what that key
    did not sign is a difference."""
    archive = open_archive(store, trusted)
    registry = Registry(store)
    walk = _Walk(archive)
    versions = list(versions_in(store))
    walk.differences += _gaps(versions)
    for done, version in enumerate(versions):
        progress(f"rebuilding version {version}", done, len(versions))
        walk.visit(version)
    walk.finish()
    reading = _Reading(store, archive.run_id)
    for done, worker in enumerate(workers := sorted(reading.workers())):
        progress(f"reading trajectories of {worker}", done, len(workers))
        reading.read(worker)
    progress("comparing", 1, 1)
    damaged: list[str] = []

    def note(key: str, error: FarcastError) -> None:
        damaged.append(f"{key}: {error}")

    steps = effective_steps(registry.steps(damaged=note))
    receipts = list(registry.receipts(damaged=note))
    oldest = versions[0] if versions else 0
    compared = sum(receipt.version >= oldest for receipt in receipts)
    spans = sum(count for version, count in reading.spans.items() if version >= oldest)
    counted = account(reading.ids, steps)
    roots = [
        *walk.differences,
        *_damaged_files(archive),
        *compare_roots(walk.published, steps, receipts, reading.claims),
        *unrecorded_versions(walk.published, steps),
    ]
    verified = sum(p.root in (p.by_delta, p.by_anchor) for p in walk.published)
    return AuditReport(
        run_id=archive.run_id,
        versions_published=len(versions),
        versions_verified=verified,
        anchors_verified=sum(p.root == p.by_anchor for p in walk.published),
        anchor_versions=tuple(walk.anchors),
        steps_recorded=len(steps.kept) + len(steps.void),
        steps_void=len(steps.void),
        receipts_verified=compared,
        spans_verified=spans,
        versions_collected=oldest,
        claims_collected=len(receipts) - compared + reading.spans.total() - spans,
        roots_match=not roots and verified == len(versions),
        account=counted,
        differences=tuple(
            plain(line)
            for line in (
                *roots,
                *damaged,
                *steps.differences,
                *reading.differences,
                *counted.differences,
            )
        ),
    )


def _gaps(versions: list[int]) -> list[str]:
    if not versions:
        return ["the run has no version"]
    missing = sorted(set(range(versions[0], versions[-1])) - set(versions))
    return [f"version {version}: it is gone, although later ones exist" for version in missing]


class _Walk:
    """Goes through all versions in order with one rebuilt copy."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._copy: _Copy | None = None
        self.published: list[Published] = []
        self.anchors: list[int] = []
        self.differences: list[str] = []

    def visit(self, version: int) -> None:
        """Rebuild one version each way it can be."""
        manifest = self._guarded(version, "manifest", lambda: self._archive.manifest(version))
        if manifest is None:
            self._copy = None
            return
        by_delta = self._guarded(version, "deltas", lambda: self._follow(manifest)) or ""
        by_anchor = self._guarded(version, "anchor", lambda: self._start_again(manifest)) or ""
        if not by_delta and not by_anchor:
            self.differences.append(f"version {version}: {self._why_not(version)}")
        if manifest.anchor is not None:
            self.anchors.append(version)
        self.published.append(
            Published(
                version=version,
                step=manifest.step,
                root=manifest.root,
                by_delta=by_delta,
                by_anchor=by_anchor,
                others=tuple(view.root for view in manifest.views[1:]),
            )
        )

    def _why_not(self, version: int) -> str:
        if version == 0 or self.anchors:
            return "it cannot be rebuilt"
        return (
            "it cannot be rebuilt, no anchor leads to it; if a collection was cut short, "
            "`farcast gc` removes it too, otherwise older versions were lost"
        )

    def finish(self) -> None:
        """Hash every tensor of the newest version from its bits."""
        if self._copy is not None and self.published:
            newest = self.published[-1]
            if self._copy.root_of_bits() != newest.root:
                self.differences.append(
                    f"version {newest.version}: the rebuilt bits differ from their digests"
                )

    def _follow(self, manifest: Manifest) -> str | None:
        """The root after the delta from the version before, which the copy holds.

        The copy is given up first and kept only on success: half patched it is of no version.
        """
        copy, self._copy = self._copy, None
        if copy is None:
            return None
        before = self.published[-1]
        for delta in manifest.deltas:
            if delta.base == before.version:
                if delta.base_root != before.root:
                    raise IntegrityError(f"its delta is from another version {before.version}")
                copy.patch(self._archive, delta.objects)
                self._copy = copy
                return copy.root()
        return None

    def _start_again(self, manifest: Manifest) -> str | None:
        """The root of the anchor alone. Its bits replace the copy where the chain is broken."""
        if manifest.anchor is None:
            return None
        copy = _Copy()
        copy.patch(self._archive, manifest.anchor)
        if self._copy is None:
            self._copy = copy
        return copy.root()

    def _guarded(self, version: int, way: str, work: Callable[[], _T]) -> _T | None:
        try:
            return work()
        except (StoreUnavailableError, StoreAccessError):
            raise
        except FarcastError as error:
            self.differences.append(f"version {version}: {way}: {error}")
            return None


class _Copy:
    """The served tensors of one version, patched in place."""

    def __init__(self) -> None:
        self._bits: dict[str, NDArray[np.uint8]] = {}
        self._entries: dict[str, TensorEntry] = {}

    def patch(self, archive: Archive, objects: tuple[ObjectRef, ...]) -> None:
        for ref in objects:
            patch = Patch.open(archive.get_object(ref))
            for name, entry in patch.entries.items():
                if entry.kind == "full":
                    self._bits[name] = np.array(patch.full(name).data)
                elif name in self._bits:
                    patch.apply_into(name, self._bits[name])
                else:
                    raise IntegrityError(f"the delta changes {name[:200]!r}, which is not there")
                self._entries[name] = TensorEntry(entry.dtype, entry.shape, entry.digest)
            for name in patch.removed:
                self._bits.pop(name, None)
                self._entries.pop(name, None)

    def root(self) -> str:
        return root_of(self._entries)

    def root_of_bits(self) -> str:
        return root_of(
            {
                name: TensorEntry(
                    entry.dtype,
                    entry.shape,
                    tensor_digest(TensorBits(entry.dtype, entry.shape, self._bits[name])),
                )
                for name, entry in self._entries.items()
            }
        )


class _Reading:
    """Every trajectory in the store, reduced to what the accounting needs."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self.ids: list[str] = []
        self.claims: dict[SpanClaim, str] = {}
        self.spans = Counter[int]()
        """How many there are of each version."""
        self.differences: list[str] = []

    def workers(self) -> set[str]:
        found = set()
        for info in self._store.list(TRAJECTORIES_PREFIX):
            found.add(info.key.removeprefix(TRAJECTORIES_PREFIX).partition("/")[0])
        return found

    def read(self, worker: str) -> None:
        for info in self._store.list(f"{TRAJECTORIES_PREFIX}{worker}/"):
            try:
                batch = decode_batch(self._store.get(info.key, max_bytes=MAX_BATCH_BYTES))
            except (StoreUnavailableError, StoreAccessError):
                raise
            except FarcastError as error:
                self.differences.append(f"{info.key}: {error}")
                continue
            if batch.run_id != self._run_id or batch_key(worker, batch.sequence) != info.key:
                self.differences.append(f"{info.key}: it is a stray copy of another batch")
                continue
            for trajectory in batch.trajectories:
                self._note(trajectory)

    def _note(self, trajectory: Trajectory) -> None:
        self.ids.append(trajectory.id)
        self.spans.update(span.version for span in trajectory.spans)
        for span in trajectory.spans:
            self.claims.setdefault(SpanClaim(span.version, span.root), trajectory.id)
