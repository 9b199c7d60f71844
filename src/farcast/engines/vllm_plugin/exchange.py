"""Words at scattered places of a memory: compared, exchanged, restored.

This runs while the engine stands still. On a CPU each place is a miss of the cache, so all that
is done with a word is done while it is near, in loops compiled by numba. Elsewhere torch does it
on the device.
"""

from typing import Any

import torch
from numba import njit

_NEAR = 2048
"""Words taken at a time: their lines of the cache, 128 KiB at most, are still near when they are
written and read back, and loops without a branch let the misses of the first one overlap."""


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _exchange(memory: Any, places: Any, old: Any, new: Any) -> int:
    for start in range(0, places.size, _NEAR):
        end = min(start + _NEAR, places.size)
        strange = 0
        for i in range(start, end):
            word = memory[places[i]]
            strange += (word != old[i]) & (word != new[i])
        if strange:
            return 1
        for i in range(start, end):
            memory[places[i]] = new[i]
        for i in range(start, end):
            strange += memory[places[i]] != new[i]
        if strange:
            return 2
    return 0


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _holds(memory: Any, places: Any, words: Any) -> bool:
    for i in range(places.size):  # noqa: SIM110 - numba compiles no generators
        if memory[places[i]] != words[i]:
            return False
    return True


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _put(memory: Any, places: Any, words: Any) -> None:
    for i in range(places.size):
        memory[places[i]] = words[i]


def exchange(
    memory: torch.Tensor, places: torch.Tensor, old: torch.Tensor, new: torch.Tensor
) -> int:
    """Put `new` where `old` is; a word that is new already may stay (a tied tensor has two names).

    Returns 0; 1 if some word was neither, when any of them may have been written; 2 if one read
    back is not the one written.
    """
    if memory.device.type == "cpu":
        return int(_exchange(memory.numpy(), places.numpy(), old.numpy(), new.numpy()))
    index = places.long()
    live = memory[index]
    if bool(((live != old) & (live != new)).any()):
        return 1
    memory[index] = new
    return 0 if torch.equal(memory[index], new) else 2


def holds(memory: torch.Tensor, places: torch.Tensor, words: torch.Tensor) -> bool:
    """Whether these words are there."""
    if memory.device.type == "cpu":
        return bool(_holds(memory.numpy(), places.numpy(), words.numpy()))
    return bool(torch.equal(memory[places.long()], words))


def put(memory: torch.Tensor, places: torch.Tensor, words: torch.Tensor) -> None:
    """Write, whatever is there."""
    if memory.device.type == "cpu":
        _put(memory.numpy(), places.numpy(), words.numpy())
    else:
        memory[places.long()] = words


def warm_up(memories: list[torch.Tensor]) -> None:
    """Compile for these memories, so that no pause waits for it."""
    for dtype in {memory.dtype for memory in memories if memory.device.type == "cpu"}:
        memory, words = torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=dtype)
        for index in (torch.int32, torch.int64):
            places = torch.zeros(1, dtype=index)
            exchange(memory, places, words, words)
            put(memory, places, words)
            holds(memory, places, words)
