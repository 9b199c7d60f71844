"""Threads that encode, apply and hash. The kernels hold no lock of the interpreter's. Pure.

Which thread does what, and when, never shows in a result. Refuses to let work go on in the
background once its caller has left with an error.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, Self, TypeVar

from farcast.delta.bits import AnyBits, TensorBits
from farcast.errors import ConfigError

_In = TypeVar("_In")
_Out = TypeVar("_Out")

MAX_THREADS = 256
"""More than any machine has use for; BLAKE3 would start every one."""

AHEAD = 1
"""Tasks a thread that may wait for their turn."""

BATCH_BYTES = 1 << 20
BATCHES = 8
"""Small tensors are handed over together, in so many batches a thread, of so many bytes at least:
who hands over wants the interpreter's lock as well, and while it waits for it the others do."""


def shares(sizes: Mapping[str, int], threads: int) -> tuple[list[str], list[list[str]]]:
    """Tensors, by their bytes, as work for so many threads: those so large that all should work
    on each, and batches of the others, largest first."""
    total = sum(sizes.values())
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    large = [name for name in names if threads > 1 and sizes[name] * threads > total]
    batches: list[list[str]] = []
    most = max(BATCH_BYTES, total // (BATCHES * threads))
    held = most
    for name in names[len(large) :]:
        if held >= most:
            batches.append([])
            held = 0
        batches[-1].append(name)
        held += sizes[name]
    return large, batches


def checked_threads(threads: int) -> int:
    """What a caller asked for, if that many threads can be had."""
    if not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
        raise ConfigError(
            f"threads is {str(threads)[:40]}; it is a whole number from 1 to {MAX_THREADS}."
        )
    return threads


def threads_for(tensors: Iterable[AnyBits], threads: int) -> int:
    """One where some lie on a device, which is parallel by itself, and whose context is that of
    the caller's thread."""
    threads = checked_threads(threads)
    return threads if all(isinstance(bits, TensorBits) for bits in tensors) else 1


class Crew:
    """So many threads, which take tasks in order; with one the caller does the work itself.

    A task never waits for one that was started after it.
    """

    def __init__(self, threads: int) -> None:
        self.threads = checked_threads(threads)
        self._pool = _pool(threads) if threads > 1 else None
        self._running: set[Future[Any]] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        left = list(self._running)
        for future in left:
            future.cancel()
        if left:
            wait(left)

    def each(self, work: Callable[[_In], _Out], items: Iterable[_In]) -> Iterator[_Out]:
        """`map`, with as many results waiting as memory is meant for."""
        if self._pool is None:
            yield from map(work, items)
            return
        waiting: deque[Future[_Out]] = deque()
        for item in items:
            waiting.append(self._submit(self._pool, work, item))
            if len(waiting) > AHEAD * self.threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def start(self, work: Callable[[_In], _Out], item: _In) -> "Future[_Out]":
        """One task, done before this returns where there is one thread."""
        if self._pool is not None:
            return self._submit(self._pool, work, item)
        done: Future[_Out] = Future()
        done.set_result(work(item))
        return done

    def _submit(
        self, pool: ThreadPoolExecutor, work: Callable[[_In], _Out], item: _In
    ) -> "Future[_Out]":
        future = pool.submit(work, item)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future


class _Pool(NamedTuple):
    threads: ThreadPoolExecutor
    one: threading.Thread


_pools: dict[int, _Pool] = {}


def _pool(threads: int) -> ThreadPoolExecutor:
    """Kept for good: what a thread needs for a block is 30 MB, and stays warm. In a process that
    was forked they are started anew."""
    held = _pools.get(threads)
    if held is None or not held.one.is_alive():
        pool = ThreadPoolExecutor(threads, thread_name_prefix="farcast-delta")
        held = _pools[threads] = _Pool(pool, pool.submit(threading.current_thread).result())
    return held.threads
