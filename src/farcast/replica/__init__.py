"""Bringing a place that serves weights to a version, verified: subscriber and targets.

`TorchModule` is loaded when it is first used, so that a replica without torch can import this.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from farcast.replica.base import Draft, Goal, Target
from farcast.replica.directory import CheckpointDirectory
from farcast.replica.live import LiveTarget, Place
from farcast.replica.memory import MemoryTarget
from farcast.replica.staging import Progress, Staged, SyncStats
from farcast.replica.subscriber import Subscriber

if TYPE_CHECKING:
    from farcast.replica.torch_module import TorchModule

__all__ = [
    "CheckpointDirectory",
    "Draft",
    "Goal",
    "LiveTarget",
    "MemoryTarget",
    "Place",
    "Progress",
    "Staged",
    "Subscriber",
    "SyncStats",
    "Target",
    "TorchModule",
]


def __getattr__(name: str) -> Any:
    if name == "TorchModule":
        return import_module("farcast.replica.torch_module").TorchModule
    raise AttributeError(f"module 'farcast.replica' has no attribute {name!r}")
