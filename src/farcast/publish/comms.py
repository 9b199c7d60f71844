"""How the ranks of one publisher talk, and how they fail: together.

A publish is a fixed series of rounds. In a round every rank does its own work and then sends one
message to each rank; a rank whose work failed sends that instead, and goes on to receive. So all
ranks leave in the same round, nobody waits for a message that will not come, and the next publish
begins in step. Only a rank that is gone is found by the time limit.

Refuses to know what is sent: bytes.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from farcast.errors import FarcastError, RankError

_WELL, _FAILED = b"\x00", b"\x01"
_MAX_WORDS = 2000


class Comms(Protocol):
    """The ranks that publish one model together. Used by one thread at a time, in the same order
    on every rank."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send `parts[i]` to rank i; returns what every rank sent here, by rank.

        Raises `RankLostError` when a rank does not answer in time; later calls raise it too.
        """
        ...


class Rounds:
    """Rounds over `comms`. Each method is entered by all ranks, and raises on all or on none:
    the error of its own work on the rank that failed, `RankError` on the others."""

    def __init__(self, comms: Comms) -> None:
        self._comms = comms

    def exchange(self, make: Callable[[], Sequence[bytes]]) -> list[bytes]:
        """Send the i-th of what `make` returns to rank i; returns what was sent here, by rank."""
        error: Exception | None = None
        try:
            parts = [_WELL + part for part in make()]
        except Exception as caught:  # noqa: BLE001 - told to the others first, then raised
            error = caught
            told = str(caught) if isinstance(caught, FarcastError) else type(caught).__name__
            parts = [_FAILED + told[:_MAX_WORDS].encode()] * self._comms.size
        got = self._comms.exchange(parts)
        if error is not None:
            raise error
        for rank, message in enumerate(got):
            if message[:1] == _FAILED:
                raise RankError(
                    f"Rank {rank} could not do its part of the version: "
                    f"{message[1:].decode(errors='replace')}"
                )
        return [message[1:] for message in got]

    def share(self, make: Callable[[], bytes]) -> list[bytes]:
        """Everybody's bytes, on every rank."""
        return self.exchange(lambda: [make()] * self._comms.size)

    def gather(self, make: Callable[[], bytes]) -> list[bytes]:
        """Everybody's bytes on rank 0; elsewhere nothing but the news that all went well."""
        empty = [b""] * (self._comms.size - 1)
        return self.exchange(lambda: [make(), *empty])

    def broadcast(self, make: Callable[[], bytes]) -> bytes:
        """Rank 0's bytes, on every rank; only there is `make` called."""
        if self._comms.rank == 0:
            return self.share(make)[0]
        return self.exchange(lambda: [b""] * self._comms.size)[0]
