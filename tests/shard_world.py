"""Ranks of one publisher as threads of one process, for tests of what they do together."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from farcast.errors import RankLostError

T = TypeVar("T")


class Meeting:
    """Where threads exchange messages; a thread that is missing breaks it for all."""

    def __init__(self, size: int, timeout: float = 20.0) -> None:
        self.size = size
        self.table: list[Sequence[bytes]] = [()] * size
        self.rounds = 0
        self.bytes_sent = [0] * size
        """By the sender, to other ranks."""
        self._barrier = threading.Barrier(size, action=self._count, timeout=timeout)

    def _count(self) -> None:
        self.rounds += 1

    def wait(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise RankLostError("A rank did not come.") from None


class ThreadComms:
    """`Comms` of one thread."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = meeting.size

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        meeting = self._meeting
        assert len(parts) == self.size
        meeting.table[self.rank] = parts
        meeting.bytes_sent[self.rank] += sum(map(len, parts)) - len(parts[self.rank])
        meeting.wait()
        got = [row[self.rank] for row in meeting.table]
        meeting.wait()  # nobody overwrites the table before all have read
        return got


class Mesh:
    def __init__(self, coordinate: int) -> None:
        self.coordinate = coordinate

    def get_coordinate(self) -> list[int]:
        return [self.coordinate]


class Shard:
    """Looks like torch's placement of that name."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def is_replicate(self) -> bool:
        return False


class FakeDTensor:
    """Rows of a numpy array that say they are sharded. Gathering them fails the test."""

    def __init__(self, whole: Any, rank: int, ranks: int, dim: int = 0) -> None:
        self.shape = whole.shape
        self.device_mesh = Mesh(rank)
        self.placements = (Shard(dim),)
        self._local = np.array_split(whole, ranks)[rank]

    def to_local(self) -> Any:
        return self._local

    def full_tensor(self) -> Any:
        raise AssertionError("Nothing is gathered.")


def on_ranks(ranks: int, work: Callable[[int], T]) -> list[T | Exception]:
    """What `work(rank)` returns or raises, on a thread for each rank."""

    def caught(rank: int) -> T | Exception:
        try:
            return work(rank)
        except Exception as error:  # noqa: BLE001 - it is the result
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(caught, range(ranks)))
