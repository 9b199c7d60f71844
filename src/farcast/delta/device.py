"""Finding, locating and applying changes, and BLAKE3, where a torch tensor lies. Pure.

What crosses to the host is the changes and 32 bytes a digest, never the tensor. The results are
those of the host's kernels, bit for bit. `farcast.delta.passes` looks at every word; here the
tensor is cut into pieces for it, and what it finds is put together.

Temporaries are bounded by `PIECE_WORDS` and `PIECE_EVENTS`, not by the tensor; a digest takes a
32nd of it. All work goes to the current stream.
"""

from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from farcast.delta import passes
from farcast.delta.bits import MAX_TENSOR_BYTES
from farcast.delta.passes import CHUNK, END, PARENT, ROOT, TILE, Grid, Scheme, its_device
from farcast.errors import FormatError, LimitError

Tensor: TypeAlias = torch.Tensor

PIECE_WORDS = 1 << 24
"""Words that are looked at together, in whole blocks: a device wants at least millions."""
PIECE_EVENTS = 1 << 20
"""Changes that are looked at together; each costs some 60 bytes of temporaries."""
HOST_GROUP = 64
"""Words that the host's kernel looks at together: `farcast.delta.kernels.GROUP`."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class Found(NamedTuple):
    """The changed words of one block in ascending position. Of a `dense` block only the number
    is told, as `find_on_device` explains."""

    classes: npt.NDArray[np.uint8]
    ranks: npt.NDArray[np.uint32]
    deltas: npt.NDArray[np.uint64]
    changed: int
    dense: bool = False


def words_on_device(tensor: Tensor) -> Tensor:
    """The elements of a contiguous tensor as whole numbers of their size, one-dimensional: a view
    of the same memory. Half a complex128 and two packed fp4 codes are a word each."""
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise FormatError(
            "The words of a tensor that is not contiguous have no view; call contiguous() first."
        )
    if tensor.is_conj() or tensor.is_neg():
        raise FormatError(
            "A tensor's conjugation or negation is still pending; call resolve_conj() and "
            "resolve_neg() first."
        )
    return tensor.detach().reshape(-1).view(_WORDS[tensor.element_size()])


def find_on_device(
    old: Tensor, new: Tensor, *, shift: int, mask: int, first: int, last: int, block_words: int,
    dense_from: int | None = None,
) -> list[Found]:  # fmt: skip
    """The changes between two tensors of words on one device, one `Found` a block.

    With `dense_from` a block of which more than one word in so many changed is dense: its changes
    are counted and stay where they are. As on the host, whose kernel gives up between two groups
    of words, a block whose last group tips the scales is not.
    """
    if (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
        raise FormatError("Two versions of a tensor differ in size, dtype or device.")
    scheme = Scheme.of(old, shift, mask, first, last)
    step = _blocks_at_once(block_words, scheme) * block_words
    found: list[Found] = []
    with its_device(old):
        for lo in range(0, old.numel(), step):
            grid = Grid(old[lo : lo + step].numel(), block_words)
            found += _find(old[lo : lo + step], new[lo : lo + step], grid, scheme, dense_from)
    return found


def locate_on_device(
    words: Tensor, *, lo: int, hi: int, shift: int, mask: int, first: int, last: int,
    bounds: npt.NDArray[np.int64], ranks: npt.NDArray[np.uint32],
) -> Tensor | None:  # fmt: skip
    """Positions, in `words`, of the changes of the block `words[lo:hi]`; writes nothing.

    `ranks[bounds[k]:bounds[k + 1]]` are those of class k. None where a class has fewer words than
    a rank asks for: the words are another base.
    """
    places = locate_blocks_on_device(
        words[lo:hi], block_words=max(1, hi - lo), shift=shift, mask=mask, first=first, last=last,
        bounds=bounds[None], ranks=ranks,
    )  # fmt: skip
    return None if places is None else places + lo


def locate_blocks_on_device(
    words: Tensor, *, block_words: int, shift: int, mask: int, first: int, last: int,
    bounds: npt.NDArray[np.int64], ranks: npt.NDArray[np.uint32],
) -> Tensor | None:  # fmt: skip
    """`locate_on_device` for all blocks of a tensor: far fewer calls to the device than one by
    one. `bounds[b]` are the 257 bounds of block b and begin where those of the block before end."""
    scheme = Scheme.of(words, shift, mask, first, last)
    numbers = np.diff(bounds, axis=1)
    if numbers[:, scheme.classes :].any():
        return None
    step = _blocks_at_once(block_words, scheme)
    places = [torch.empty(0, dtype=torch.int64, device=words.device)]
    with its_device(words):
        for block in range(0, len(bounds), step):
            some = slice(block, block + step)
            lo = block * block_words
            piece = words[lo : lo + step * block_words]
            grid = Grid(piece.numel(), block_words)
            own = ranks[bounds[block, 0] : bounds[some][-1, -1]]
            ends = np.cumsum(numbers[some, : scheme.classes])
            found = _locate(piece, grid, scheme, ends, own)
            if found is None:
                return None
            places += [part + lo for part in found]
        return torch.cat(places)


def steps_on_device(deltas: npt.NDArray[np.uint64], words: Tensor) -> Tensor:
    """Differences where `words` lie and as wide as they are, for `add_on_device`."""
    width = words.element_size()
    signed = "u1" if width == 1 else f"i{width}"
    return to_device(deltas.astype(f"<u{width}").view(f"<{signed}"), words.device)


def add_on_device(words: Tensor, places: Tensor, steps: Tensor, *, back: bool = False) -> None:
    """`words[places] += steps` modulo the width, in place; `-=` on the way `back`. The places are
    distinct."""
    with _writing(words):
        words[places] = words[places] - steps if back else words[places] + steps


def put_on_device(words: Tensor, places: Tensor | tuple[Tensor, ...], new: Tensor) -> None:
    """`words[places] = new`, in place. The places are distinct."""
    with _writing(words):
        words[places] = new


def write_on_device(part: Tensor, new: Tensor) -> None:
    """`part[:] = new`, in place."""
    with _writing(part):
        part.copy_(new)


def codes_on_device(data: Tensor) -> Tensor:
    """The 4-bit codes of bytes, each in a byte of its own, low half first."""
    with its_device(data):
        return torch.stack([data & 15, data >> 4], dim=1).view(-1)


def add_codes_on_device(data: Tensor, places: Tensor, steps: Tensor, *, back: bool = False) -> None:
    """`add_on_device` for codes, two in each byte of `data`; `steps` are bytes."""
    with _writing(data):
        for half in (0, 1):  # two codes of one byte must not be written at once
            own = (places & 1) == half
            at, step = places[own] >> 1, steps[own]
            code = data[at] >> (4 * half)
            code = (code - step if back else code + step) & 15
            data[at] = (data[at] & (0xF0 >> (4 * half))) | (code << (4 * half))


def to_host(tensor: Tensor) -> npt.NDArray[Any]:
    """A copy in host memory, awaited. Everything that leaves a device leaves it here."""
    return np.array(tensor.cpu().numpy())


def to_device(array: npt.NDArray[Any], device: Any) -> Tensor:
    """A copy on the device, which may be written into. Everything that comes to one comes here."""
    return torch.from_numpy(array.copy()).to(device)


def count_on_device(old: Tensor, new: Tensor) -> int:
    """Words that differ."""
    total = torch.zeros((), dtype=torch.int64, device=old.device)
    with its_device(old):
        for a, b in zip(old.split(PIECE_WORDS), new.split(PIECE_WORDS), strict=True):
            total += (a != b).sum()
        return int(to_host(total))


def _writing(words: Tensor) -> AbstractContextManager[object]:
    """A tensor made in inference mode is written in that mode, any other outside of it, whatever
    the caller's mode."""
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(words.is_inference()))
    stack.enter_context(its_device(words))
    return stack


