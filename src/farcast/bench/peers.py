"""Codings of other projects, written anew from their published descriptions. Pure.

Names in brackets say who uses such a coding; it is not their code, and their framing, checksums
and transport are left out. Each is exact on every dtype, which some originals are not.
"""

import struct
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from farcast.bench.codings import Buffers, Coding, Encoded
from farcast.bench.data import Change
from farcast.bench.ordered import from_ordered, to_ordered
from farcast.delta import TensorBits, Words, word_bytes, words_of

Positions = npt.NDArray[np.int64]
Squeeze = Callable[[bytes], bytes]

REIMPLEMENTED = "reimplemented from its published description"

_UNSIGNED = (np.uint8, np.uint16, np.uint32, np.uint64)


class PerTensor(Coding):
    """Codings that treat each tensor by itself; a tensor that did not change takes no bytes."""

    origin = REIMPLEMENTED
    level = 1

    def encode(self, change: Change) -> Encoded:
        squeeze = zstandard.ZstdCompressor(level=self.level).compress
        blobs: dict[str, tuple[TensorBits, bytes]] = {}
        for name, new in change.target.items():
            blob = self.encode_tensor(change.base.get(name), new, squeeze)
            if blob:
                blobs[name] = (new, blob)
        return Encoded(blobs, sum(len(blob) for _, blob in blobs.values()))

    def decode(self, encoded: Encoded, buffers: Buffers) -> None:
        expand = zstandard.ZstdDecompressor().decompress
        blobs: Mapping[str, tuple[TensorBits, bytes]] = encoded.payload
        for name, (kind, blob) in blobs.items():
            held = TensorBits(kind.dtype, kind.shape, buffers[name])
            self.decode_tensor(blob, held, expand)

    @abstractmethod
    def encode_tensor(
        self, old: TensorBits | None, new: TensorBits, squeeze: Squeeze, /
    ) -> bytes: ...

    @abstractmethod
    def decode_tensor(self, blob: bytes, held: TensorBits, expand: Squeeze, /) -> None:
        """Turn the bits of `held` into the new ones."""


class XorZstd(PerTensor):
    """The format most projects share: the bytes' exclusive or with the base, zstd level 1.
    Without a base the bytes themselves."""

    name = "whole-tensor XOR + zstd-1 (slime, miles, Stitch)"
    anchors = True

    def encode_tensor(self, old: TensorBits | None, new: TensorBits, squeeze: Squeeze) -> bytes:
        if old is None:
            return squeeze(new.data.tobytes())
        mixed = old.data ^ new.data
        return squeeze(mixed.data) if mixed.any() else b""  # type: ignore[arg-type]

    def decode_tensor(self, blob: bytes, held: TensorBits, expand: Squeeze) -> None:
        held.data[:] ^= np.frombuffer(expand(blob), np.uint8)


class IndexValue(PerTensor):
    """Four bytes of position and the new word, uncompressed."""

    name = "raw int32 index + value (TRL, verl, vLLM)"

    def encode_tensor(self, old: TensorBits | None, new: TensorBits, _: Squeeze) -> bytes:
        positions, words = _changed(old, new)
        wide = np.uint32 if words.size <= 1 << 32 else np.uint64
        return positions.astype(wide).tobytes() + words[positions].tobytes()

    def decode_tensor(self, blob: bytes, held: TensorBits, _: Squeeze) -> None:
        words = words_of(held)
        wide = np.dtype(np.uint32 if words.size <= 1 << 32 else np.uint64)
        count = len(blob) // (wide.itemsize + words.itemsize)
        positions = np.frombuffer(blob, wide, count)
        words[positions] = np.frombuffer(blob, words.dtype, offset=count * wide.itemsize)


class GapXor(PerTensor):
    """Gaps between positions in 16 bits (32 where one is larger), words as exclusive or, zstd."""

    name = "u16 gap + XOR, zstd-1 (NeMo-RL)"

    def encode_tensor(self, old: TensorBits | None, new: TensorBits, squeeze: Squeeze) -> bytes:
        positions, words = _changed(old, new)
        if not positions.size or old is None:
            return b""
        gaps = _narrowed(np.diff(positions, prepend=-1) - 1, at_least=2)
        mixed = words_of(old)[positions] ^ words[positions]
        return _framed(squeeze, gaps, mixed)

    def decode_tensor(self, blob: bytes, held: TensorBits, expand: Squeeze) -> None:
        words = words_of(held)
        gaps, mixed = _unframed(blob, expand, 1, words.dtype)
        words[np.cumsum(gaps.astype(np.int64) + 1) - 1] ^= mixed


class RowColumn(PerTensor):
    """Rows as differences, columns as differences within a row, new words as they are, zstd."""

    name = "row/col gaps + value, zstd-1 (PULSE, grail)"

    def encode_tensor(self, old: TensorBits | None, new: TensorBits, squeeze: Squeeze) -> bytes:
        positions, words = _changed(old, new)
        if not positions.size:
            return b""
        row, column = np.divmod(positions, _columns(new, words))
        rows = np.diff(row, prepend=0)
        columns = np.where(rows == 0, np.diff(column, prepend=0), column)
        return _framed(
            squeeze, _narrowed(rows, at_least=1), _narrowed(columns, at_least=2), words[positions]
        )

    def decode_tensor(self, blob: bytes, held: TensorBits, expand: Squeeze) -> None:
        words = words_of(held)
        rows, columns, values = _unframed(blob, expand, 2, words.dtype)
        total = np.cumsum(columns.astype(np.int64))
        starts = np.flatnonzero(rows)
        if not starts.size or starts[0]:
            starts = np.concatenate(([0], starts))
        before = total[starts] - columns[starts]
        column = total - np.repeat(before, np.diff(starts, append=rows.size))
        row = np.cumsum(rows.astype(np.int64))
        words[row * _columns(held, words) + column] = values


