"""Where trajectories lie in a store, and how a worker and the trainer find each other's objects.

    trajectories/<worker>/<sequence>   a batch, put once; sequences count from 0 without a gap
    workers/<worker>                   put once by a sender before its first batch, empty

The second exists so that the trainer finds new workers by one short list, however many batches
there are. Refuses ids that are no `Name`: an id becomes part of a key.
"""

from farcast.errors import ConfigError
from farcast.types import NAME_PATTERN

WORKERS_PREFIX = "workers/"
TRAJECTORIES_PREFIX = "trajectories/"


def worker_key(worker_id: str) -> str:
    """`workers/w7`"""
    return f"{WORKERS_PREFIX}{worker_id}"


def batches_prefix(worker_id: str) -> str:
    """`trajectories/w7/`"""
    return f"{TRAJECTORIES_PREFIX}{worker_id}/"


def batch_key(worker_id: str, sequence: int) -> str:
    """`trajectories/w7/000000000012`"""
    return f"{batches_prefix(worker_id)}{sequence:012d}"


def sequence_of(worker_id: str, key: str) -> int | None:
    """The sequence number of a key below the worker's prefix, None for any other key."""
    digits = key.removeprefix(batches_prefix(worker_id))
    return int(digits) if len(digits) == 12 and digits.isascii() and digits.isdigit() else None


def checked_name(kind: str, name: str) -> str:
    """`name`, or `ConfigError` when it cannot be part of a key."""
    if not isinstance(name, str) or NAME_PATTERN.fullmatch(name) is None:
        raise ConfigError(
            f"{str(name)[:60]!r} is no {kind} id; use 1 to 128 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit."
        )
    return name
