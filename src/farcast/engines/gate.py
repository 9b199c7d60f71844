"""The gate between token steps and commits: they exclude each other, and a commit goes first.

A plain lock would let a busy sampler take the lock again and again while a commit waits.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """One step or one commit at a time. A step that arrives while a commit waits lets it pass."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._busy = False
        self._commits_waiting = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one forward pass: no weight changes inside."""
        with self._free:
            self._free.wait_for(lambda: not self._busy and not self._commits_waiting)
            self._busy = True
        try:
            yield
        finally:
            self._release()

    @contextmanager
    def commit(self) -> Iterator[None]:
        """Around a commit: no forward pass inside."""
        with self._free:
            self._commits_waiting += 1
            try:
                self._free.wait_for(lambda: not self._busy)
                self._busy = True
            finally:
                self._commits_waiting -= 1
                if not self._busy:  # an interrupt ended the wait
                    self._free.notify_all()
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        with self._free:
            self._busy = False
            self._free.notify_all()
