"""The passes over a tensor's words where it lies, and BLAKE3's compression of many chunks. Pure.

Words are seen in tiles of 256: `tile_counts` counts the classes of each, `tile_ranks` and
`tile_select` look only at the tiles of changed words. `passes_of` says who does it: on a CUDA
device Triton's kernels (`farcast.delta.triton_kernels`) where Triton is installed, everywhere else
`TorchPasses`, functions of the same names and results. Refuses to bring a tensor to the host.
"""

import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from farcast.errors import FormatError

Tensor: TypeAlias = torch.Tensor

TILE = 256
GATHERED = 1 << 22
"""Words that plain torch gathers together from the tiles of changes."""
COUNTED = 1 << 22
"""Words that plain torch counts together; each costs some 40 bytes of temporaries."""

CHUNK = 1024
"""Bytes that BLAKE3 compresses one after the other."""
CHUNKS_AT_ONCE = 1 << 16

START, END, PARENT, ROOT = 1, 2, 4, 8
"""BLAKE3's flags of a block."""
_IV = (
    0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19,
)  # fmt: skip
_ORDER = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)


class Scheme(NamedTuple):
    """class = clamp(((word >> shift) & mask) - first, 0, top), the word being unsigned."""

    shift: int
    mask: int
    first: int
    top: int

    @classmethod
    def of(cls, words: Tensor, shift: int, mask: int, first: int, last: int) -> "Scheme":
        if words.dim() != 1 or not words.is_contiguous():
            raise FormatError("Words lie in one contiguous row; take them from words_on_device().")
        # Words are signed here, as torch computes little with unsigned ones: without the bits
        # that a shift fills with the sign, both kinds of shift agree.
        kept = (1 << (8 * words.element_size() - shift)) - 1
        return cls(shift, mask & kept, first, last - first)

    @property
    def classes(self) -> int:
        return self.top + 1


