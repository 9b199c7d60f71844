"""Which manifests a plan has to look at, read as few at a time as the way allows.

An archive knows manifests by their number, and each costs a request. Over a short way a plan
weighs every path, over a long one it follows the longest deltas, which takes O(log n) requests.

Refuses to choose the path: `farcast.lineage.plan` does.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from farcast.errors import UnknownVersionError
from farcast.lineage import UNUSABLE, Manifest
from farcast.store.transfers import in_parallel
from farcast.types import VersionRef

PREFETCHED = 256
"""Manifests read ahead at once for a plan that spans many versions."""

EXACT_SPAN = 32
"""Versions up to which a plan weighs every path. Over more it follows the longest deltas, and
reads O(log n) manifests instead of n."""

MAX_SHORT_STEPS = 16
"""Single deltas in a row after which a run is taken to have no squashed ones."""


class Manifests(Protocol):
    """Where manifests come from: an archive."""

    @property
    def workers(self) -> int:
        """Requests in flight at most."""

    def manifest(self, version: int) -> Manifest:
        """The checked manifest, or an error that says what is wrong."""

    def unread(self, versions: Iterable[int]) -> list[int]:
        """Those that a request has to be made for."""


class Lineage(Mapping[int, Manifest]):
    """An archive, from the version `first` on, as the mapping that `plan` reads from."""

    def __init__(self, archive: Manifests, first: int = 0) -> None:
        self._archive = archive
        self._first = first

    def __getitem__(self, version: int) -> Manifest:
        if version < self._first:
            raise KeyError(version)
        try:
            return self._archive.manifest(version)
        except (UnknownVersionError, *UNUSABLE):  # the archive has noted what is wrong
            raise KeyError(version) from None

    def __iter__(self) -> Iterator[int]:
        return iter(())  # nobody may read all of it

    def __len__(self) -> int:
        return 0


class Seen(Mapping[int, Manifest]):
    """`manifests` is what was asked of `lineage` and there."""

    def __init__(self, lineage: Mapping[int, Manifest]) -> None:
        self._lineage = lineage
        self.manifests: dict[int, Manifest] = {}

    def __getitem__(self, version: int) -> Manifest:
        self.manifests[version] = self._lineage[version]
        return self.manifests[version]

    def __iter__(self) -> Iterator[int]:
        return iter(self.manifests)

    def __len__(self) -> int:
        return len(self.manifests)


def lineage_between(
    archive: Manifests, have: VersionRef | None, want: VersionRef
) -> Mapping[int, Manifest]:
    """The manifests to plan with: all that matter, or over a long way those along it.

    Older ones than the anchor and what is at hand do not matter: every path through them would
    begin with an older anchor and be longer. Looking at them takes a request for each.
    """
    target = archive.manifest(want.version)
    first = nearest = target.anchor_version
    if have is not None and have.version < target.version:
        # Deltas past a newer anchor are cheaper as long as they are smaller than it.
        first, nearest = min(first, have.version), have.version + 1
    if target.version - nearest > EXACT_SPAN:
        strides = _strides(archive, have, target)
        if strides is not None:
            return strides
    read_side_by_side(archive, range(max(nearest, target.version - PREFETCHED), target.version))
    return Lineage(archive, first)


def read_side_by_side(archive: Manifests, versions: Iterable[int]) -> None:
    """Read what a plan over many versions would read one after the other."""
    missing = archive.unread(versions)
    if len(missing) > 1:
        for _ in in_parallel(Lineage(archive).get, missing, workers=archive.workers):
            pass


def _strides(
    archive: Manifests, have: VersionRef | None, target: Manifest
) -> dict[int, Manifest] | None:
    """Manifests along the longest deltas down to the anchor, and to `have`; None if the run has
    no long ones."""
    found = {target.version: target}
    goals = {target.anchor_version}
    if have is not None and have.version < target.version:
        goals.add(have.version)
    for goal in goals:
        node, short = target, 0
        while node.version > goal:
            base = min((d.base for d in node.deltas if d.base >= goal), default=None)
            if base is None:
                return None
            short = short + 1 if node.version - base == 1 else 0
            if short > MAX_SHORT_STEPS:
                return None
            try:
                node = found[base] = archive.manifest(base)
            except (UnknownVersionError, *UNUSABLE):
                return None
    return found
