"""A run inside a store: its record, its versions and their objects, checked both ways.

Shared by the publisher, the replicas and `farcast verify`. The rules it keeps:

 1. `run.json` and each manifest are created, never overwritten. A refused create is judged by
    what is there: own bytes mean success (the reply was lost), other bytes mean that somebody
    else was first, nothing at all means that the refusal was not final.
 2. An object's name is the digest of its bytes, so whoever wrote it, it is right or damaged.
    An object that is already there is read and compared, and replaced if damaged: otherwise a
    broken upload would stay broken for as long as its content is published.
 3. Bytes from the store are used only after size and digest were checked. No more is read than
    the reference says.
 4. A manifest is checked against its key, its run and the pinned key, then kept: it can't change
    any more.
 5. `newest` never goes back. The first answer needs one list; after that the next version is
    asked for by its key.
 6. A manifest that cannot be used is passed over as if it were gone, and named in `damaged`. Its
    number stays taken: who publishes goes one further.
 7. `restore` returns weights whose root was recomputed, or raises.

Refuses to decide what to do about an error, to delete anything, and to retry what the store
already retries.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import TypeAlias

from blake3 import blake3
from msgspec.structs import replace

from farcast.delta import Patch, TensorBits, all_bits
from farcast.errors import (
    ConfigError,
    FarcastError,
    IntegrityError,
    LimitError,
    ObjectExistsError,
    ObjectNotFoundError,
    RunMismatchError,
    StoreUnavailableError,
    UnknownVersionError,
    VersionConflictError,
)
from farcast.lineage import (
    MAX_MANIFEST_BYTES,
    MAX_OBJECT_BYTES,
    MAX_TIMESTAMP_BYTES,
    RUN_KEY,
    TIMESTAMP_KEY,
    UNUSABLE,
    VERSIONS_PREFIX,
    Costs,
    Manifest,
    ObjectRef,
    Plan,
    PlanStep,
    RunRecord,
    Timestamp,
    TrustedKey,
    decode_manifest,
    decode_run_record,
    decode_timestamp,
    encode_manifest,
    encode_run_record,
    object_key,
    parse_version_key,
    plan,
    version_key,
)
from farcast.store.base import Store
from farcast.store.paths import Lineage, Seen, lineage_between
from farcast.store.rebuilding import Chain, Rebuild, Weights, check_weights
from farcast.store.threads import threads_of
from farcast.store.transfers import in_parallel
from farcast.types import MAX_VERSION, VersionRef

Progress: TypeAlias = Callable[[int, int], None]
"""Called with bytes done and bytes in total, from the thread that asked."""

CREATE_TRIES = 4
"""How often a create is tried that is refused although nothing is there."""

PROBES = 8
"""Versions asked for one by one; a reader that is further behind lists instead."""

MANIFESTS_KEPT = 8192

LOOKED_BACK = 64
"""Versions tried, from the last one listed, until a manifest can be used."""


class Archive:
    """The run `run_id` in `store`. Safe to use from several threads.

    `workers` bounds the requests in flight, and so the objects in memory, of one call. With
    `trusted`, manifests and the run's record are used only if that key signed them, and through
    the digests that they name so is everything else.

    With `served_format`, manifests are shown as if the run were served in that format alone, and a
    version without it as if it were not there; nothing can be committed or removed then.

    A version is rebuilt on so many `threads`: see `farcast.store.threads`.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        *,
        workers: int = 4,
        trusted: TrustedKey | None = None,
        served_format: str | None = None,
        threads: int | None = None,
    ) -> None:
        self._store = store
        self._threads = threads_of(threads)
        self._run_id = run_id
        self._workers = workers
        self._trusted = trusted
        self._served_format = served_format
        self._lock = threading.Lock()
        self._manifests: dict[int, Manifest] = {}
        self._wholes: dict[int, VersionRef] = {}
        self._newest: Manifest | None = None
        self._damaged: dict[int, FarcastError] = {}

    @property
    def store(self) -> Store:
        return self._store

    @property
    def run_id(self) -> str:
        return self._run_id

    @property
    def trusted(self) -> TrustedKey | None:
        """The pinned key; None if signatures are not asked for."""
        return self._trusted

    @property
    def damaged(self) -> dict[int, FarcastError]:
        """Versions whose manifests could not be used when they were last read, and why."""
        with self._lock:
            return dict(self._damaged)

    @property
    def threads(self) -> int:
        """What a version is rebuilt on."""
        return self._threads

    @property
    def workers(self) -> int:
        """Requests of one call that may be in flight."""
        return self._workers

    @property
    def served_format(self) -> str | None:
        """The one format that is looked at; None for manifests as they are."""
        return self._served_format

    def __repr__(self) -> str:
        return f"Archive({self._store.url!r}, {self._run_id!r})"

    # --- the run -----------------------------------------------------------------------------

    def create_run(self, record: RunRecord) -> RunRecord:
        """Start the run, or find it started alike; returns the record the store holds.

        Raises `RunMismatchError` when the store holds another run, or this one with other
        assets or settings (`created` and the signature may differ).
        """
        if record.run_id != self._run_id:
            raise RunMismatchError(
                f"The record names run {record.run_id!r}, the archive {self._run_id!r}; "
                "use one name."
            )
        found = self._create(RUN_KEY, encode_run_record(record), max_bytes=MAX_MANIFEST_BYTES)
        held = self._trusted_record(found)
        if replace(held, created=record.created, signature=record.signature) != record:
            raise RunMismatchError(
                f"{self._store.url} holds the run {self._run_id!r} with other assets or settings; "
                "resume it as it was started, or use another store prefix or run id."
            )
        return held

    def open_run(self) -> RunRecord:
        """The run's record. Raises `ObjectNotFoundError` when no run was started here."""
        return self._trusted_record(self._store.get(RUN_KEY, max_bytes=MAX_MANIFEST_BYTES))

    def timestamp(self) -> Timestamp | None:
        """A signed word on what is newest; None where no publisher says one."""
        try:
            data = self._store.get(TIMESTAMP_KEY, max_bytes=MAX_TIMESTAMP_BYTES)
        except ObjectNotFoundError:
            return None
        timestamp = decode_timestamp(data, run_id=self._run_id)
        if self._trusted is not None:
            self._trusted.check(timestamp, TIMESTAMP_KEY)
        return timestamp

    # --- versions ----------------------------------------------------------------------------

    def newest(self, *, relist: bool = False) -> Manifest | None:
        """The newest version whose manifest can be used, None before the first.

        `relist` looks past a gap: for a reader that is `overtaken`, so late that the version after
        the one it knows was already removed.
        """
        with self._lock:
            known = self._newest
        if known is None or relist:
            known = self._listed(known)
        return self._probed(known)

    def overtaken(self) -> bool:
        """Whether the newest version that is known here was removed since, and so later ones were
        published: the oldest go first. One small request."""
        with self._lock:
            known = self._newest
        if known is None:
            return False
        try:
            self._store.get_range(version_key(known.version), 0, 1)
        except ObjectNotFoundError:
            return True
        except IntegrityError:  # damaged, but there
            return False
        return False

    def manifest(self, version: int) -> Manifest:
        """The checked manifest of `version`. Raises `UnknownVersionError` if there is none."""
        with self._lock:
            kept = self._manifests.get(version)
        return kept if kept is not None else self._read_manifest(version)

    def plan(self, have: VersionRef | None, want: VersionRef, costs: Costs | None = None) -> Plan:
        """The cheapest path, reading the manifests that it needs. Where damaged ones leave no
        path, their damage is raised."""
        try:
            return plan(have, want, lineage_between(self, have, want), costs)
        except UnknownVersionError:
            with contextlib.suppress(UnknownVersionError):  # an older anchor may do
                return plan(have, want, Lineage(self))
            damage = self.damage_between(have, want)
            if damage is not None:
                raise damage from None
            raise

    def whole_ref(self, manifest: Manifest) -> VersionRef:
        """What a manifest of this archive is called where no one format is looked at."""
        with self._lock:
            return self._wholes.get(manifest.version, manifest.ref)

    def unread(self, versions: Iterable[int]) -> list[int]:
        """Those whose manifests were not read yet."""
        with self._lock:
            return [version for version in versions if version not in self._manifests]

    def damage_between(self, have: VersionRef | None, want: VersionRef) -> FarcastError | None:
        """What keeps a path from leading through the newest damaged version before `want`."""
        first = -1 if have is None else have.version
        damaged = self.damaged
        return next(
            (damaged[v] for v in sorted(damaged, reverse=True) if first < v <= want.version), None
        )

    def manifests_for(self, have: VersionRef | None, want: VersionRef) -> dict[int, Manifest]:
        """The manifests that `plan(have, want, ...)` looks at, by version."""
        seen = Seen(lineage_between(self, have, want))
        plan(have, want, seen)
        return seen.manifests

    def before(self, version: int, count: int) -> dict[int, Manifest]:
        """Those of the `count` versions before `version` that can be read."""
        versions = range(max(0, version - count), version)
        read = in_parallel(Lineage(self).get, versions, workers=self._workers)
        return {found.version: found for found in read if found is not None}

    def commit_manifest(self, manifest: Manifest) -> None:
        """Make a version visible; every object it names must be durable before.

        Raises `VersionConflictError` when another manifest holds that version, or held it until it
        was removed as old: who slept that long is not the run's trainer any more. Any other error
        leaves it open whether the version is visible: commit the same manifest again to know.
        """
        self.require_whole()
        if manifest.run_id != self._run_id:
            raise RunMismatchError(
                f"The manifest is of run {manifest.run_id!r}, the archive of {self._run_id!r}; "
                "publish to that run's store."
            )
        data = encode_manifest(manifest)
        key = version_key(manifest.version)
        found = self._create_manifest(key, data, manifest.version)
        if found != data:
            held = self._usable(found, manifest.version)
            raise VersionConflictError(
                f"Version {manifest.version} of {self._run_id!r} was published by "
                f"{held.writer!r}, not by {manifest.writer!r}; let one trainer publish to a run."
            )
        if self._is_removed(manifest.version):
            self._store.delete(key)
            raise VersionConflictError(
                f"Version {manifest.version} of {self._run_id!r} was published by another trainer "
                "and removed as old since; let one trainer publish to a run."
            )
        self._keep(manifest)

    def committed(self, version: int) -> Manifest | None:
        """The checked manifest of `version`; None if there is none."""
        try:
            return self.manifest(version)
        except UnknownVersionError:
            return None

    def require_whole(self) -> None:
        """Raise `ConfigError` where only one served format is looked at."""
        if self._served_format is not None:
            raise ConfigError(
                f"This archive shows {self._served_format!r} alone; open the run without a format "
                "to commit or remove versions."
            )

    def next_version(self, newest: Manifest | None) -> int:
        """The first number that nothing is known to hold, given the newest version that can be
        used: a damaged manifest keeps its place."""
        version = 0 if newest is None else newest.version + 1
        with self._lock:
            while version in self._damaged:
                version += 1
        return version

    # --- objects -----------------------------------------------------------------------------

    def put_object(self, data: bytes) -> ObjectRef:
        """Store `data` under its digest; durable on return, whether or not it was there."""
        if len(data) > MAX_OBJECT_BYTES:
            raise LimitError(
                f"An object of {len(data)} bytes is over the limit of {MAX_OBJECT_BYTES}; "
                "split it into several."
            )
        ref = ObjectRef(digest=blake3(data).hexdigest(), size=len(data))
        key = object_key(ref)
        try:
            found = self._create(key, data, max_bytes=ref.size)
        except LimitError:  # what is there is longer
            found = b""
        if found != data:
            self._store.put(key, data)
        return ref

    def put_objects(self, parts: Iterable[bytes]) -> tuple[ObjectRef, ...]:
        """Store several objects; the next part is made while those before are on their way."""
        return tuple(in_parallel(self.put_object, parts, workers=self._workers))

    def get_object(self, ref: ObjectRef) -> bytes:
        """Exactly the bytes that `ref` names, or an error."""
        data = self._store.get(object_key(ref), max_bytes=ref.size)
        if len(data) != ref.size or blake3(data).hexdigest() != ref.digest:
            raise IntegrityError(
                f"{object_key(ref)} in {self._store.url} is damaged; "
                "fetch it again, or from another store."
            )
        return data

    def get_objects(self, refs: Iterable[ObjectRef]) -> Iterator[bytes]:
        """The objects in order, a bounded number of them read ahead."""
        return in_parallel(self.get_object, refs, workers=self._workers)

    # --- content -----------------------------------------------------------------------------

    def rebuild(
        self,
        version: int,
        have: tuple[VersionRef, Mapping[str, TensorBits]] | None = None,
        *,
        progress: Progress | None = None,
    ) -> dict[str, TensorBits]:
        """All tensors of `version`, verified to its root.

        `have` is a version and its tensors to start from; they are checked first and never
        written into, but tensors that did not change are returned as they are.
        """
        base = None if have is None else Weights.of(*have)
        return all_bits(self.restore(version, base, progress=progress).bits)

    def restore(
        self,
        version: int,
        have: Weights | None = None,
        *,
        only: Container[str] | None = None,
        progress: Progress | None = None,
    ) -> Weights:
        """Like `rebuild`, with the entries: for who goes on from version to version.

        `only` names the tensors whose bits are wanted, for who shares a version with others; the
        entries are of all, and so is the root that is checked. Not together with `have`.
        """
        manifest = self.manifest(version)
        route = self.plan(None if have is None else have.ref, manifest.ref)
        fetched = _Fetched(self, route, progress)
        first = route.steps[0] if route.steps else None
        from_anchor = first is not None and first.kind == "anchor"
        deltas = route.steps[1:] if from_anchor else route.steps
        rebuild = Rebuild(
            Chain([list(fetched.patches(step)) for step in deltas]), only, threads=self._threads
        )
        if from_anchor:
            for patch in fetched.patches(route.steps[0]):
                rebuild.add_anchor(patch)
        elif have is not None:
            rebuild.add_base(have)
        return check_weights(rebuild.finish(manifest.ref), manifest)

    # --- inside ------------------------------------------------------------------------------

    def _create(self, key: str, data: bytes, *, max_bytes: int) -> bytes:
        """Create `key` with `data`; returns what is there, which is `data` if this call won."""
        for _ in range(CREATE_TRIES):
            try:
                self._store.put(key, data, if_absent=True)
            except ObjectExistsError:
                try:
                    return self._store.get(key, max_bytes=max_bytes)
                except ObjectNotFoundError:
                    continue  # refused, yet nothing is there: not final
            return data
        raise StoreUnavailableError(
            f"{self._store.url} refuses to create {key!r} as if it existed, but holds nothing "
            "there; try again later."
        )

    def _read_manifest(self, version: int) -> Manifest:
        if not 0 <= version <= MAX_VERSION:
            raise UnknownVersionError(f"There is no version {version}; versions begin at 0.")
        try:
            data = self._store.get(version_key(version), max_bytes=MAX_MANIFEST_BYTES)
        except LimitError as error:
            self._note_damage(version, error)
            raise
        except ObjectNotFoundError:
            self._forget_damage(version)
            raise UnknownVersionError(
                f"{self._store.url} has no version {version} of {self._run_id!r}; "
                "ask for one that `farcast inspect` shows."
            ) from None
        return self._usable(data, version)

    def _usable(self, data: bytes, version: int) -> Manifest:
        """The manifest in `data`, checked and kept; what is wrong with it is noted and raised."""
        try:
            manifest = decode_manifest(data, run_id=self._run_id, version=version)
            if self._trusted is not None:
                self._trusted.check(manifest, version_key(version))
        except UNUSABLE as error:
            self._note_damage(version, error)
            raise
        if self._served_format is not None:
            whole, manifest = manifest.ref, manifest.view(self._served_format)
            with self._lock:
                self._wholes[version] = whole
        self._keep(manifest)
        return manifest

    def _create_manifest(self, key: str, data: bytes, version: int) -> bytes:
        try:
            return self._create(key, data, max_bytes=MAX_MANIFEST_BYTES)
        except LimitError as error:  # what is there is longer than any manifest
            self._note_damage(version, error)
            raise

    def _is_removed(self, version: int) -> bool:
        """Whether a place that was free is one that collected versions left. They go oldest first,
        so the one before it is gone then; asked after the create, so that nothing comes between."""
        if version == 0:
            later = self._store.list(VERSIONS_PREFIX, start_after=version_key(0))
            return next(iter(later), None) is not None
        try:
            self._store.get(version_key(version - 1), max_bytes=MAX_MANIFEST_BYTES)
        except ObjectNotFoundError:
            return True
        except LimitError:  # damaged, but there
            return False
        return False

    def _trusted_record(self, data: bytes) -> RunRecord:
        record = decode_run_record(data, run_id=self._run_id)
        if self._trusted is not None:
            self._trusted.check(record, RUN_KEY)
        return record

    def _note_damage(self, version: int, error: FarcastError) -> None:
        with self._lock:
            self._damaged[version] = error

    def _forget_damage(self, version: int) -> None:
        with self._lock:
            self._damaged.pop(version, None)

    def _keep(self, manifest: Manifest) -> None:
        with self._lock:
            self._damaged.pop(manifest.version, None)
            self._manifests[manifest.version] = manifest
            # Whoever was sent past removed versions asks on from there.
            if self._newest is not None and manifest.version > self._newest.version:
                self._newest = manifest
            while len(self._manifests) > MANIFESTS_KEPT:
                oldest = next(iter(self._manifests))
                del self._manifests[oldest]
                self._wholes.pop(oldest, None)

    def _listed(self, known: Manifest | None) -> Manifest | None:
        """The last version that a list shows after `known` and whose manifest can be used. Raises
        what is wrong with the last one if none is known and none can be used."""
        after = None if known is None else version_key(known.version)
        keys = (info.key for info in self._store.list(VERSIONS_PREFIX, start_after=after))
        last = deque((v for v in map(parse_version_key, keys) if v is not None), maxlen=LOOKED_BACK)
        damage: FarcastError | None = None
        for version in reversed(last):
            try:
                return self.manifest(version)
            except UnknownVersionError:  # removed since it was listed
                continue
            except UNUSABLE as error:
                damage = damage or error
        if known is None and damage is not None:
            raise damage
        return known

    def _probed(self, known: Manifest | None) -> Manifest | None:
        """The newest version found by asking for those after `known`, which is remembered."""
        last = -1 if known is None else known.version
        for version in range(last + 1, last + 1 + PROBES):
            try:
                known = self.manifest(version)
            except UnknownVersionError:
                break
            except UNUSABLE:  # noted; the one after may be right
                continue
        else:
            known = self._listed(known)
        with self._lock:
            if known is not None and (self._newest is None or known.version > self._newest.version):
                self._newest = known
            return self._newest


class _Fetched:
    """The patches of a plan's steps as they are fetched, reported as progress."""

    def __init__(self, archive: Archive, route: Plan, progress: Progress | None) -> None:
        self._archive = archive
        self._total = route.bytes
        self._progress = progress
        self._done = 0

    def patches(self, step: PlanStep) -> Iterator[Patch]:
        for data in self._archive.get_objects(step.objects):
            self._done += len(data)
            if self._progress is not None:
                self._progress(self._done, self._total)
            yield Patch.open(data)
