"""farcast: reinforcement learning of language models across datacenters.

Policy versions go out as exact sparse deltas of the weights that are served; replicas rebuild
the same bits and send trajectories home. An object store is all that both sides share.

The names below are the stable API. They load on first use, so that `import farcast` stays
light: torch is imported only by what needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from farcast.errors import FarcastError
from farcast.types import PolicySpan, VersionRef

if TYPE_CHECKING:
    from farcast.publish import Publisher, PublishJob
    from farcast.replica import CheckpointDirectory, Subscriber, TorchModule
    from farcast.store import open_store
    from farcast.trajectory import Trajectory, TrajectoryReceiver, TrajectorySender

__version__ = "0.1.0"

_HOMES = {
    "CheckpointDirectory": "farcast.replica",
    "PublishJob": "farcast.publish",
    "Publisher": "farcast.publish",
    "Subscriber": "farcast.replica",
    "TorchModule": "farcast.replica",
    "Trajectory": "farcast.trajectory",
    "TrajectoryReceiver": "farcast.trajectory",
    "TrajectorySender": "farcast.trajectory",
    "open_store": "farcast.store",
}

__all__ = [
    "CheckpointDirectory",
    "FarcastError",
    "PolicySpan",
    "PublishJob",
    "Publisher",
    "Subscriber",
    "TorchModule",
    "Trajectory",
    "TrajectoryReceiver",
    "TrajectorySender",
    "VersionRef",
    "__version__",
    "open_store",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'farcast' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
