"""Deltas between mappings of tensors: `encode_bits` writes one, `Patch` reads it. Pure.

The reader validates everything it can before it writes; a digest of the new bits closes the
rest: `apply_into` tells whether the buffer now holds exactly what the writer had.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from farcast.delta.applying import Applied, Blob
from farcast.delta.bits import (
    AnyBits,
    Bytes,
    TensorBits,
    all_held,
    device_bits,
    from_bits,
    held_bits,
    nbytes_of,
    word_bytes,
)
from farcast.delta.blocks import Changes, Layout, Places, split
from farcast.delta.coding import decode_sparse
from farcast.delta.conditioned import CODES, Parameters, field_of
from farcast.delta.container import read_container
from farcast.delta.crew import Crew, checked_threads, shares, threads_for
from farcast.delta.identity import tensor_digest
from farcast.delta.writing import EncodedDelta, write_delta
from farcast.errors import FormatError, IntegrityError, LimitError
from farcast.types import TensorEntry

if TYPE_CHECKING:
    from farcast.delta.placed import Placed

_Bits = TypeVar("_Bits", bound=AnyBits)


@dataclass(frozen=True)
class PatchEntry:
    """One tensor in a patch; `digest` is of its new bits."""

    dtype: str
    shape: tuple[int, ...]
    digest: str
    kind: Literal["sparse", "full"]
    changed: int

    @property
    def entry(self) -> TensorEntry:
        return TensorEntry(self.dtype, self.shape, self.digest)


def encode_bits(
    base: Mapping[str, AnyBits],
    target: Mapping[str, AnyBits],
    *,
    base_entries: Mapping[str, TensorEntry] | None = None,
    target_entries: Mapping[str, TensorEntry] | None = None,
    threads: int = 1,
    shards: int = 1,
) -> EncodedDelta:
    """The change from `base` to `target`; an empty base gives an anchor.

    `base_entries` are the known identities of the base, so that unchanged tensors are not
    hashed again; `target_entries` those of the target, where the caller has hashed it already.
    The bytes don't depend on `threads`. With `shards` every tensor whose rows divide by it can be
    read in as many ranges of rows, for a few more bytes.
    """
    known = (base_entries or {}, target_entries or {})
    return write_delta(base, target, *known, threads=threads, shards=shards)


class Patch:
    """A validated delta. Reading a tensor costs only that tensor."""

    def __init__(self, data: bytes | memoryview, *, threads: int = 1) -> None:
        header, digests, spans = read_container(data, threads=checked_threads(threads))
        self._data: Bytes = np.frombuffer(data, np.uint8)
        self._tables = [Parameters.unpack(table) for table in header.tables]
        self._rows = {row.name: row for row in header.rows}
        self._spans = {row.name: span for row, span in zip(header.rows, spans, strict=True)}
        self.removed: tuple[str, ...] = header.removed
        self.entries: dict[str, PatchEntry] = {
            row.name: PatchEntry(
                row.dtype,
                row.shape,
                digest,
                "full" if row.coding == "full" else "sparse",
                row.changed,
            )
            for row, digest in zip(header.rows, digests, strict=True)
        }

    @classmethod
    def open(cls, data: bytes | memoryview, *, threads: int = 1) -> "Patch":
        """Check the whole header. Raises `FormatError`, `LimitError` or `IntegrityError`;
        allocates no more than a bounded multiple of the given bytes."""
        return cls(data, threads=threads)

    def apply_all(
        self, buffers: Mapping[str, Bytes], *, verify: bool = True, threads: int = 1
    ) -> int:
        """`apply_into` for every tensor of the patch, on so many threads at once; of a tensor
        that takes more than its share of them, the blocks.

        Returns the number of changed words. After an error each buffer holds either what it held
        before or its new bits.
        """
        missing = self.entries.keys() - buffers.keys()
        if missing:
            raise FormatError(f"There is no buffer for {min(missing)[:80]!r}, which changes.")
        sizes = {name: nbytes_of(e.dtype, e.shape) for name, e in self.entries.items()}
        with Crew(threads) as crew:
            large, batches = shares(sizes, crew.threads)
            changed = 0
            for name in large:
                applied = self.change(name, buffers[name], verify=verify, threads=threads)
                changed += applied.changed

            def apply_each(names: list[str]) -> int:
                return sum(self.apply_into(name, buffers[name], verify=verify) for name in names)

            return changed + sum(crew.each(apply_each, batches))

    def apply_into(self, name: str, buffer: Bytes, *, verify: bool = True) -> int:
        """Turn the base bits in `buffer` (uint8, contiguous) into the new bits, in place.

        Returns the number of changed words. With `verify` the result's digest is compared;
        `IntegrityError` means that the buffer held another base. After any error the buffer
        holds what it held before.
        """
        return self.change(name, buffer, verify=verify).changed

    def change(self, name: str, buffer: Bytes, *, verify: bool = True, threads: int = 1) -> Applied:
        """`apply_into`, and the way back: `undo()` gives the buffer its old bits again."""
        threads, entry = checked_threads(threads), self._entry(name)
        if buffer.size != nbytes_of(entry.dtype, entry.shape):
            raise FormatError(f"The buffer for {name[:80]!r} has a wrong size.")
        applied = self._applied(name, entry, buffer, threads)
        if verify:
            try:
                self._check(name, TensorBits(entry.dtype, entry.shape, buffer), threads)
            except IntegrityError:
                applied.undo()
                raise
        return applied

    def change_bits(self, name: str, bits: AnyBits) -> "Applied | Placed":
        """`change`, wherever the base bits lie: verified, and in place."""
        if isinstance(bits, TensorBits):
            return self.change(name, bits.data)
        entry = self._entry(name)
        if bits.nbytes != nbytes_of(entry.dtype, entry.shape):
            raise FormatError(f"The buffer for {name[:80]!r} has a wrong size.")
        applied = self._placed(name, entry, bits)
        try:
            self._check(name, bits)
        except IntegrityError:
            applied.undo()
            raise
        return applied

    def turned(
        self, name: str, base: AnyBits | None, *, owned: bool = False, verify: bool = True
    ) -> AnyBits:
        """The new bits of a tensor, where those of `base` lie.

        `base` is written into only if it is the caller's to give (`owned`). A tensor that is
        whole in this patch needs none, and is verified in any case.
        """
        entry = self._entry(name)
        if entry.kind == "full":
            return self.full(name) if base is None else self._full_beside(name, entry, base)
        if base is None or (base.dtype, base.shape) != (entry.dtype, entry.shape):
            raise FormatError(
                f"A delta changes elements of {name[:80]!r}, which its base holds in another "
                "shape or not at all; do not use that version."
            )
        own = owned and (not isinstance(base, TensorBits) or base.data.flags.writeable)
        bits = base if own else base.copied()
        if isinstance(bits, TensorBits):
            self.change(name, bits.data, verify=verify)
        elif verify:
            self.change_bits(name, bits)
        else:
            self._placed(name, entry, bits)
        return bits

    def change_rows(self, name: str, buffer: Bytes, start: int, stop: int) -> Applied:
        """Turn rows `start <= row < stop` of a tensor, which `buffer` holds, into the new ones.

        The range must be whole blocks: the writer's `shards` decides which are. The digest is of
        the whole tensor, so the caller verifies the rows' bits where that matters.
        """
        entry, row = self._entry(name), self._rows[name]
        rows = entry.shape[0] if entry.shape else 0
        if not 0 <= start < stop <= rows or row.block == 0:
            raise FormatError(f"The rows {start} to {stop} of {name[:80]!r} cannot be read apart.")
        blob = self._blob(name, entry)
        words = blob.layout.words // rows
        first, left = divmod(start * words, row.block)
        last, over = divmod(stop * words, row.block)
        if left or (over and stop != rows):
            raise FormatError(
                f"The rows {start} to {stop} of {name[:80]!r} are not whole blocks; "
                "write the delta with as many shards."
            )
        if buffer.size != (stop - start) * words * blob.layout.bits // 8:
            raise FormatError(f"The buffer for rows of {name[:80]!r} has a wrong size.")
        return blob.apply_range(first, last + (over > 0), buffer, blob.layout.words)

    def moves(self, name: str) -> tuple[Places, Changes]:
        """Which words of a tensor change, ascending, and by how much (modulo their width): what
        planes tell without a base. Raises `FormatError` for other codings."""
        entry = self._entry(name)
        if self._rows[name].coding != "planes":
            raise FormatError(
                f"Where {name[:80]!r} changes can only be told with the old weights; squash with "
                "the base, or from an anchor on."
            )
        start, end = self._spans[name]
        width = word_bytes(entry.dtype)
        words = nbytes_of(entry.dtype, entry.shape) // width
        return decode_sparse(self._data[start:end].data, words, entry.changed, width)

    def full(self, name: str) -> TensorBits:
        """A tensor that is whole in this patch, verified."""
        entry = self._entry(name)
        if entry.kind != "full":
            raise FormatError(f"The tensor {name[:80]!r} is not whole in this delta.")
        data = self._filled(name, entry)
        return self._check(name, TensorBits(entry.dtype, entry.shape, data))

    def _applied(self, name: str, entry: PatchEntry, buffer: Bytes, threads: int = 1) -> Applied:
        width = word_bytes(entry.dtype)
        start, end = self._spans[name]
        if entry.kind == "full":
            applied = Applied(buffer, 8)
            data = self._filled(name, entry, threads)
            applied.overwrite(slice(0, buffer.size), data, entry.changed)
            return applied
        if self._rows[name].coding == "planes":
            applied, blob = Applied(buffer, 8 * width), self._data[start:end].data
            moved = decode_sparse(blob, buffer.size // width, entry.changed, width)
            applied.move(slice(0, buffer.size), *moved)
            return applied
        return self._blob(name, entry).apply(buffer, entry.changed, threads)

    def _placed(self, name: str, entry: PatchEntry, bits: AnyBits) -> "Placed":
        """`_applied`, for bits on a device."""
        from farcast.delta import placed

        row, (start, end) = self._rows[name], self._spans[name]
        if entry.kind == "full":
            return placed.overwritten(self._blob_or_none(name, entry), bits, entry.changed)
        if row.coding == "planes":
            width = word_bytes(entry.dtype)
            blob = self._data[start:end].data
            return placed.moved(
                bits, *decode_sparse(blob, bits.nbytes // width, entry.changed, width)
            )
        return placed.applied(self._blob(name, entry), bits, entry.changed)

    def _full_beside(self, name: str, entry: PatchEntry, place: AnyBits) -> AnyBits:
        """`full`, on the device of `place`; block after block passes through host memory."""
        if isinstance(place, TensorBits):
            return self.full(name)
        from farcast.delta import placed

        made = placed.filled(self._blob_or_none(name, entry), entry.dtype, entry.shape, place)
        self._check(name, made)
        return made

    def _blob_or_none(self, name: str, entry: PatchEntry) -> Blob | None:
        """None for a tensor without a byte, which has no blocks either."""
        return self._blob(name, entry) if nbytes_of(entry.dtype, entry.shape) else None

    def _blob(self, name: str, entry: PatchEntry) -> Blob:
        row, (start, end) = self._rows[name], self._spans[name]
        coded = row.coding == "codes"
        bits = 4 if coded else 8 * word_bytes(entry.dtype)
        layout = Layout.of(nbytes_of(entry.dtype, entry.shape), bits, row.block)
        spans = split(self._data, start, end, layout.count)
        field = CODES if coded else field_of(entry.dtype)
        return Blob(self._data, spans, layout, field, self._tables)

    def _filled(self, name: str, entry: PatchEntry, threads: int = 1) -> Bytes:
        blob = self._blob_or_none(name, entry)  # has as many blocks as the shape asks for
        size = nbytes_of(entry.dtype, entry.shape)
        try:
            data = np.empty(size, np.uint8)
        except MemoryError:
            raise LimitError(
                f"The tensor {name[:80]!r} takes {size} bytes, more than this machine has free."
            ) from None
        if blob is not None:
            blob.fill(data, threads)
        return data

    def _entry(self, name: str) -> PatchEntry:
        entry = self.entries.get(name)
        if entry is None:
            raise FormatError(f"The delta has no tensor {name[:80]!r}.")
        return entry

    def _check(self, name: str, bits: _Bits, threads: int = 1) -> _Bits:
        if tensor_digest(bits, threads=threads) != self.entries[name].digest:
            raise IntegrityError(
                f"The tensor {name[:80]!r} does not have the bits its writer published: the base "
                "is another version, or the delta is damaged; rebuild from an anchor."
            )
        return bits


def encode(base: Mapping[str, Any], target: Mapping[str, Any], *, threads: int = 1) -> bytes:
    """The change between two mappings of numpy arrays or torch tensors, as bytes; the same ones
    on any number of threads."""
    return encode_bits(all_held(base), all_held(target), threads=threads).data


def apply(
    base: Mapping[str, Any], patch: bytes | memoryview, *, threads: int = 1
) -> dict[str, Any]:
    """`apply(base, encode(base, target))` is `target`, bit for bit. `base` is left as it is.

    Tensors come back as torch if the base's are torch, else as numpy (unsigned words where numpy
    lacks the dtype), and on the device where the base's lie. Unchanged tensors are passed through.
    """
    opened = Patch.open(patch, threads=threads)
    like = next((tensor for tensor in base.values()), None)
    removed = set(opened.removed)
    out = {name: tensor for name, tensor in base.items() if name not in removed}

    def turned(name: str) -> AnyBits:
        old = held_bits(base[name]) if name in base else None
        if opened.entries[name].kind == "full":
            old = device_bits(base.get(name, like))
        return opened.turned(name, old)

    sides = [] if like is None else [held_bits(like)]
    with Crew(threads_for(sides, threads)) as crew:
        for name, bits in zip(opened.entries, crew.each(turned, opened.entries), strict=True):
            out[name] = from_bits(bits, like)
    return out
