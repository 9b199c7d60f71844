"""Where the elements of a checkpoint tensor lie in an engine's memory, as arithmetic. Pure.

An engine fuses, splits and pads: rows of `q_proj` are rows of one `qkv_proj`, a rank holds some
columns of `o_proj`. Such a layout is affine: a block of the tensor, walked along its axes, is a
block of the engine's memory walked with other steps. A `Block` is one of them, and a tensor has
as many as it needs (none on a member that holds no part of it).

Example: `k_proj` of [64, 576] inside `qkv_proj` of [320, 576] from row 192 on is one run of
36,864 elements, `source` 0, `place` 110,592. The right half of the columns of a [4, 6] tensor is
`source` 3, sizes (4, 3), source steps (6, 1), place 0, place steps (3, 1).

Refuses walks in which two indices meet the same element (broadcasts, overlapping windows).
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from farcast.delta import Words
from farcast.replica.words import Positions

Mask: TypeAlias = npt.NDArray[np.bool_]


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Element `i0, i1, ...` of the block is element `source + sum(i * source_steps)` of the
    tensor in C order, and element `place + sum(i * place_steps)` of the memory `memory`.

    The axes are in falling order of `source_steps`, and neighbours that run on are one.
    """

    memory: int
    source: int
    place: int
    sizes: tuple[int, ...]
    source_steps: tuple[int, ...]
    place_steps: tuple[int, ...]

    @property
    def count(self) -> int:
        return int(np.prod(self.sizes, dtype=np.int64))

    @property
    def is_run(self) -> bool:
        """Elements next to each other in the tensor are so in memory too."""
        return len(self.sizes) <= 1 and (*self.source_steps, *self.place_steps) in ((), (1, 1))

    def is_all_of(self, count: int) -> bool:
        """This is the whole of a tensor of `count` elements, in its own order."""
        return self.source == 0 and self.count == count and self._walks_in_order()

    def _walks_in_order(self) -> bool:
        return not self.sizes or self.source_steps == (1,)

    @property
    def region(self) -> tuple[object, ...]:
        """Equal for blocks of the same elements of a tensor, wherever they lie."""
        return (self.source, self.sizes, self.source_steps)

    def find(self, positions: Positions | Words) -> tuple[slice | Mask, Positions]:
        """Which of the ascending `positions` of the tensor lie in this block, and where each of
        these is in memory."""
        reach = sum(
            (size - 1) * step for size, step in zip(self.sizes, self.source_steps, strict=True)
        )
        first, last = np.searchsorted(positions, (self.source, self.source + reach + 1))
        near = slice(int(first), int(last))
        rest = positions[near].astype(np.intp) - self.source
        if self.is_run:
            return near, rest + self.place
        places = np.full(rest.shape, self.place, dtype=np.intp)
        inside = np.ones(rest.shape, dtype=np.bool_)
        for size, source_step, place_step in self._axes():
            index = rest // source_step
            rest = rest - index * source_step
            inside &= index < size
            places += index * place_step
        inside &= rest == 0
        chosen = np.zeros(positions.shape, dtype=np.bool_)
        chosen[near] = inside
        return chosen, places[inside]

    def take(self, words: Words) -> Words:
        """The block's words out of all words of the tensor, in the block's order."""
        if self._walks_in_order():
            return words[self.source : self.source + self.count]
        width = words.itemsize
        strides = tuple(step * width for step in self.source_steps)
        view = np.lib.stride_tricks.as_strided(
            words[self.source :], self.sizes, strides, writeable=False
        )
        return np.ascontiguousarray(view).reshape(-1)

    def _axes(self) -> Iterator[tuple[int, int, int]]:
        return zip(self.sizes, self.source_steps, self.place_steps, strict=True)


def block_of(
    memory: int,
    sizes: Sequence[int],
    source: tuple[int, Sequence[int]],
    place: tuple[int, Sequence[int]],
) -> Block | None:
    """The block of two views of the same sizes, each an offset and its strides in elements;
    None if the walk meets an element twice."""
    axes = [
        (source_step, place_step, size)
        for size, source_step, place_step in zip(sizes, source[1], place[1], strict=True)
        if size != 1
    ]
    if any(size == 0 for _, _, size in axes):
        axes = [(1, 1, 0)]
    joined: list[tuple[int, int, int]] = []
    for step, other, size in sorted(axes, reverse=True):
        if joined:
            before, other_before, size_before = joined[-1]
            if before < step * size:
                return None
            if before == step * size and other_before == other * size:
                joined[-1] = (step, other, size * size_before)
                continue
        joined.append((step, other, size))
    if any(step < 1 or other < 1 for step, other, _ in joined):
        return None
    return Block(
        memory=memory,
        source=source[0],
        place=place[0],
        sizes=tuple(size for _, _, size in joined),
        source_steps=tuple(step for step, _, _ in joined),
        place_steps=tuple(other for _, other, _ in joined),
    )


def covered(blocks: Sequence[Block]) -> int:
    """Elements of a tensor in at least one block, if no two of them overlap without being equal."""
    return sum(block.count for block in {block.region: block for block in blocks}.values())
