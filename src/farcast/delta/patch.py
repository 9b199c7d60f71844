"""Deltas between mappings of tensors: `encode_bits` writes one, `Patch` reads it. Pure.

The reader validates everything it can before it writes; a digest of the new bits closes the
rest: `apply_into` tells whether the buffer now holds exactly what the writer had.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from farcast.delta.bits import Bytes, TensorBits, all_bits, from_bits, nbytes_of, word_bytes
from farcast.delta.coding import (
    changed_positions,
    decode_full,
    decode_sparse,
    encode_full,
    encode_sparse,
)
from farcast.delta.container import Header, Row, read_container, write_container
from farcast.delta.identity import entry_of, tensor_digest
from farcast.errors import FormatError, IntegrityError
from farcast.types import TensorEntry


@dataclass(frozen=True)
class EncodedDelta:
    """A delta's bytes; what every tensor of the target is; how many words changed, of how many.

    A word is one element (two packed codes for F4)."""

    data: bytes
    entries: dict[str, TensorEntry]
    changed: int
    elements: int


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
    base: Mapping[str, TensorBits],
    target: Mapping[str, TensorBits],
    *,
    base_entries: Mapping[str, TensorEntry] | None = None,
) -> EncodedDelta:
    """The change from `base` to `target`; an empty base gives an anchor.

    `base_entries` are the known identities of the base, so that unchanged tensors are not
    hashed again.
    """
    rows: list[Row] = []
    blobs: list[bytes] = []
    entries: dict[str, TensorEntry] = {}
    changed = elements = 0
    for name, new in sorted(target.items(), key=lambda item: item[0].encode()):
        elements += new.data.size // word_bytes(new.dtype)
        old = base.get(name)
        known = base_entries.get(name) if base_entries is not None else None
        row, blob, entries[name] = _encode_tensor(name, old, new, known)
        if row is not None:
            rows.append(row)
            blobs.append(blob)
            changed += row.changed
    removed = tuple(sorted(set(base) - set(target), key=str.encode))
    data = write_container(Header(removed, tuple(rows)), blobs)
    return EncodedDelta(data, entries, changed, elements)


def _encode_tensor(
    name: str, old: TensorBits | None, new: TensorBits, known: TensorEntry | None
) -> tuple[Row | None, bytes, TensorEntry]:
    width = word_bytes(new.dtype)
    words = new.data.size // width
    if old is None or old.dtype != new.dtype or old.shape != new.shape:
        entry = entry_of(new)
        blob = encode_full(new.data, width)
        return _row(name, entry, "full", words, blob), blob, entry
    positions = changed_positions(old.data, new.data, width)
    if positions.size == 0:
        return None, b"", known or entry_of(new)
    entry = entry_of(new)
    blob, kind = encode_sparse(old.data, new.data, positions, width), "sparse"
    if len(blob) * 8 > new.data.size * 5:  # dense change: the full coding may be smaller
        full = encode_full(new.data, width)
        if len(full) < len(blob):
            blob, kind = full, "full"
    return _row(name, entry, kind, positions.size, blob), blob, entry


def _row(name: str, entry: TensorEntry, kind: Any, changed: int, blob: bytes) -> Row:
    return Row(name, entry.dtype, entry.shape, kind, changed, entry.digest, len(blob))


class Patch:
    """A validated delta. Reading a tensor costs only that tensor."""

    def __init__(self, header: Header, blobs: list[memoryview]) -> None:
        self._blobs = {row.name: blob for row, blob in zip(header.rows, blobs, strict=True)}
        self.removed: tuple[str, ...] = header.removed
        self.entries: dict[str, PatchEntry] = {
            row.name: PatchEntry(row.dtype, row.shape, row.digest, row.kind, row.changed)
            for row in header.rows
        }

    @classmethod
    def open(cls, data: bytes | memoryview) -> "Patch":
        """Check the whole header. Raises `FormatError`, `LimitError` or `IntegrityError`;
        allocates no more than a bounded multiple of the given bytes."""
        return cls(*read_container(data))

    def apply_into(self, name: str, buffer: Bytes, *, verify: bool = True) -> int:
        """Turn the base bits in `buffer` (uint8, contiguous) into the new bits, in place.

        Returns the number of changed words. With `verify` the result's digest is compared;
        `IntegrityError` means that the buffer held another base: its content is then lost.
        """
        entry = self._entry(name)
        if buffer.size != nbytes_of(entry.dtype, entry.shape):
            raise FormatError(f"The buffer for {name[:80]!r} has a wrong size.")
        width = word_bytes(entry.dtype)
        if entry.kind == "full":
            buffer[:] = decode_full(self._blobs[name], buffer.size, width)
        else:
            decode_sparse(self._blobs[name], buffer, entry.changed, width)
        if verify:
            self._check(name, TensorBits(entry.dtype, entry.shape, buffer))
        return entry.changed

    def full(self, name: str) -> TensorBits:
        """A tensor that is whole in this patch, verified."""
        entry = self._entry(name)
        if entry.kind != "full":
            raise FormatError(f"The tensor {name[:80]!r} is not whole in this delta.")
        size = nbytes_of(entry.dtype, entry.shape)
        data = decode_full(self._blobs[name], size, word_bytes(entry.dtype))
        return self._check(name, TensorBits(entry.dtype, entry.shape, data))

    def _entry(self, name: str) -> PatchEntry:
        entry = self.entries.get(name)
        if entry is None:
            raise FormatError(f"The delta has no tensor {name[:80]!r}.")
        return entry

    def _check(self, name: str, bits: TensorBits) -> TensorBits:
        if tensor_digest(bits) != self.entries[name].digest:
            raise IntegrityError(
                f"The tensor {name[:80]!r} does not have the bits its writer published: the base "
                "is another version, or the delta is damaged; rebuild from an anchor."
            )
        return bits


def encode(base: Mapping[str, Any], target: Mapping[str, Any]) -> bytes:
    """The change between two mappings of numpy arrays or torch tensors, as bytes."""
    return encode_bits(all_bits(base), all_bits(target)).data


def apply(base: Mapping[str, Any], patch: bytes | memoryview) -> dict[str, Any]:
    """`apply(base, encode(base, target))` is `target`, bit for bit. `base` is left as it is.

    Tensors come back as torch if the base's are torch, else as numpy (unsigned words where numpy
    lacks the dtype). Unchanged tensors are passed through.
    """
    opened = Patch.open(patch)
    like = next((tensor for tensor in base.values()), None)
    out = {name: tensor for name, tensor in base.items() if name not in set(opened.removed)}
    for name, entry in opened.entries.items():
        if entry.kind == "full":
            out[name] = from_bits(opened.full(name), like)
            continue
        if name not in base:
            raise FormatError(f"The delta changes {name[:80]!r}, which the base lacks.")
        old = all_bits({name: base[name]})[name]
        if (old.dtype, old.shape) != (entry.dtype, entry.shape):
            raise FormatError(f"The base's {name[:80]!r} has another dtype or shape.")
        buffer = np.array(old.data, copy=True)
        opened.apply_into(name, buffer)
        out[name] = from_bits(TensorBits(entry.dtype, entry.shape, buffer), like)
    return out
