"""Which versions may be removed. Pure.

What stays: the newest `keep` versions, every version somebody holds (`pinned`), and all from the
anchor below the oldest of these (where versions are served in several formats, the oldest of their
anchors): so whoever has a kept version can go on to the newest, and a newcomer can start. What is
below that anchor goes.

Worked example: versions 0 to 47, anchors at 0, 20 and 40, keep 5, one replica at 38. The newest 5
begin at 43, the replica at 38 is older, its anchor is 20: versions 0 to 19 go.
"""

from collections.abc import Collection, Mapping

from farcast.errors import ConfigError
from farcast.lineage.manifest import Manifest


def first_kept(manifests: Mapping[int, Manifest], keep: int, pinned: Collection[int] = ()) -> int:
    """The oldest version that must stay; `manifests` holds the versions of the store.

    Pinned versions that the store no longer has are passed over: who holds one starts again
    from an anchor.
    """
    if keep < 1:
        raise ConfigError(f"keep is {keep}; at least the newest version must stay.")
    if not manifests:
        return 0
    newest = max(manifests)
    wanted = [newest - keep + 1, *pinned]
    oldest = min((version for version in wanted if version in manifests), default=min(manifests))
    start = min(view.anchor_version for view in manifests[oldest].views)
    return start if start in manifests else min(manifests)