class ByteSplit(Coding):
    """What the usual tools give with care: gaps split into bytes, differences of ordered integers
    in zig-zag order with an escape, one stream each over all tensors, zstd level 9."""

    name = "byte-split gaps + zigzag, zstd-9"
    origin = "own reference, from common tools"

    def encode(self, change: Change) -> Encoded:
        gaps, small, large = [], [], []
        counts: dict[str, int] = {}
        for name, new in change.target.items():
            positions, words = _changed(change.base[name], new)
            counts[name] = positions.size
            gaps.append(np.diff(positions, prepend=-1) - 1)
            zigzag = _zigzag(words_of(change.base[name])[positions], words[positions], new.dtype)
            small.append(np.minimum(zigzag, 255).astype(np.uint8))
            large.append(zigzag[zigzag >= 255])
        squeeze = zstandard.ZstdCompressor(level=9).compress
        planes = np.concatenate(gaps).astype("<u8").view(np.uint8).reshape(-1, 8)
        streams = [planes[:, i].tobytes() for i in range(8)]
        streams += [np.concatenate(part).tobytes() for part in (small, large)]
        streams.append(np.array(list(counts.values()), "<u4").tobytes())
        blobs = [squeeze(stream) if stream.strip(b"\0") else b"" for stream in streams]
        kinds = {name: change.target[name].dtype for name in counts}
        return Encoded((kinds, blobs), sum(map(len, blobs)))

    def decode(self, encoded: Encoded, buffers: Buffers) -> None:
        kinds: dict[str, str]
        kinds, blobs = encoded.payload
        expand = zstandard.ZstdDecompressor().decompress
        counts = _expanded(expand, blobs[10], len(kinds), "<u4")
        planes = [_expanded(expand, blob, int(counts.sum()), "u1") for blob in blobs[:8]]
        gaps = np.stack(planes, axis=-1).reshape(-1).view("<i8")
        zigzag = _expanded(expand, blobs[8], gaps.size, "u1").astype(np.uint64)
        zigzag[zigzag == 255] = np.frombuffer(expand(blobs[9]) if blobs[9] else b"", np.uint64)
        end = np.cumsum(counts)
        for (name, dtype), lo, hi in zip(kinds.items(), end - counts, end, strict=True):
            words = buffers[name].view(f"<u{word_bytes(dtype)}")
            positions = np.cumsum(gaps[lo:hi] + 1) - 1
            step = (zigzag[lo:hi] >> np.uint64(1)).view(np.int64)
            step = np.where(zigzag[lo:hi] & np.uint64(1), ~step, step)
            words[positions] = from_ordered(to_ordered(words[positions], dtype) + step, dtype)


def peers() -> list[Coding]:
    """In the order of the table."""
    return [IndexValue(), XorZstd(), GapXor(), RowColumn(), ByteSplit()]


def _changed(old: TensorBits | None, new: TensorBits) -> tuple[Positions, Words]:
    """Where words differ, and the new words."""
    words = words_of(new)
    if old is None:
        return np.arange(words.size), words
    return np.flatnonzero(words_of(old) != words), words


def _columns(bits: TensorBits, words: Words) -> int:
    """Words of a row; packed codes make a row shorter than its shape says."""
    rows = 1
    for size in bits.shape[:-1]:
        rows *= size
    return max(1, words.size // max(1, rows))


def _zigzag(old: Words, new: Words, dtype: str) -> npt.NDArray[np.uint64]:
    step = to_ordered(new, dtype) - to_ordered(old, dtype)
    return ((step << 1) ^ (step >> 63)).view(np.uint64)


def _narrowed(values: npt.NDArray[np.int64], *, at_least: int) -> npt.NDArray[Any]:
    """In the narrowest unsigned integers of at least so many bytes that hold them."""
    most = int(values.max(initial=0))
    kind = next(
        kind
        for kind in _UNSIGNED
        if np.dtype(kind).itemsize >= at_least and most <= np.iinfo(kind).max
    )
    return values.astype(kind)


def _framed(squeeze: Squeeze, *streams: npt.NDArray[Any]) -> bytes:
    """u32 count | a byte of width for each stream but the last | all of them in one zstd frame."""
    head = struct.pack("<I", streams[0].size) + bytes(s.itemsize for s in streams[:-1])
    return head + squeeze(b"".join(stream.tobytes() for stream in streams))


def _unframed(
    blob: bytes, expand: Squeeze, narrowed: int, last: np.dtype[Any]
) -> list[npt.NDArray[Any]]:
    (count,) = struct.unpack_from("<I", blob)
    kinds = [np.dtype(f"<u{width}") for width in blob[4 : 4 + narrowed]] + [last]
    raw = expand(blob[4 + narrowed :])
    out, at = [], 0
    for kind in kinds:
        out.append(np.frombuffer(raw, kind, count, offset=at))
        at += count * kind.itemsize
    return out


def _expanded(expand: Squeeze, blob: bytes, count: int, kind: str) -> npt.NDArray[Any]:
    """A stream of `count` values; an empty blob stands for zeros."""
    return np.frombuffer(expand(blob), kind) if blob else np.zeros(count, kind)