class Grid(NamedTuple):
    """How a piece of a tensor is cut: into blocks, and each block into tiles of its own."""

    words: int
    block_words: int

    @property
    def blocks(self) -> int:
        return -(-self.words // self.block_words)

    @property
    def tiles(self) -> int:
        return -(-min(self.words, self.block_words) // TILE)


def its_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton starts its kernels on the current device, which need not be the tensor's."""
    if not tensor.is_cuda:
        return nullcontext()
    context: AbstractContextManager[object] = torch.cuda.device(tensor.device)
    return context


@cache
def _triton(device: torch.device) -> ModuleType | None:
    """The Triton kernels, once one has run on the device."""
    try:
        from farcast.delta import triton_kernels
    except ImportError:
        return None
    try:
        triton_kernels.parent_values(torch.zeros((2, 8), dtype=torch.int32, device=device), 0)
    except triton_kernels.FAILURES as error:
        warnings.warn(
            f"Triton starts no kernel on {device} ({str(error)[:200]}); slower torch passes do the "
            "same. Triton needs a C compiler and a device it supports.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return triton_kernels


def passes_of(tensor: Tensor) -> Any:
    """Who does the passes over all words of a tensor: Triton's kernels, or `TorchPasses`."""
    return (_triton(tensor.device) if tensor.is_cuda else None) or TorchPasses


class TorchPasses:
    """The passes in plain torch."""

    @staticmethod
    def classes_of(words: Tensor, scheme: Scheme) -> Tensor:
        # int16 holds a byte's code less `first`, which the words of 8 bits do not.
        codes = ((words >> scheme.shift) & scheme.mask).to(torch.int16)
        return (codes - scheme.first).clamp_(0, scheme.top)

    @staticmethod
    def tile_counts(words: Tensor, grid: Grid, scheme: Scheme) -> Tensor:
        """int32 [blocks * classes, tiles]: how many words of each class each tile holds."""
        counts = torch.zeros(
            grid.blocks * scheme.classes * grid.tiles, dtype=torch.int32, device=words.device
        )
        for lo in range(0, words.numel(), COUNTED):
            part = words[lo : lo + COUNTED]
            at = torch.arange(lo, lo + part.numel(), device=words.device)
            block = at // grid.block_words
            tile = (at - block * grid.block_words) // TILE
            row = block * scheme.classes + TorchPasses.classes_of(part, scheme)
            one = torch.ones(1, dtype=torch.int32, device=words.device).expand(part.numel())
            counts.index_add_(0, row * grid.tiles + tile, one)
        return counts.view(-1, grid.tiles)

    @staticmethod
    def tile_ranks(
        words: Tensor, places: Tensor, starts: Tensor, scheme: Scheme
    ) -> tuple[Tensor, Tensor]:
        """Class of each place (uint8), and how many words of it stand before it from `starts`
        on (int32)."""
        own = TorchPasses.classes_of(words[places], scheme)
        ranks = torch.empty_like(places, dtype=torch.int32)
        lane = torch.arange(TILE, device=words.device)
        step = GATHERED // TILE
        for lo in range(0, places.numel(), step):
            part = slice(lo, lo + step)
            at = starts[part, None] + lane
            other = TorchPasses.classes_of(words[at.clamp(max=words.numel() - 1)], scheme)
            same = (other == own[part, None]) & (at < places[part, None])
            ranks[part] = same.sum(1, dtype=torch.int32)
        return own.to(torch.uint8), ranks

    @staticmethod
    def tile_select(
        words: Tensor, starts: Tensor, classes: Tensor, within: Tensor, scheme: Scheme
    ) -> Tensor:
        """Place of the word that has `within` words of its class before it from `starts` on."""
        places = torch.empty_like(starts)
        lane = torch.arange(TILE, device=words.device)
        step = GATHERED // TILE
        for lo in range(0, starts.numel(), step):
            part = slice(lo, lo + step)
            # Words repeated at the end come after the one that is asked for.
            at = (starts[part, None] + lane).clamp_(max=words.numel() - 1)
            same = TorchPasses.classes_of(words[at], scheme) == classes[part, None]
            passed = same.cumsum(1, dtype=torch.int16) <= within[part, None]
            places[part] = starts[part] + passed.sum(1)
        return places

    @staticmethod
    def chunk_values(words: Tensor, number: int, length: int, final: int) -> Tensor:
        """Chaining values [n, 8] of the chunks `words` [n, 256], of which `length` bytes count;
        `number` is the first one's, `final` the flags of their last block."""
        n = words.shape[0]
        value = _initial(words.device)[:, None].expand(8, n)
        counter = torch.arange(number, number + n, device=words.device).to(torch.int32)
        blocks = max(1, -(-length // 64))
        for block in range(blocks):
            flags = (START if block == 0 else 0) | (final if block == blocks - 1 else 0)
            size = min(64, length - 64 * block)
            message = words[:, 16 * block : 16 * block + 16].t()
            value = _compress(value, message, counter, size, flags)
        return value.t().contiguous()

    @staticmethod
    def parent_values(values: Tensor, flags: int) -> Tensor:
        """Chaining values of the parents of each two neighbours."""
        pairs = values.view(-1, 16)
        parents = torch.empty((len(pairs), 8), dtype=torch.int32, device=values.device)
        for lo in range(0, len(pairs), CHUNKS_AT_ONCE):
            message = pairs[lo : lo + CHUNKS_AT_ONCE].t()
            n = message.shape[1]
            value = _initial(values.device)[:, None].expand(8, n)
            counter = torch.zeros(n, dtype=torch.int32, device=values.device)
            parents[lo : lo + n] = _compress(value, message, counter, 64, flags).t()
        return parents


@cache
def _initial(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.from_numpy(np.array(_IV, np.uint32).view(np.int32)).to(device)


@cache
def _order(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(_ORDER, device=device)


def _turn(x: Tensor, n: int) -> Tensor:
    return ((x >> n) & ((1 << (32 - n)) - 1)) | (x << (32 - n))


def _mix(a: Tensor, b: Tensor, c: Tensor, d: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """BLAKE3's function G on four columns at once."""
    a = a + b + x
    d = _turn(d ^ a, 16)
    c = c + d
    b = _turn(b ^ c, 12)
    a = a + b + y
    d = _turn(d ^ a, 8)
    c = c + d
    return a, _turn(b ^ c, 7), c, d


def _compress(value: Tensor, message: Tensor, counter: Tensor, size: int, flags: int) -> Tensor:
    """value [8, n], message [16, n] and counter [n] to the next value [8, n]."""
    a, b = value[:4], value[4:]
    c = _initial(value.device)[:4, None].expand_as(a)
    rest = [torch.full_like(counter, number) for number in (0, size, flags)]
    d = torch.stack([counter, *rest])
    order = _order(value.device)
    for _ in range(7):
        a, b, c, d = _mix(a, b, c, d, message[0:8:2], message[1:8:2])
        b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)
        a, b, c, d = _mix(a, b, c, d, message[8:16:2], message[9:16:2])
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
        message = message.index_select(0, order)
    return torch.cat([a ^ c, b ^ d])
