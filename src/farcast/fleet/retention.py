"""Old versions leave the store while the run goes on, so that its size is bounded.

Asked after each version, it collects when a quarter more than `keep` versions may be there, in a
thread of its own: the trainer goes on, and only a version that is published meanwhile waits.
Versions that replicas with a lease stand on stay, and all that leads on from them.

Refuses to end a run for it: what could not be removed is removed the next time. Several ranks
don't collect, since nobody can tell what the others are about to name; `farcast gc` does, when the
run has ended.
"""

import threading
from types import TracebackType

from farcast.errors import FarcastError
from farcast.fleet.leases import clock_of, held_versions
from farcast.fleet.registry import Registry
from farcast.fleet.saying import say
from farcast.publish import Publisher
from farcast.store.collecting import GRACE


class Retention:
    """Collects for one trainer. Use as a context manager: on exit it waits for a collection."""

    def __init__(
        self, publisher: Publisher, registry: Registry, keep: int | None, *, grace: float = GRACE
    ) -> None:
        """`keep` versions stay at least; None keeps all."""
        self._publisher = publisher
        self._registry = registry
        self._clock = clock_of(registry)
        self._keep = keep
        self._grace = grace
        self._next = 0
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Retention":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread is not None:
            self._thread.join()

    def published(self, version: int) -> None:
        """`version` is durable; returns at once."""
        if self._keep is None or version < max(self._keep, self._next):
            return
        if self._thread is not None and self._thread.is_alive():
            return
        self._next = version + max(1, self._keep // 4)
        self._thread = threading.Thread(
            target=self._collect, args=(self._keep,), name="farcast-retention", daemon=True
        )
        self._thread.start()

    def _collect(self, keep: int) -> None:
        try:
            pinned = held_versions(self._registry.replicas(damaged=_left_out), self._clock.now())
            removed = self._publisher.collect_garbage(keep=keep, pinned=pinned, grace=self._grace)
        except FarcastError as error:
            say(f"old versions stay for now: {error}")
            return
        if removed.versions:
            say(f"removed versions up to {removed.versions[-1]} ({removed.bytes:,} bytes)")


def _left_out(key: str, error: FarcastError) -> None:
    """A record that nobody can read is no lease; `farcast status` names it."""
