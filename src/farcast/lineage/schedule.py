"""When a version is also published in full. Pure."""

from farcast.errors import ConfigError

MAX_ANCHOR_DISTANCE = 2048
"""Versions between two anchors at most: half of the manifests that a plan may look at."""


def check_anchor_every(every: int) -> None:
    """Refuse a distance that no plan could bridge."""
    if not 1 <= every <= MAX_ANCHOR_DISTANCE:
        raise ConfigError(
            f"anchor_every is {every}; it counts versions and must be 1 to {MAX_ANCHOR_DISTANCE}."
        )


def is_anchor_due(version: int, anchor_version: int | None, every: int) -> bool:
    """Whether `version` is published in full, given the newest version before it that was.

    Counted from the last anchor and not as a remainder, so that a change of `every` between two
    trainers of one run never leaves a longer gap than either asked for.
    """
    return anchor_version is None or version - anchor_version >= every
