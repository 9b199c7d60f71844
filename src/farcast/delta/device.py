"""Finding, locating and applying changes, and BLAKE3, where a torch tensor lies. Pure.

What crosses to the host is the changes and 32 bytes a digest, never the tensor. The results are
those of the host's kernels, bit for bit. Words are seen in tiles of 256: a pass over all words
counts the classes of each tile, and only the tiles of changed words are looked at again.

On a CUDA device the passes are Triton kernels (`farcast.delta.triton_kernels`) where Triton is
installed; everywhere else they are the torch functions of the same names below. Temporaries are
bounded by `PIECE_WORDS` and `PIECE_EVENTS`, not by the tensor; a digest takes a 32nd of it. All
work goes to the current stream.
"""

import warnings
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from farcast.delta.bits import MAX_TENSOR_BYTES
from farcast.errors import FormatError, LimitError

Tensor: TypeAlias = torch.Tensor

TILE = 256
PIECE_WORDS = 1 << 24
"""Words that are looked at together, in whole blocks: a device wants at least millions."""
PIECE_EVENTS = 1 << 20
"""Changes that are looked at together; each costs some 60 bytes of temporaries."""
GATHERED = 1 << 22
"""Words that plain torch gathers together from the tiles of changes."""
COUNTED = 1 << 22
"""Words that plain torch counts together; each costs some 40 bytes of temporaries."""

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
    with _current(old):
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
    with _current(words):
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
    with _current(data):
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
    with _current(old):
        for a, b in zip(old.split(PIECE_WORDS), new.split(PIECE_WORDS), strict=True):
            total += (a != b).sum()
        return int(to_host(total))


def _writing(words: Tensor) -> AbstractContextManager[object]:
    """A tensor made in inference mode is written in that mode, any other outside of it, whatever
    the caller's mode."""
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(words.is_inference()))
    stack.enter_context(_current(words))
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
        counts = _passes(old).tile_counts(old, grid, scheme)
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
        classes, ranks = _passes(old).tile_ranks(old, places, places - inside % TILE, scheme)
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
        counts = _passes(words).tile_counts(words, grid, scheme)
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
        return _passes(self._words).tile_select(self._words, start, classes, within, self._scheme)


def _totals(counts: Tensor) -> Tensor:
    return torch.cumsum(counts, dim=1, dtype=torch.int32)


def _blocks_at_once(block_words: int, scheme: Scheme) -> int:
    """Counts take a word's room for every 256 / classes words, so many classes mean less."""
    return max(1, PIECE_WORDS // block_words * 32 // max(32, scheme.classes))


def _current(tensor: Tensor) -> AbstractContextManager[object]:
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


def _passes(tensor: Tensor) -> Any:
    """Who does the passes over all words of a tensor: Triton's kernels, or the functions below."""
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
            flags = (_START if block == 0 else 0) | (final if block == blocks - 1 else 0)
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


# BLAKE3, unkeyed. Chunks of 1 KiB are compressed side by side, then level after level of the
# tree; the last value of a level that has no neighbour rises as it is.

CHUNK = 1024
CHUNKS_AT_ONCE = 1 << 16
_START, _END, _PARENT, _ROOT = 1, 2, 4, 8
_IV = (
    0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19,
)  # fmt: skip
_ORDER = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)


def digest_on_device(tensor: Tensor) -> str:
    """BLAKE3 of the tensor's raw bytes in C order, as 64 hex digits."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.view(torch.uint8)
    if data.numel() > MAX_TENSOR_BYTES:  # beyond, the number of a chunk has over 32 bits
        raise LimitError("A tensor is over the limit of 4 TiB.")
    with _current(data):
        values = _leaves(data)
        passes = _passes(data)
        while (n := len(values)) > 1:
            flags = _PARENT | (_ROOT if n == 2 else 0)
            parents = passes.parent_values(values[: n // 2 * 2], flags)
            values = torch.cat([parents, values[-1:]]) if n % 2 else parents
        return bytes(to_host(values).astype("<i4").data.cast("B")).hex()


def _leaves(data: Tensor) -> Tensor:
    """The chaining values of all chunks; of a single one, the digest."""
    size = data.numel()
    last = max(0, size - 1) // CHUNK
    passes = _passes(data)
    values = torch.empty((last + 1, 8), dtype=torch.int32, device=data.device)
    for lo in range(0, last, CHUNKS_AT_ONCE):
        hi = min(last, lo + CHUNKS_AT_ONCE)
        values[lo:hi] = passes.chunk_values(_chunks(data[lo * CHUNK : hi * CHUNK]), lo, CHUNK, _END)
    rest = torch.zeros(CHUNK, dtype=torch.uint8, device=data.device)
    length = size - last * CHUNK
    rest[:length] = data[last * CHUNK :]
    final = _END | (0 if last else _ROOT)
    values[last:] = passes.chunk_values(_chunks(rest), last, length, final)
    return values


def _chunks(data: Tensor) -> Tensor:
    """Whole chunks as 256 words each: a view, or a copy where a slice begins inside a word."""
    if data.storage_offset() % 4 or data.data_ptr() % 4:
        data = data.clone()
    return data.view(torch.int32).view(-1, CHUNK // 4)


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
