"""`memory://`: objects in this process, for tests and single-process runs.

Refuses nothing that the other stores allow; holds everything in memory and forgets it at exit.
"""

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator

from farcast.errors import ObjectExistsError
from farcast.store.base import ObjectInfo
from farcast.store.buffers import byte_view
from farcast.store.failures import not_found, over_limit, short_read
from farcast.store.keys import check_key, check_prefix, check_range


class MemoryStore:
    """A store private to whoever holds the object."""

    def __init__(self, name: str = "", *, clock: Callable[[], float] = time.time) -> None:
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, float]] = {}

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    def __repr__(self) -> str:
        return f"MemoryStore({self.url!r})"

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        check_key(key)
        content = bytes(byte_view(data))
        with self._lock:
            if if_absent and key in self._objects:
                raise ObjectExistsError(f"{self.url} already has an object {key!r}.")
            self._objects[key] = content, self._clock()

    def get(self, key: str, *, max_bytes: int) -> bytes:
        data = self._find(key)
        if len(data) > max_bytes:
            raise over_limit(key, len(data), max_bytes)
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        data = self._find(key)[start : start + length]
        if len(data) < length:
            raise short_read(key, start, length, len(data))
        return data

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        if start_after is not None:
            check_key(start_after)
        return self._list(prefix, start_after or "")

    def delete(self, key: str) -> None:
        check_key(key)
        with self._lock:
            self._objects.pop(key, None)

    def _find(self, key: str) -> bytes:
        check_key(key)
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise not_found(self.url, key)
        return found[0]

    def _list(self, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        with self._lock:
            keys = sorted(key for key in self._objects if key.startswith(prefix))
        for key in keys[bisect_right(keys, start_after) :]:
            with self._lock:
                found = self._objects.get(key)
            if found is not None:  # deleted while the caller read on
                yield ObjectInfo(key, len(found[0]), found[1])
