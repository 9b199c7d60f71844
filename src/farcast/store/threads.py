"""How many threads a publisher or a replica works on, where nobody says."""

import os

from farcast.errors import ConfigError

MOST = 256
MOST_BY_DEFAULT = 4
"""Two threads compare as fast as most memory delivers; what more of them save is hashing."""


def threads_of(asked: int | None) -> int:
    """What was asked for, or `default_threads`. Raises `ConfigError`."""
    if asked is None:
        return default_threads()
    if not 1 <= asked <= MOST:
        raise ConfigError(f"threads is {asked}; it is a number from 1 to {MOST}, or None.")
    return asked


def default_threads() -> int:
    """Half of the cores that this process may run on, at least one and at most four: the other
    half belongs to the training step, or to the engine, that goes on meanwhile."""
    return max(1, min(MOST_BY_DEFAULT, available_cores() // 2))


def available_cores() -> int:
    """Cores that this process may run on. Does not see a container's quota of processor time."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
