"""Tensors whose bits lie on a device: surveyed, changed and hashed there. Pure.

`DeviceBits` stands where `TensorBits` stands for tensors in host memory. What crosses to the host
is each change's class, rank and difference, 32 bytes a digest, and single blocks: of dense ones
both sides, of whole ones the new side. What comes from it is each change's rank and difference,
and blocks that are not sparse. `farcast.delta.device` holds what is done there, and the two doors.

The bytes that are written are those of the host's path, bit for bit. Refuses to bring a tensor
over by accident: nothing here has a way to.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from farcast.delta import device
from farcast.delta.applying import WRONG_COUNT, Blob
from farcast.delta.bits import AnyBits, Bytes, Words, nbytes_of, torch_kind, word_bytes
from farcast.delta.blocks import (
    ANOTHER_BASE,
    DENSE,
    PLANES,
    RAW,
    SAME,
    Changes,
    Layout,
    Places,
    Survey,
    arranged,
    dense_from,
    dense_survey,
    read_dense,
    read_events,
    read_whole,
)
from farcast.delta.conditioned import Classes
from farcast.errors import FormatError, IntegrityError

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class DeviceBits(AnyBits):
    """One tensor as bits on a device. `data` is a row of bytes there."""

    dtype: str
    shape: tuple[int, ...]
    data: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "DeviceBits":
        """A view of the tensor's memory; of one that is not contiguous, a copy on its device.

        What was queued before on the caller's stream has ended when this returns, so that any
        other stream may read.
        """
        dtype, shape = torch_kind(tensor)
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        bits = cls(dtype, shape, flat.view(torch.uint8))
        bits.settle()
        return bits

    def part(self, span: slice) -> Bytes:
        return device.to_host(self.data[span])

    def sample(self, step: int) -> Words:
        some = device.to_host(self.words[::step].contiguous())
        return some.view(f"<u{some.itemsize}")

    def digest(self, *, threads: int = 1) -> str:  # noqa: ARG002 - the device has its own
        return device.digest_on_device(self.data)

    def copied(self, spare: AnyBits | None = None) -> "DeviceBits":
        fits = spare is not None and self.lies_with(spare) and spare.nbytes == self.nbytes
        data = spare.data if spare is not None and fits else torch.empty_like(self.data)
        device.write_on_device(data, self.data)
        copy = DeviceBits(self.dtype, self.shape, data)
        copy.settle()
        return copy

    def place(self, bits: AnyBits) -> "DeviceBits":
        if isinstance(bits, DeviceBits) and self.lies_with(bits):
            return bits
        if isinstance(bits, DeviceBits):
            moved = DeviceBits(bits.dtype, bits.shape, bits.data.to(self.data.device))
        else:
            moved = self.room(bits.dtype, bits.shape)
            for lo in range(0, bits.nbytes, _CARRIED):
                part = bits.part(slice(lo, lo + _CARRIED))
                moved.data[lo : lo + _CARRIED] = device.to_device(part, self.data.device)
        moved.settle()
        return moved

    def lies_with(self, other: AnyBits) -> bool:
        return isinstance(other, DeviceBits) and other.data.device == self.data.device

    def room(self, dtype: str, shape: tuple[int, ...]) -> "DeviceBits":
        """Memory of this device for a tensor."""
        data = torch.empty(nbytes_of(dtype, shape), dtype=torch.uint8, device=self.data.device)
        return DeviceBits(dtype, shape, data)

    @property
    def words(self) -> torch.Tensor:
        """The bits as words, a view, signed as torch has them."""
        return self.data.view(_WORDS[word_bytes(self.dtype)])

    def settle(self) -> None:
        """Wait for what the current stream has queued."""
        if self.data.is_cuda:
            torch.cuda.current_stream(self.data.device).synchronize()


_CARRIED = 1 << 24
"""Bytes of a tensor that are brought to a device at a time."""


def together(
    base: Mapping[str, AnyBits], target: Mapping[str, AnyBits]
) -> tuple[dict[str, AnyBits], dict[str, AnyBits]]:
    """Both sides of each tensor on one device, where either lies on one."""
    before, after = dict(base), dict(target)
    for name, new in target.items():
        old = before.get(name)
        if old is None or (old.dtype, old.shape) != (new.dtype, new.shape):
            continue
        if isinstance(new, DeviceBits):
            before[name] = new.place(old)
        elif isinstance(old, DeviceBits):
            after[name] = old.place(new)
    return before, after


# --- writing -------------------------------------------------------------------------------------


def surveys(
    old: AnyBits, new: AnyBits, layout: Layout, classes: Classes, blocks: range
) -> list[Survey]:
    """`farcast.delta.blocks.survey` for consecutive blocks."""
    before, after = _here(old), _here(new)
    span = slice(layout.span(blocks[0]).start, layout.span(blocks[-1]).stop)
    found = device.find_on_device(
        _row(before.data[span], layout.bits), _row(after.data[span], layout.bits),
        **_scheme(classes), block_words=layout.block, dense_from=dense_from(),
    )  # fmt: skip
    width = np.uint64((1 << layout.bits) - 1)
    return [
        dense_survey(one.changed, classes)
        if one.dense
        else arranged(one.classes, one.ranks, one.deltas & width, layout.bits, classes)
        for one in found
    ]


def differing(old: AnyBits, new: AnyBits) -> int:
    """Words that differ."""
    return device.count_on_device(_here(old).words, _here(new).words)


def _here(bits: AnyBits) -> DeviceBits:
    if not isinstance(bits, DeviceBits):
        raise FormatError("These bits lie in host memory; place() them beside the others first.")
    return bits


def _row(data: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes as the words of a block: a view, or codes in a byte each."""
    return device.codes_on_device(data) if bits == 4 else data.view(_WORDS[bits // 8])


def _scheme(classes: Classes) -> dict[str, int]:
    field, first, last = classes
    return {"shift": field.shift, "mask": field.mask, "first": first, "last": last}


# --- applying ------------------------------------------------------------------------------------


class Placed:
    """Changes made to a tensor on its device, and the way back, which stays there too."""

    def __init__(self, data: torch.Tensor, bits: int) -> None:
        self._data, self._bits = data, bits
        self._moved: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._whole: list[tuple[slice, torch.Tensor]] = []
        self.changed = 0

    def move(self, places: torch.Tensor, changes: Changes) -> None:
        """Add changes to words of the tensor."""
        words = self._data if self._bits == 4 else _row(self._data, self._bits)
        steps = device.steps_on_device(changes, words)
        self._moved.append((places, steps))
        self._add(places, steps, back=False)
        self.changed += places.numel()

    def overwrite(self, span: slice, new: torch.Tensor, changed: int | None = None) -> None:
        """Replace bytes; the number of words that differ is counted if it is not known."""
        old = self._data[span].clone()
        self._whole.append((span, old))
        device.write_on_device(self._data[span], new)
        if changed is None:
            changed = device.count_on_device(_row(old, self._bits), _row(new, self._bits))
        self.changed += changed

    def undo(self) -> None:
        """Give the tensor its old bits again."""
        for places, steps in self._moved:
            self._add(places, steps, back=True)
        for span, old in self._whole:
            device.write_on_device(self._data[span], old)
        self._moved, self._whole, self.changed = [], [], 0

    def _add(self, places: torch.Tensor, steps: torch.Tensor, *, back: bool) -> None:
        if self._bits == 4:
            device.add_codes_on_device(self._data, places, steps, back=back)
        else:
            device.add_on_device(_row(self._data, self._bits), places, steps, back=back)


def moved(bits: AnyBits, places: Places, changes: Changes) -> Placed:
    """Add changes, whose places are known, to the words of a tensor."""
    placed = Placed(_here(bits).data, 8 * word_bytes(bits.dtype))
    placed.move(device.to_device(places, bits.data.device), changes)
    return placed


def overwritten(blob: Blob | None, bits: AnyBits, changed: int) -> Placed:
    """Replace a tensor by one whose blocks need no base."""
    new = filled(blob, bits.dtype, bits.shape, bits)
    placed = Placed(bits.data, 8)
    placed.overwrite(slice(0, bits.nbytes), new.data, changed)
    return placed


def filled(blob: Blob | None, dtype: str, shape: tuple[int, ...], place: AnyBits) -> DeviceBits:
    """A tensor whose blocks need no base, beside `place`; brought over block by block."""
    bits = _here(place).room(dtype, shape)
    if blob is None:
        return bits
    for index, (start, end) in enumerate(blob.spans):
        span = blob.layout.span(index)
        part = read_whole(blob.data[start:end], span.stop - span.start, blob.width, blob.signed)
        bits.data[span] = device.to_device(part, bits.data.device)
    return bits


def applied(blob: Blob, base: AnyBits, changed: int) -> Placed:
    """`Blob.apply` on a device: change the whole tensor in place, or leave it and raise."""
    bits = _here(base)
    placed = Placed(bits.data, blob.layout.bits)
    try:
        index = 0
        while index < len(blob.spans):
            if blob.kind(index) < SAME:
                run = _run(blob, index, changed - placed.changed)
                placed.move(_located(blob, run, bits.data), run.changes)
                index = run.stop
                continue
            _replace(blob, index, placed, bits)
            index += 1
        if placed.changed != changed:
            raise FormatError(WRONG_COUNT)
    except BaseException:
        placed.undo()
        raise
    return placed


class _Run(NamedTuple):
    """Consecutive blocks, sparse or without a change, of the same classes."""

    start: int
    stop: int
    classes: Classes
    bounds: npt.NDArray[np.int64]
    ranks: npt.NDArray[np.uint32]
    changes: Changes


def _run(blob: Blob, start: int, most: int) -> _Run:
    """Read the events of sparse blocks from `start` on, as many as are looked at together."""
    classes = blob.tables[blob.kind(start)].classes(blob.field)
    blocks = max(1, device.PIECE_WORDS // blob.layout.block)
    bounds: list[npt.NDArray[np.int64]] = []
    ranks: list[npt.NDArray[np.uint32]] = []
    changes: list[Changes] = []
    found = 0
    for index in range(start, min(len(blob.spans), start + blocks)):
        kind = blob.kind(index)
        if found > device.PIECE_EVENTS or kind > SAME:
            break
        if kind == SAME:
            bounds.append(np.full(257, found, np.int64))
            continue
        if blob.tables[kind].classes(blob.field) != classes:
            break
        begin, end = blob.spans[index]
        lo, hi = blob.layout.bounds(index)
        events = read_events(blob.data, begin + 1, end, hi - lo, blob.tables[kind], most - found)
        bounds.append(events.bounds + found)
        ranks.append(events.ranks.copy())
        changes.append(events.changes.copy())
        found += events.ranks.size
    return _Run(
        start, start + len(bounds), classes,
        np.stack(bounds), np.concatenate(ranks), np.concatenate(changes),
    )  # fmt: skip


def _located(blob: Blob, run: _Run, data: torch.Tensor) -> torch.Tensor:
    """Which words of the tensor a run's events change."""
    layout = blob.layout
    span = slice(layout.span(run.start).start, layout.span(run.stop - 1).stop)
    places = device.locate_blocks_on_device(
        _row(data[span], layout.bits), block_words=layout.block, **_scheme(run.classes),
        bounds=run.bounds, ranks=run.ranks,
    )  # fmt: skip
    if places is None:
        raise IntegrityError(ANOTHER_BASE)
    return places + layout.bounds(run.start)[0]


def _replace(blob: Blob, index: int, placed: Placed, bits: DeviceBits) -> None:
    """Apply a block that is not sparse: of a dense one the old bytes come to the host."""
    kind, span = blob.kind(index), blob.layout.span(index)
    start, end = blob.spans[index]
    changed: int | None = None
    if kind == SAME:
        return
    if kind == DENSE:
        old = bits.part(span)
        new, changed = read_dense(blob.data, start + 1, end, old, blob.layout.bits, blob.field)
    elif kind in (RAW, PLANES):
        new = read_whole(blob.data[start:end], span.stop - span.start, blob.width, blob.signed)
    else:
        return
    placed.overwrite(span, device.to_device(new, bits.data.device), changed)


def changed_places(old: DeviceBits, new: DeviceBits) -> torch.Tensor:
    """Where the words of two versions differ, ascending; stays on the device."""
    step = device.PIECE_WORDS
    pieces = zip(old.words.split(step), new.words.split(step), strict=True)
    found = [torch.nonzero(a != b).view(-1) + i * step for i, (a, b) in enumerate(pieces)]
    return torch.cat(found) if found else old.data.new_empty(0, dtype=torch.int64)
