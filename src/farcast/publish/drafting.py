"""From a base and a target to a manifest whose objects are durable: everything of a version
but its commit. Refuses to make anything visible."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from farcast.delta import TensorBits, root_of
from farcast.lineage import Delta, Manifest, ObjectRef, encode_manifest, is_anchor_due
from farcast.publish.parts import Tally, anchor_parts, delta_parts
from farcast.store.archive import Archive
from farcast.store.rebuilding import Weights
from farcast.types import TensorEntry


@dataclass(frozen=True, kw_only=True)
class Base:
    """The newest version (None in an empty store) and its bits.

    Without `weights` there is nothing to take a difference from: the next version is an anchor.
    """

    newest: Manifest | None
    weights: Weights | None

    @property
    def version(self) -> int:
        return -1 if self.newest is None else self.newest.version


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """How versions of one publisher are made."""

    archive: Archive
    writer: str
    served_format: str
    anchor_every: int
    part_bytes: int


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A version that lacks only its commit; `repeated` if it is the newest one again."""

    manifest: Manifest
    entries: Mapping[str, TensorEntry]
    repeated: bool
    encode_seconds: float
    put_seconds: float

    @property
    def bytes_sent(self) -> int:
        if self.repeated:
            return 0
        lists = [self.manifest.anchor or (), *(delta.objects for delta in self.manifest.deltas)]
        objects = {ref.digest: ref.size for objects in lists for ref in objects}
        return sum(objects.values()) + len(encode_manifest(self.manifest))


def draft_version(how: Drafting, base: Base, target: Mapping[str, TensorBits], step: int) -> Draft:
    """Encode `target` and put its objects; the next version after `base`, not yet visible."""
    started = time.perf_counter()
    tally = Tally()
    deltas: tuple[Delta, ...] = ()
    anchor: tuple[ObjectRef, ...] | None = None
    if base.newest is not None and base.weights is not None:
        objects = _put_delta(how, base.weights, target, tally)
        deltas = (Delta(base=base.version, base_root=base.newest.root, objects=objects),)
        if (root_of(tally.entries), step) == (base.newest.root, base.newest.step):
            return _draft(base.newest, tally, started, repeated=True)
    version = base.version + 1
    before = None if base.newest is None else base.newest.anchor_version
    if not deltas or is_anchor_due(version, before, how.anchor_every):
        anchor = _put_anchor(how, target, tally, first=not deltas)
    manifest = Manifest(
        run_id=how.archive.run_id,
        version=version,
        root=root_of(tally.entries),
        step=step,
        served_format=how.served_format,
        tensors=len(target),
        elements=tally.elements,
        bytes_full=sum(bits.data.nbytes for bits in target.values()),
        changed=tally.changed,
        anchor_version=version if before is None or anchor is not None else before,
        anchor=anchor,
        deltas=deltas,
        writer=how.writer,
    )
    return _draft(manifest, tally, started, repeated=False)


def _put_delta(
    how: Drafting, weights: Weights, target: Mapping[str, TensorBits], tally: Tally
) -> tuple[ObjectRef, ...]:
    parts = delta_parts(weights.bits, weights.entries, target, tally, part_bytes=how.part_bytes)
    return how.archive.put_objects(parts)


def _put_anchor(
    how: Drafting, target: Mapping[str, TensorBits], tally: Tally, *, first: bool
) -> tuple[ObjectRef, ...]:
    """Put the full copy; it tells entries and changes only where there is no delta to do so."""
    own = tally if first else Tally()
    objects = how.archive.put_objects(anchor_parts(target, own, part_bytes=how.part_bytes))
    if not first:
        tally.seconds += own.seconds
    return objects


def _draft(manifest: Manifest, tally: Tally, started: float, *, repeated: bool) -> Draft:
    return Draft(
        manifest=manifest,
        entries=tally.entries,
        repeated=repeated,
        encode_seconds=tally.seconds,
        put_seconds=max(0.0, time.perf_counter() - started - tally.seconds),
    )
