"""A run's versions as a subscriber looks at them: by root, and without what is of no use.

Refuses to decide which of them to go to: `farcast.replica.subscriber` does.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from msgspec.structs import replace

from farcast.errors import UnknownVersionError
from farcast.lineage import UNUSABLE, Manifest, ObjectRef
from farcast.store.archive import Archive
from farcast.types import VersionRef


class ByRoot(Mapping[str, VersionRef]):
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


class Without(Mapping[int, Manifest]):
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
        return replace(
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
