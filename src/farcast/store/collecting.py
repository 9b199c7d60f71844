"""Removing what no reader needs any more: first a plan that prints, then the deletions.

 1. Manifests go before objects, oldest first: at every moment each manifest that is there names
    only objects that are there, and whoever holds a version can go on from it. A stop in between
    leaves orphans, and doomed versions without their anchor, for the next time.
 2. An object that no kept manifest and no run record names is an orphan. It goes only when it is
    older than `grace`, since a version's objects are put before its manifest. Age is measured by
    the store's own stamps against the youngest of them, so no clock has to agree with another.
 3. A damaged manifest goes with its neighbours. While one is among the versions that stay, no
    object goes: nobody can tell what it names.
 4. Versions are listed again after their manifests were removed, and what appeared meanwhile
    is kept with all it names.

Refuses to run beside a publisher in another process: one that finds an object already there does
not write it again, and could commit a version whose object is removed in that moment. The run's
own publisher calls it between two versions; anybody else, when the run has ended.
"""

import contextlib
from collections.abc import Collection
from typing import NamedTuple

from farcast.errors import ObjectNotFoundError
from farcast.lineage import (
    OBJECTS_PREFIX,
    UNUSABLE,
    VERSIONS_PREFIX,
    Manifest,
    first_kept,
    parse_version_key,
    version_key,
)
from farcast.store.archive import Archive
from farcast.store.base import ObjectInfo
from farcast.store.transfers import in_parallel

GRACE = 3600.0
"""Seconds for which an object that nothing names is left alone: longer than a publish takes."""


DELETIONS = 16
"""Objects removed side by side: over a long line each waits a round trip."""


class Garbage(NamedTuple):
    """What may go: versions, oldest first, and objects. Printing it gives a table."""

    run_id: str
    first_kept: int
    versions: tuple[int, ...]
    objects: tuple[ObjectInfo, ...]

    @property
    def bytes(self) -> int:
        return sum(info.size for info in self.objects)

    def __str__(self) -> str:
        if not self.versions and not self.objects:
            return f"gc for {self.run_id}: nothing to remove"
        span = f"{self.versions[0]} to {self.versions[-1]}" if self.versions else "none"
        return (
            f"gc for {self.run_id}: versions up to the anchor at {self.first_kept}\n"
            f"  versions  {len(self.versions):>10}  ({span})\n"
            f"  objects   {len(self.objects):>10}\n"
            f"  bytes     {self.bytes:>14,}"
        )


def find_garbage(
    archive: Archive, *, keep: int, pinned: Collection[int] = (), grace: float = GRACE
) -> Garbage:
    """What may go while the newest `keep` versions and the `pinned` ones stay usable."""
    archive.require_whole()
    versions = _versions(archive)
    manifests = _usable(archive, versions)
    if versions and not manifests:
        archive.manifest(versions[-1])  # raises what is wrong with it
    start = first_kept(manifests, keep, pinned)
    staying = [version for version in versions if version >= start]
    return Garbage(
        run_id=archive.run_id,
        first_kept=start,
        versions=tuple(version for version in versions if version < start),
        objects=_orphans(archive, staying, grace),
    )


def collect_garbage(
    archive: Archive, *, keep: int, pinned: Collection[int] = (), grace: float = GRACE
) -> Garbage:
    """Remove it; returns what was removed."""
    found = find_garbage(archive, keep=keep, pinned=pinned, grace=grace)
    for version in found.versions:
        archive.store.delete(version_key(version))
    staying = [version for version in _versions(archive) if version >= found.first_kept]
    orphans = _orphans(archive, staying, grace)
    for _ in in_parallel(archive.store.delete, [info.key for info in orphans], workers=DELETIONS):
        pass
    return found._replace(objects=orphans)


def _usable(archive: Archive, versions: Collection[int]) -> dict[int, Manifest]:
    """The manifests of `versions` that are not damaged."""
    found = {}
    for version in versions:
        with contextlib.suppress(*UNUSABLE):
            found[version] = archive.manifest(version)
    return found


def _versions(archive: Archive) -> list[int]:
    keys = (parse_version_key(info.key) for info in archive.store.list(VERSIONS_PREFIX))
    return [version for version in keys if version is not None]


def _orphans(archive: Archive, staying: list[int], grace: float) -> tuple[ObjectInfo, ...]:
    """Objects that neither the versions `staying` nor the run record names, and that are old
    enough."""
    kept = _usable(archive, staying)
    if len(kept) < len(staying):
        return ()
    named = {ref.digest for manifest in kept.values() for ref in manifest.objects}
    with contextlib.suppress(ObjectNotFoundError):  # a run needs no record
        named |= {ref.digest for ref in archive.open_run().assets.values()}
    found = list(archive.store.list(OBJECTS_PREFIX))
    youngest = max((info.modified for info in found), default=0.0)
    return tuple(
        info
        for info in found
        if info.key.removeprefix(OBJECTS_PREFIX) not in named and info.modified <= youngest - grace
    )