def _find(
    old: Tensor, new: Tensor, grid: Grid, scheme: Scheme, dense_from: int | None
) -> list[Found]:
    places = torch.nonzero(old != new).view(-1)
    numbers = _numbers(places, grid)
    dense = _dense(places, numbers, grid, dense_from)
    if any(dense):
        kept = to_device(np.repeat(~np.array(dense), numbers), old.device)
        places = places[kept]
    before = None
    if places.numel() and scheme.top:
        counts = passes.passes_of(old).tile_counts(old, grid, scheme)
        before = (_totals(counts) - counts).view(-1)
    parts = [_describe(old, new, at, grid, scheme, before) for at in places.split(PIECE_EVENTS)]
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    found, end = [], 0
    for number, is_dense in zip(numbers, dense, strict=True):
        start, end = end, end + (0 if is_dense else number)
        classes, ranks, deltas = (column[start:end] for column in columns)
        found.append(Found(classes, ranks, deltas, number, is_dense))
    return found


def _numbers(places: Tensor, grid: Grid) -> list[int]:
    """How many of the ascending `places` lie in each block."""
    borders = torch.arange(grid.blocks + 1, device=places.device) * grid.block_words
    return np.diff(to_host(torch.searchsorted(places, borders))).tolist()  # type: ignore[no-any-return]


