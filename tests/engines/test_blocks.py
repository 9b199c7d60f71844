"""The arithmetic of layouts: for any two walks over the same elements, what a copy would do is
what `find` and `take` say."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farcast.engines.blocks import Block, block_of, covered


@st.composite
def copies(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A tensor and a memory, and views of both that a loader could copy between."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    source = torch.arange(int(np.prod(shape))).reshape(shape)
    view = source
    for axis, size in enumerate(shape):
        length = draw(st.integers(1, size))
        view = view.narrow(axis, draw(st.integers(0, size - length)), length)
    order = draw(st.permutations(range(view.ndim)))
    view = view.permute(order)
    padded = [size + draw(st.integers(0, 2)) for size in view.shape]
    memory = torch.full((int(np.prod(padded)) + 3,), -1)
    target = memory[draw(st.integers(0, 3)) :][: int(np.prod(padded))].reshape(padded)
    for axis, size in enumerate(view.shape):
        offset = draw(st.integers(0, padded[axis] - size))
        target = target.narrow(axis, offset, size)
    return source, view, memory, target


def made(view: torch.Tensor, target: torch.Tensor) -> Block:
    block = block_of(
        0,
        tuple(view.shape),
        (view.storage_offset(), view.stride()),
        (target.storage_offset(), target.stride()),
    )
    assert block is not None
    return block


@settings(deadline=None)
@given(copies())
def test_find_says_where_a_copy_puts_each_element(case: tuple[torch.Tensor, ...]) -> None:
    source, view, memory, target = case
    block = made(view, target)
    target.copy_(view)
    positions = np.arange(source.numel())
    chosen, places = block.find(positions)
    found = dict(zip(positions[chosen].tolist(), places.tolist(), strict=True))
    expected = {int(value): place for place, value in enumerate(memory.tolist()) if value >= 0}
    assert found == expected
    assert block.count == covered([block, block]) == view.numel()


@settings(deadline=None)
@given(copies(), st.data())
def test_find_takes_any_ascending_positions(
    case: tuple[torch.Tensor, ...], data: st.DataObject
) -> None:
    source, view, _, target = case
    block = made(view, target)
    some = data.draw(st.lists(st.integers(0, source.numel() - 1), unique=True).map(sorted))
    positions = np.array(some, dtype=np.uint32)
    chosen, places = block.find(positions)
    everything, all_places = block.find(np.arange(source.numel()))
    where = dict(zip(np.arange(source.numel())[everything].tolist(), all_places, strict=True))
    assert positions[chosen].tolist() == [p for p in some if p in where]
    assert places.tolist() == [where[p] for p in some if p in where]


@settings(deadline=None)
@given(copies())
def test_take_gives_the_words_in_the_order_of_a_walk_through_memory(
    case: tuple[torch.Tensor, ...],
) -> None:
    """A member hashes its memory walked by the block's axes; so does the sidecar the tensor."""
    source, view, memory, target = case
    block = made(view, target)
    target.copy_(view)
    words = source.reshape(-1).numpy().astype(np.uint64)
    walked = memory.as_strided(block.sizes, block.place_steps, block.place)
    assert block.take(words).tolist() == walked.reshape(-1).tolist()


def test_a_broadcast_is_no_block() -> None:
    source, target = torch.zeros(1).expand(4), torch.zeros(4)
    sides = [(t.storage_offset(), t.stride()) for t in (source, target)]
    assert block_of(0, (4,), *sides) is None


def test_overlapping_windows_are_no_block() -> None:
    source, target = torch.zeros(6).unfold(0, 3, 1), torch.zeros(4, 3)
    sides = [(t.storage_offset(), t.stride()) for t in (source, target)]
    assert block_of(0, (4, 3), *sides) is None


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (0, 3)])
def test_small_shapes(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape)
    block = made(tensor, torch.zeros(shape))
    assert block.count == tensor.numel()
    assert block.is_all_of(tensor.numel())
