"""The passes of `farcast.delta.passes` as Triton kernels. Pure.

Each function has a twin of the same name and result in `farcast.delta.passes`, in plain torch;
what a caller may assume stands there. Offsets within one call fit 31 bits: the caller cuts
tensors into pieces.
"""

# mypy: ignore-errors
# What Triton compiles is typed by Triton.

from subprocess import SubprocessError
from typing import Any

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from farcast.delta.passes import TILE, Grid, Scheme

FAILURES = (TritonError, RuntimeError, OSError, SubprocessError)
"""What Triton raises where it cannot build or start a kernel: with no C compiler, say."""

TILES_AT_ONCE = 8
EVENTS_AT_ONCE = 16
LANES = 128


@triton.jit
def _class(word, shift, mask, first, top):
    # The mask holds no bit that the shift of a negative word fills.
    code = ((word >> shift) & mask).to(tl.int32) - first
    return tl.minimum(tl.maximum(code, 0), top)


# No number is compiled into a kernel by its value: tables and sizes differ from tensor to tensor,
# and a compilation takes seconds.
@triton.jit(do_not_specialize=["n", "tiles", "total", "shift", "mask", "first", "top"])
def count_kernel(
    words, counts, n, block_words, tiles, total, shift, mask, first, top,
    SIZE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    block = tile // tiles
    inside = tile % tiles
    start = block * block_words + inside * SIZE
    end = tl.minimum(tl.minimum(start + SIZE, (block + 1) * block_words), n)
    real = tile < total
    at = start[:, None] + tl.arange(0, SIZE)[None, :]
    live = (at < end[:, None]) & real[:, None]
    classes = _class(tl.load(words + at, mask=live, other=0), shift, mask, first, top)
    classes = tl.where(live, classes, -1)
    row = counts + block * (top + 1) * tiles + inside
    for k in range(top + 1):
        tl.store(row + k * tiles, tl.sum((classes == k).to(tl.int32), axis=1), mask=real)


@triton.jit(do_not_specialize=["n", "shift", "mask", "first", "top"])
def rank_kernel(
    words, places, starts, classes, ranks, n, shift, mask, first, top,
    SIZE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    event = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    live = event < n
    place = tl.load(places + event, mask=live, other=0)
    start = tl.load(starts + event, mask=live, other=0)
    own = _class(tl.load(words + place, mask=live, other=0), shift, mask, first, top)
    at = start[:, None] + tl.arange(0, SIZE)[None, :]
    before = (at < place[:, None]) & live[:, None]
    other = _class(tl.load(words + at, mask=before, other=0), shift, mask, first, top)
    same = before & (other == own[:, None])
    tl.store(classes + event, own.to(tl.uint8), mask=live)
    tl.store(ranks + event, tl.sum(same.to(tl.int32), axis=1), mask=live)


@triton.jit(do_not_specialize=["n", "size", "shift", "mask", "first", "top"])
def select_kernel(
    words, starts, classes, within, places, n, size, shift, mask, first, top,
    SIZE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    event = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    live = event < n
    start = tl.load(starts + event, mask=live, other=0)
    own = tl.load(classes + event, mask=live, other=0).to(tl.int32)
    rank = tl.load(within + event, mask=live, other=0).to(tl.int32)
    lane = tl.arange(0, SIZE)
    at = start[:, None] + lane[None, :]
    valid = (at < size) & live[:, None]
    found = _class(tl.load(words + at, mask=valid, other=0), shift, mask, first, top)
    same = valid & (found == own[:, None])
    hit = same & (tl.cumsum(same.to(tl.int32), axis=1) == rank[:, None] + 1)
    offset = tl.sum(tl.where(hit, lane[None, :], 0), axis=1)
    tl.store(places + event, start + offset, mask=live)


@triton.jit
def _turn(x, n: tl.constexpr):
    return (x >> n) | (x << (32 - n))


@triton.jit
def _mix(a, b, c, d, x, y):
    a = a + b + x
    d = _turn(d ^ a, 16)
    c = c + d
    b = _turn(b ^ c, 12)
    a = a + b + y
    d = _turn(d ^ a, 8)
    c = c + d
    b = _turn(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _initial(like):
    zero = tl.zeros_like(like)
    return (
        zero + tl.full([], 0x6A09E667, tl.uint32),
        zero + tl.full([], 0xBB67AE85, tl.uint32),
        zero + tl.full([], 0x3C6EF372, tl.uint32),
        zero + tl.full([], 0xA54FF53A, tl.uint32),
        zero + tl.full([], 0x510E527F, tl.uint32),
        zero + tl.full([], 0x9B05688C, tl.uint32),
        zero + tl.full([], 0x1F83D9AB, tl.uint32),
        zero + tl.full([], 0x5BE0CD19, tl.uint32),
    )


@triton.jit
def _compress(
    h0, h1, h2, h3, h4, h5, h6, h7,
    m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15,
    counter, size, flags,
):  # fmt: skip
    v0, v1, v2, v3, v4, v5, v6, v7 = h0, h1, h2, h3, h4, h5, h6, h7
    v8, v9, v10, v11, _, _, _, _ = _initial(h0)
    v12, v13, v14, v15 = counter, tl.zeros_like(counter), size, flags
    # Not static_range: unrolled this early, the compiler takes ten times as long.
    for _round in range(7):
        v0, v4, v8, v12 = _mix(v0, v4, v8, v12, m0, m1)
        v1, v5, v9, v13 = _mix(v1, v5, v9, v13, m2, m3)
        v2, v6, v10, v14 = _mix(v2, v6, v10, v14, m4, m5)
        v3, v7, v11, v15 = _mix(v3, v7, v11, v15, m6, m7)
        v0, v5, v10, v15 = _mix(v0, v5, v10, v15, m8, m9)
        v1, v6, v11, v12 = _mix(v1, v6, v11, v12, m10, m11)
        v2, v7, v8, v13 = _mix(v2, v7, v8, v13, m12, m13)
        v3, v4, v9, v14 = _mix(v3, v4, v9, v14, m14, m15)
        m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15 = (
            m2, m6, m3, m10, m7, m0, m4, m13, m1, m11, m12, m5, m9, m14, m15, m8,
        )  # fmt: skip
    return v0 ^ v8, v1 ^ v9, v2 ^ v10, v3 ^ v11, v4 ^ v12, v5 ^ v13, v6 ^ v14, v7 ^ v15


@triton.jit
def _word(pointer, i: tl.constexpr, live):
    return tl.load(pointer + i, mask=live, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _message(p, live):
    return (
        _word(p, 0, live), _word(p, 1, live), _word(p, 2, live), _word(p, 3, live),
        _word(p, 4, live), _word(p, 5, live), _word(p, 6, live), _word(p, 7, live),
        _word(p, 8, live), _word(p, 9, live), _word(p, 10, live), _word(p, 11, live),
        _word(p, 12, live), _word(p, 13, live), _word(p, 14, live), _word(p, 15, live),
    )  # fmt: skip


@triton.jit
def _put(pointer, i: tl.constexpr, value, live):
    tl.store(pointer + i, value.to(tl.int32, bitcast=True), mask=live)


@triton.jit
def _put_value(p, h0, h1, h2, h3, h4, h5, h6, h7, live):
    _put(p, 0, h0, live)
    _put(p, 1, h1, live)
    _put(p, 2, h2, live)
    _put(p, 3, h3, live)
    _put(p, 4, h4, live)
    _put(p, 5, h5, live)
    _put(p, 6, h6, live)
    _put(p, 7, h7, live)


@triton.jit(do_not_specialize=["n", "number", "length", "blocks", "final"])
def chunk_kernel(words, values, n, number, length, blocks, final, LANE: tl.constexpr):
    lane = tl.program_id(0) * LANE + tl.arange(0, LANE)
    live = lane < n
    counter = (number + lane).to(tl.uint32)
    h0, h1, h2, h3, h4, h5, h6, h7 = _initial(counter)
    for block in range(blocks):
        m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15 = _message(
            words + lane * 256 + block * 16, live
        )
        size = tl.zeros_like(counter) + tl.minimum(length - block * 64, 64).to(tl.uint32)
        flags = tl.where(block == 0, 1, 0) | tl.where(block == blocks - 1, final, 0)
        h0, h1, h2, h3, h4, h5, h6, h7 = _compress(
            h0, h1, h2, h3, h4, h5, h6, h7,
            m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15,
            counter, size, tl.zeros_like(counter) + flags.to(tl.uint32),
        )  # fmt: skip
    _put_value(values + lane * 8, h0, h1, h2, h3, h4, h5, h6, h7, live)


@triton.jit(do_not_specialize=["n", "flags"])
def parent_kernel(values, parents, n, flags, LANE: tl.constexpr):
    lane = tl.program_id(0) * LANE + tl.arange(0, LANE)
    live = lane < n
    m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15 = _message(
        values + lane * 16, live
    )
    zero = tl.zeros_like(m0)
    h0, h1, h2, h3, h4, h5, h6, h7 = _initial(zero)
    h0, h1, h2, h3, h4, h5, h6, h7 = _compress(
        h0, h1, h2, h3, h4, h5, h6, h7,
        m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15,
        zero, zero + tl.full([], 64, tl.uint32), zero + flags.to(tl.uint32),
    )  # fmt: skip
    _put_value(parents + lane * 8, h0, h1, h2, h3, h4, h5, h6, h7, live)


def tile_counts(words: Any, grid: Grid, scheme: Scheme) -> Any:
    total = grid.blocks * grid.tiles
    shape = (grid.blocks * scheme.classes, grid.tiles)
    counts = torch.empty(shape, dtype=torch.int32, device=words.device)
    count_kernel[(triton.cdiv(total, TILES_AT_ONCE),)](
        words, counts, grid.words, grid.block_words, grid.tiles, total, *scheme,
        SIZE=TILE, GROUP=TILES_AT_ONCE,
    )  # fmt: skip
    return counts


def tile_ranks(words: Any, places: Any, starts: Any, scheme: Scheme) -> tuple[Any, Any]:
    classes = torch.empty_like(places, dtype=torch.uint8)
    ranks = torch.empty_like(places, dtype=torch.int32)
    rank_kernel[(triton.cdiv(places.numel(), EVENTS_AT_ONCE),)](
        words, places, starts, classes, ranks, places.numel(), *scheme,
        SIZE=TILE, GROUP=EVENTS_AT_ONCE,
    )  # fmt: skip
    return classes, ranks


def tile_select(words: Any, starts: Any, classes: Any, within: Any, scheme: Scheme) -> Any:
    places = torch.empty_like(starts)
    select_kernel[(triton.cdiv(starts.numel(), EVENTS_AT_ONCE),)](
        words, starts, classes, within, places, starts.numel(), words.numel(), *scheme,
        SIZE=TILE, GROUP=EVENTS_AT_ONCE,
    )  # fmt: skip
    return places


def chunk_values(words: Any, number: int, length: int, final: int) -> Any:
    n = words.shape[0]
    values = torch.empty((n, 8), dtype=torch.int32, device=words.device)
    blocks = max(1, -(-length // 64))
    chunk_kernel[(triton.cdiv(n, LANES),)](
        words, values, n, number, length, blocks, final, LANE=LANES
    )
    return values


def parent_values(values: Any, flags: int) -> Any:
    n = values.shape[0] // 2
    parents = torch.empty((n, 8), dtype=torch.int32, device=values.device)
    parent_kernel[(triton.cdiv(n, LANES),)](values, parents, n, flags, LANE=LANES)
    return parents