def _dense(places: Tensor, numbers: list[int], grid: Grid, dense_from: int | None) -> list[bool]:
    """Which blocks are dense."""
    if dense_from is None:
        return [False] * grid.blocks
    starts = np.arange(grid.blocks) * grid.block_words
    sizes = np.minimum(grid.words - starts, grid.block_words)
    many = np.array(numbers) > sizes // dense_from
    if not many.any():
        return [False] * grid.blocks
    # Changes that the host's kernel has seen when it looks the last time.
    last = starts + np.maximum(sizes // HOST_GROUP * HOST_GROUP - HOST_GROUP, 0)
    seen = to_host(torch.searchsorted(places, to_device(last, places.device)))
    before = np.cumsum([0, *numbers[:-1]])
    return (many & (seen - before > sizes // dense_from)).tolist()  # type: ignore[no-any-return]


def _describe(
    old: Tensor, new: Tensor, places: Tensor, grid: Grid, scheme: Scheme, before: Tensor | None
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
    """Class, rank and difference of the words at `places`, on the host. `before` counts, for each
    block, class and tile, the words of the class in the block's earlier tiles."""
    block = places // grid.block_words
    inside = places - block * grid.block_words
    if before is None:
        classes, ranks = torch.zeros_like(places, dtype=torch.uint8), inside.to(torch.int32)
    else:
        classes, ranks = passes.passes_of(old).tile_ranks(
            old, places, places - inside % TILE, scheme
        )
        ranks = ranks + before[(block * scheme.classes + classes) * grid.tiles + inside // TILE]
    change = to_host(new[places] - old[places])
    return (
        to_host(classes),
        to_host(ranks).view(np.uint32),
        change.view(f"u{change.itemsize}").astype(np.uint64),
    )


def _locate(
    words: Tensor, grid: Grid, scheme: Scheme, ends: npt.NDArray[np.int64],
    ranks: npt.NDArray[np.uint32],
) -> list[Tensor] | None:  # fmt: skip
    """`ends[block * classes + class]` is where the changes of a class in a block end in `ranks`."""
    if not ranks.size:
        return []
    device = words.device
    group_ends = torch.from_numpy(ends).to(device)
    finder = _Finder(words, grid, scheme) if scheme.top else None
    places = []
    for lo in range(0, ranks.size, PIECE_EVENTS):
        part = ranks[lo : lo + PIECE_EVENTS].astype(np.uint32).view(np.int32)
        rank = torch.from_numpy(part).to(device).to(torch.int64) & 0xFFFFFFFF
        event = torch.arange(lo, lo + part.size, device=device)
        group = torch.searchsorted(group_ends, event, right=True)
        if finder is None:
            place = group * grid.block_words + rank
            end = ((group + 1) * grid.block_words).clamp(max=grid.words)
            found = place if bool((place < end).all()) else None
        else:
            found = finder.places(group, rank)
        if found is None:
            return None
        places.append(found)
    return places


class _Finder:
    """Where the word of a given class and rank stands, by the counts of each tile."""

    def __init__(self, words: Tensor, grid: Grid, scheme: Scheme) -> None:
        self._words, self._grid, self._scheme = words, grid, scheme
        counts = passes.passes_of(words).tile_counts(words, grid, scheme)
        totals = _totals(counts)
        self._before = (totals - counts).view(-1)
        self._all = totals[:, -1]
        # One ascending series for all groups, so that one search serves them all.
        self._step = grid.block_words + 1
        groups = torch.arange(len(totals), device=words.device)
        self._series = (totals + groups[:, None] * self._step).view(-1)

    def places(self, group: Tensor, rank: Tensor) -> Tensor | None:
        """`group` is block * classes + class. None where a rank is too large."""
        if bool((rank >= self._all[group]).any()):
            return None
        index = torch.searchsorted(self._series, group * self._step + rank, right=True)
        tile = index - group * self._grid.tiles
        start = group // self._scheme.classes * self._grid.block_words + tile * TILE
        classes = (group % self._scheme.classes).to(torch.uint8)
        within = (rank - self._before[index]).to(torch.int32)
        return passes.passes_of(self._words).tile_select(
            self._words, start, classes, within, self._scheme
        )


def _totals(counts: Tensor) -> Tensor:
    return torch.cumsum(counts, dim=1, dtype=torch.int32)


def _blocks_at_once(block_words: int, scheme: Scheme) -> int:
    """Counts take a word's room for every 256 / classes words, so many classes mean less."""
    return max(1, PIECE_WORDS // block_words * 32 // max(32, scheme.classes))


# BLAKE3, unkeyed. Chunks of 1 KiB are compressed side by side, then level after level of the
# tree; the last value of a level that has no neighbour rises as it is.


def digest_on_device(tensor: Tensor) -> str:
    """BLAKE3 of the tensor's raw bytes in C order, as 64 hex digits."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.view(torch.uint8)
    if data.numel() > MAX_TENSOR_BYTES:  # beyond, the number of a chunk has over 32 bits
        raise LimitError("A tensor is over the limit of 4 TiB.")
    with its_device(data):
        values = _leaves(data)
        kernels = passes.passes_of(data)
        while (n := len(values)) > 1:
            flags = PARENT | (ROOT if n == 2 else 0)
            parents = kernels.parent_values(values[: n // 2 * 2], flags)
            values = torch.cat([parents, values[-1:]]) if n % 2 else parents
        return bytes(to_host(values).astype("<i4").data.cast("B")).hex()


def _leaves(data: Tensor) -> Tensor:
    """The chaining values of all chunks; of a single one, the digest."""
    size = data.numel()
    last = max(0, size - 1) // CHUNK
    kernels = passes.passes_of(data)
    values = torch.empty((last + 1, 8), dtype=torch.int32, device=data.device)
    for lo in range(0, last, passes.CHUNKS_AT_ONCE):
        hi = min(last, lo + passes.CHUNKS_AT_ONCE)
        values[lo:hi] = kernels.chunk_values(_chunks(data[lo * CHUNK : hi * CHUNK]), lo, CHUNK, END)
    rest = torch.zeros(CHUNK, dtype=torch.uint8, device=data.device)
    length = size - last * CHUNK
    rest[:length] = data[last * CHUNK :]
    final = END | (0 if last else ROOT)
    values[last:] = kernels.chunk_values(_chunks(rest), last, length, final)
    return values


def _chunks(data: Tensor) -> Tensor:
    """Whole chunks as 256 words each: a view, or a copy where a slice begins inside a word."""
    if data.storage_offset() % 4 or data.data_ptr() % 4:
        data = data.clone()
    return data.view(torch.int32).view(-1, CHUNK // 4)
