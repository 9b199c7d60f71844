"""Which versions are also published in full, and which as the change from further back. Pure.

With `factor` 4, every 4th version also holds the change from 4 before, every 16th that from 16
before, and so on. From any version to any later one, a path climbs by steps of 1 to the next
multiple of 4, by steps of 4 to the next of 16, and comes down alike: at most 3 steps a level each
way, so O(log n) of them.
"""

from farcast.errors import ConfigError

MAX_ANCHOR_DISTANCE = 2048
"""Versions between two anchors at most: half of the manifests that a plan may look at."""


def check_anchor_every(every: int) -> None:
    """Refuse a distance that no plan could bridge."""
    if not 1 <= every <= MAX_ANCHOR_DISTANCE:
        raise ConfigError(
            f"anchor_every is {every}; it counts versions and must be 1 to {MAX_ANCHOR_DISTANCE}."
        )


MAX_SQUASHED = 1024
"""Versions one squashed delta spans at most. Beyond some hundreds nearly everything that ever
changes has changed, and a longer span saves neither bytes nor steps."""


def check_squash(factor: int | None) -> None:
    """Refuse a factor that gives no levels."""
    if factor is not None and not 2 <= factor <= MAX_SQUASHED:
        raise ConfigError(
            f"squash is {factor}; it is a number of versions from 2 to {MAX_SQUASHED}, or None."
        )


def squash_spans(version: int, factor: int | None) -> tuple[int, ...]:
    """How far back the squashed deltas of `version` reach: powers of `factor` that divide it."""
    if factor is None or version == 0:
        return ()
    spans: list[int] = []
    span = factor
    while span <= MAX_SQUASHED and version % span == 0:
        spans.append(span)
        span *= factor
    return tuple(spans)


def is_anchor_due(version: int, anchor_version: int | None, every: int) -> bool:
    """Whether `version` is published in full, given the newest version before it that was.

    Counted from the last anchor and not as a remainder, so that a change of `every` between two
    trainers of one run never leaves a longer gap than either asked for.
    """
    return anchor_version is None or version - anchor_version >= every
