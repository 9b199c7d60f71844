"""Several objects at a time, in order, with a bound on how many are in memory."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_In = TypeVar("_In")
_Out = TypeVar("_Out")


def in_parallel(
    function: Callable[[_In], _Out], items: Iterable[_In], *, workers: int
) -> Iterator[_Out]:
    """Results in the order of `items`, of which at most `workers` are in flight.

    Items are drawn in the calling thread as places free up, so that making the next one
    overlaps with the transfer of those before. The first error ends it, after what was already
    running has ended.
    """
    if workers <= 1:
        yield from map(function, items)
        return
    pending: deque[Future[_Out]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="farcast-transfer") as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) >= workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
