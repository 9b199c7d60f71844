"""Ranks that talk through torch.distributed: what a trainer under `torchrun` has anyway.

The messages have a process group of their own, gloo on host memory whatever device trains, so a
publish in the background never stands between two collectives of the trainer. Nothing is pickled.
"""

import datetime
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from farcast.errors import ConfigError, RankLostError

TIMEOUT = 600.0
"""Seconds a rank waits for the others in one round. The longest is the first version's, in which
some rank may have gigabytes to encode and to upload."""


class TorchComms:
    """The ranks of `group` (all, by default). Make one on every rank, at the same point."""

    def __init__(self, group: Any = None, *, timeout: float = TIMEOUT) -> None:
        if not dist.is_initialized():
            raise ConfigError(
                "torch.distributed is not set up; call init_process_group, or publish from one "
                "process without comms."
            )
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._group = dist.new_group(
            ranks,
            backend="gloo",
            timeout=datetime.timedelta(seconds=timeout),
            use_local_synchronization=True,
        )
        self._rank = int(dist.get_rank(self._group))
        self._size = len(ranks)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        """See `Comms.exchange`."""
        sending = [len(part) for part in parts]
        arriving = torch.empty(self._size, dtype=torch.int64)
        self._all_to_all(arriving, torch.tensor(sending), None, None)
        receiving = arriving.tolist()
        source = _as_tensor(b"".join(parts))
        target = torch.empty(sum(receiving), dtype=torch.uint8)
        self._all_to_all(target, source, receiving, sending)
        data = target.numpy().data
        ends = list(accumulate(receiving))
        return [bytes(data[end - size : end]) for end, size in zip(ends, receiving, strict=True)]

    def _all_to_all(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        receiving: list[int] | None,
        sending: list[int] | None,
    ) -> None:
        try:
            dist.all_to_all_single(target, source, receiving, sending, group=self._group)
        except RuntimeError as error:
            raise RankLostError(
                "A rank of this publisher did not answer; whether the version is visible is only "
                "known to the store. Restart all ranks from their checkpoint."
            ) from error


def _as_tensor(data: bytes) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
