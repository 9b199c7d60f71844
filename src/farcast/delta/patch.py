"""Deltas between mappings of tensors: `encode_bits` writes one, `Patch` reads it. Pure.

The reader validates everything it can before it writes; a digest of the new bits closes the
rest: `apply_into` tells whether the buffer now holds exactly what the writer had.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from farcast.delta import conditioned
from farcast.delta.bits import (
    Bytes,
    TensorBits,
    all_bits,
    from_bits,
    nbytes_of,
    word_bytes,
    words_of,
)
from farcast.delta.coding import (
    changed_positions,
    decode_full,
    decode_sparse,
    encode_full,
    encode_sparse,
)
from farcast.delta.conditioned import (
    FIELDS,
    Parameters,
    Scratch,
    Statistics,
    class_range,
    find_changes,
    read_blocks,
    write_blocks,
)
from farcast.delta.container import (
    MAX_TABLES,
    Header,
    Row,
    read_container,
    write_container,
)
from farcast.delta.identity import entry_of, tensor_digest
from farcast.errors import FormatError, IntegrityError
from farcast.types import TensorEntry

DENSE = 8
"""Where a change takes over an eighth of the raw tensor, the other codings are tried too."""

SMALL_WORDS = 1 << 16
"""A target of fewer words in all is coded in planes: the kernels, whose import takes most of a
second, would save less than a packet."""


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
    target_entries: Mapping[str, TensorEntry] | None = None,
) -> EncodedDelta:
    """The change from `base` to `target`; an empty base gives an anchor.

    `base_entries` are the known identities of the base, so that unchanged tensors are not
    hashed again; `target_entries` those of the target, where the caller has hashed it already.
    """
    writer = _Writer(base, target)
    entries: dict[str, TensorEntry] = {}
    for name in sorted(target, key=str.encode):
        body = writer.add(name)
        known = (target_entries or {}).get(name)
        if known is None and body is None:
            known = (base_entries or {}).get(name)
        entries[name] = known if known is not None else entry_of(target[name])
        if body is not None:
            writer.digests.append(entries[name].digest)
    elements = sum(bits.data.size // word_bytes(bits.dtype) for bits in target.values())
    data = writer.finish()
    return EncodedDelta(data, entries, sum(row.changed for row in writer.rows), elements)


class Body(NamedTuple):
    """How one tensor is coded: the bytes of its blob and what the header says of them."""

    coding: Literal["conditioned", "planes", "full"]
    changed: int
    blob: bytes
    table: int = 0


class _Writer:
    """One container in the making. Tensors are added in the order of their names; what a table
    of parameters saves depends on those before it, so the order is part of the result."""

    def __init__(self, base: Mapping[str, TensorBits], target: Mapping[str, TensorBits]) -> None:
        self._base, self._target = base, target
        self._ranges: dict[str, tuple[int, int]] = {}
        self._tables: list[tuple[str, Parameters]] = []
        self._scratch: Scratch | None = None
        words = sum(bits.data.size // word_bytes(bits.dtype) for bits in target.values())
        self._small = words < SMALL_WORDS
        self.rows: list[Row] = []
        self.digests: list[str] = []
        self._blobs: list[bytes] = []

    def add(self, name: str) -> Body | None:
        """Code one tensor; None when it did not change."""
        new, old = self._target[name], self._base.get(name)
        if old is None or old.dtype != new.dtype or old.shape != new.shape:
            body: Body | None = _whole(new, new.data.size // word_bytes(new.dtype))
        else:
            body = self._change(old, new)
        if body is not None:
            row = Row(
                name, new.dtype, new.shape, body.coding, body.table, body.changed, len(body.blob)
            )
            self.rows.append(row)
            self._blobs.append(body.blob)
        return body

    def finish(self) -> bytes:
        removed = tuple(sorted(set(self._base) - set(self._target), key=str.encode))
        tables = tuple(parameters.pack() for _, parameters in self._tables)
        return write_container(Header(removed, tables, tuple(self.rows)), self.digests, self._blobs)

    def _change(self, old: TensorBits, new: TensorBits) -> Body | None:
        if new.data.size == 0:
            return None
        if self._small:
            body = _planes(old, new)
            if not body.changed or len(body.blob) * DENSE <= new.data.size:
                return body if body.changed else None
            return min(body, _whole(new, body.changed), key=lambda body: len(body.blob))
        first, last = self._range(new.dtype)
        if self._scratch is None:
            self._scratch = Scratch.of(conditioned.BLOCK_WORDS)
        blocks = find_changes(old.data, new.data, new.dtype, first, last, self._scratch)
        changed = sum(block.changed for block in blocks)
        if changed == 0:
            return None
        table = self._table(new.dtype, Statistics(blocks, last - first + 1), first, last)
        blob = write_blocks(blocks, self._tables[table][1], new.data.size)
        bodies = [] if blob is None else [Body("conditioned", changed, blob, table)]
        if blob is None or len(blob) * DENSE > new.data.size:
            bodies += [_planes(old, new), _whole(new, changed)]
        return min(bodies, key=lambda body: len(body.blob))

    def _range(self, dtype: str) -> tuple[int, int]:
        if dtype not in self._ranges:
            same = (bits for bits in self._base.values() if bits.dtype == dtype)
            self._ranges[dtype] = class_range(dtype, [words_of(bits) for bits in same])
        return self._ranges[dtype]

    def _table(self, dtype: str, statistics: Statistics, first: int, last: int) -> int:
        own = statistics.best(first, last)
        costs = [
            statistics.bits(parameters) if kind == dtype else sys.maxsize
            for kind, parameters in self._tables
        ]
        least = min(range(len(costs)), key=costs.__getitem__, default=-1)
        saved = costs[least] - statistics.bits(own) if least >= 0 else sys.maxsize
        if saved <= 8 * own.nbytes or (least >= 0 and len(costs) == MAX_TABLES):
            return least
        self._tables.append((dtype, own))
        return len(self._tables) - 1


def _planes(old: TensorBits, new: TensorBits) -> Body:
    width = word_bytes(new.dtype)
    positions = changed_positions(old.data, new.data, width)
    return Body("planes", positions.size, encode_sparse(old.data, new.data, positions, width))


def _whole(new: TensorBits, changed: int) -> Body:
    blob = encode_full(new.data, word_bytes(new.dtype), signed=new.dtype in FIELDS)
    return Body("full", changed, blob)


class Patch:
    """A validated delta. Reading a tensor costs only that tensor."""

    def __init__(self, data: bytes | memoryview) -> None:
        header, digests, spans = read_container(data)
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
    def open(cls, data: bytes | memoryview) -> "Patch":
        """Check the whole header. Raises `FormatError`, `LimitError` or `IntegrityError`;
        allocates no more than a bounded multiple of the given bytes."""
        return cls(data)

    def apply_into(self, name: str, buffer: Bytes, *, verify: bool = True) -> int:
        """Turn the base bits in `buffer` (uint8, contiguous) into the new bits, in place.

        Returns the number of changed words. With `verify` the result's digest is compared;
        `IntegrityError` means that the buffer held another base: its content is then lost.
        """
        entry = self._entry(name)
        if buffer.size != nbytes_of(entry.dtype, entry.shape):
            raise FormatError(f"The buffer for {name[:80]!r} has a wrong size.")
        row, (start, end) = self._rows[name], self._spans[name]
        width = word_bytes(entry.dtype)
        if row.coding == "full":
            buffer[:] = self._whole(name, entry)
        elif row.coding == "planes":
            decode_sparse(self._data[start:end].data, buffer, entry.changed, width)
        else:
            table = self._tables[row.table]
            read_blocks(self._data, start, end, buffer, entry.dtype, entry.changed, table)
        if verify:
            self._check(name, TensorBits(entry.dtype, entry.shape, buffer))
        return entry.changed

    def full(self, name: str) -> TensorBits:
        """A tensor that is whole in this patch, verified."""
        entry = self._entry(name)
        if entry.kind != "full":
            raise FormatError(f"The tensor {name[:80]!r} is not whole in this delta.")
        bits = TensorBits(entry.dtype, entry.shape, self._whole(name, entry))
        return self._check(name, bits)

    def _whole(self, name: str, entry: PatchEntry) -> Bytes:
        start, end = self._spans[name]
        size, width = nbytes_of(entry.dtype, entry.shape), word_bytes(entry.dtype)
        signed = entry.dtype in FIELDS
        return decode_full(self._data[start:end].data, size, width, signed=signed)

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
