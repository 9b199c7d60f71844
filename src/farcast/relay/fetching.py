"""From the store into the cache, each object once, however many ask for it at the same time.

The first who asks starts a flight; everybody who asks before it has landed waits for the same one.
It goes on when they leave: whoever comes next finds the object here. Bytes are hashed before they
are kept, so nothing is ever kept under a name that it does not have.

Refuses to decide what an asker does without the object, and to hold more than `workers` objects in
memory at once, apart from those that the disk would not take while somebody still reads them.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from blake3 import blake3

from farcast.errors import IntegrityError
from farcast.lineage import MAX_OBJECT_BYTES, OBJECTS_PREFIX
from farcast.relay.cache import ObjectCache
from farcast.store import Store

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(kw_only=True)
class Tally:
    """What the long line was spared. Written by the event loop's thread."""

    asked: int = 0
    from_disk: int = 0
    joined: int = 0
    """Waited for a flight that another had started."""
    reads: int = 0
    """Objects read from the store."""
    failed: int = 0
    """Reads that gave no object."""
    bytes_in: int = 0
    bytes_out: int = 0
    unkept: int = 0
    """Served, and not kept: the disk was full."""


class Fetcher:
    """Used by one event loop. `tell` gets a line for people."""

    def __init__(
        self,
        store: Store,
        cache: ObjectCache,
        tally: Tally,
        *,
        workers: int,
        tell: Callable[[str], None],
    ) -> None:
        self._store = store
        self._cache = cache
        self._tally = tally
        self._tell = tell
        self._places = asyncio.Semaphore(workers)
        self._flights: dict[str, asyncio.Task[bytes | None]] = {}
        self._told = ""

    @property
    def under_way(self) -> int:
        return len(self._flights)

    def flight(self, digest: str) -> "asyncio.Task[bytes | None]":
        """The one flight of this object. Its result is None once the object is in the cache, and
        the bytes themselves if they could not be kept; it raises what the store raises, and
        `IntegrityError` for bytes that are not the object."""
        found = self._flights.get(digest)
        if found is not None:
            self._tally.joined += 1
            return found
        task = asyncio.ensure_future(self._fly(digest))
        self._flights[digest] = task
        task.add_done_callback(lambda done: self._landed(digest, done))
        return task

    async def _fly(self, digest: str) -> bytes | None:
        async with self._places:
            self._tally.reads += 1
            data = await _in_thread(self._read, digest)
            self._tally.bytes_in += len(data)
            kept = await _in_thread(self._cache.keep, digest, data)
        if kept:
            self._told = ""
            return None
        self._tally.unkept += 1
        if self._told != self._cache.trouble:
            self._told = self._cache.trouble
            self._tell(f"an object is passed on without being kept: {self._told}")
        return data

    def _read(self, digest: str) -> bytes:
        data = self._store.get(f"{OBJECTS_PREFIX}{digest}", max_bytes=MAX_OBJECT_BYTES)
        if blake3(data).hexdigest() != digest:
            raise IntegrityError(
                f"{OBJECTS_PREFIX}{digest} in {self._store.url} is damaged; "
                "fetch it again, or from another store."
            )
        return data

    def _landed(self, digest: str, task: "asyncio.Task[bytes | None]") -> None:
        del self._flights[digest]
        if not task.cancelled() and task.exception() is not None:
            self._tally.failed += 1


async def _in_thread(function: Callable[_P, _T], *given: _P.args, **named: _P.kwargs) -> _T:
    """Like `asyncio.to_thread`, but the process may end while a read from the store still hangs."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if future.done():  # nobody waits any more
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            told: tuple[_T | None, BaseException | None] = (function(*given, **named), None)
        except Exception as error:  # noqa: BLE001 - it is raised where the result is waited for
            told = (None, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, *told)

    threading.Thread(target=run, name="farcast-fetch", daemon=True).start()
    return await future
