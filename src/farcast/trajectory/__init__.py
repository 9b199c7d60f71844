"""Trajectories on their way home: wire types, encoding, sender, receiver, groups.

Producer: workers. Consumer: the trainer. See `wire` for the types, `encoding` for the bytes,
`sender` and `receiver` for what durable and once mean, `batching` for groups and staleness.
"""

from farcast.trajectory.batching import Group, GroupBatcher, oldest_version, staleness_of
from farcast.trajectory.checks import check_trajectory
from farcast.trajectory.encoding import Batch, decode_batch, encode_batch
from farcast.trajectory.receiver import TrajectoryReceiver
from farcast.trajectory.sender import Backlog, TrajectorySender
from farcast.trajectory.wire import FinishReason, Role, RoutedExperts, Trajectory, Turn

__all__ = [
    "Backlog",
    "Batch",
    "FinishReason",
    "Group",
    "GroupBatcher",
    "Role",
    "RoutedExperts",
    "Trajectory",
    "TrajectoryReceiver",
    "TrajectorySender",
    "Turn",
    "check_trajectory",
    "decode_batch",
    "encode_batch",
    "oldest_version",
    "staleness_of",
]
