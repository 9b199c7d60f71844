"""A store that counts what goes through it: requests by verb, bytes each way.

Counts attempts: a request that failed was made, and the bytes of a refused put were sent.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from farcast.store.base import ObjectInfo, Store
from farcast.store.link import LIST_PAGE


class Traffic(NamedTuple):
    """Totals since the store was wrapped. `requests` by verb: put, get, get_range, list, delete;
    a list counts one request for every 1,000 objects that were read from it."""

    requests: Mapping[str, int]
    bytes_up: int
    bytes_down: int

    @property
    def total_requests(self) -> int:
        return sum(self.requests.values())


class CountingStore:
    """`store`, counted. Totals are exact when several threads use it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()
        self._up = 0
        self._down = 0

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def traffic(self) -> Traffic:
        with self._lock:
            return Traffic(dict(self._requests), self._up, self._down)

    def __repr__(self) -> str:
        return f"CountingStore({self._store!r})"

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        self._count("put", up=memoryview(data).nbytes)
        self._store.put(key, data, if_absent=if_absent)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        self._count("get")
        data = self._store.get(key, max_bytes=max_bytes)
        self._received(data)
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self._count("get_range")
        data = self._store.get_range(key, start, length)
        self._received(data)
        return data

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        return self._counted(self._store.list(prefix, start_after=start_after))

    def delete(self, key: str) -> None:
        self._count("delete")
        self._store.delete(key)

    def _counted(self, listing: Iterator[ObjectInfo]) -> Iterator[ObjectInfo]:
        self._count("list")
        for position, info in enumerate(listing):
            if position and position % LIST_PAGE == 0:
                self._count("list")
            yield info

    def _count(self, verb: str, *, up: int = 0) -> None:
        with self._lock:
            self._requests[verb] += 1
            self._up += up

    def _received(self, data: bytes) -> None:
        with self._lock:
            self._down += len(data)
