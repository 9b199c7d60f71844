"""Words to write into an engine, as a file between the sidecar and the engine's processes.

    offset  size  what
    0       4     "fcw1"
    4       4     length of the header, little endian
    8       n     header: JSON, [[name, words of the tensor, bytes of a word, changed], ...]
    8 + n   ...   for each tensor: positions (ascending, u32, or u64 from 2^32 words on),
                  new words, old words; nothing between them, little endian

The reader is given the file's digest over another way and checks it first, so what it reads is
what the sidecar wrote. It still checks every number: a mistake must not become a wild write.
"""

import itertools
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from blake3 import blake3

from farcast.delta import Words
from farcast.errors import FormatError, IntegrityError
from farcast.replica import files
from farcast.replica.words import Positions

MAGIC = b"fcw1"
MAX_HEADER_BYTES = 1 << 26
"""A quarter of a million tensors with long names."""

_PREFIX = struct.Struct("<4sI")
_CHUNK = 1 << 24


class Change(NamedTuple):
    """`positions` count words in C order, ascending."""

    name: str
    words: int
    positions: Positions | Words
    new: Words
    old: Words


class _Row(NamedTuple):
    name: str
    words: int
    width: int
    changed: int

    @property
    def counts(self) -> np.dtype[np.unsignedinteger]:
        return np.dtype("<u4" if self.words <= 1 << 32 else "<u8")

    @property
    def nbytes(self) -> int:
        return self.changed * (self.counts.itemsize + 2 * self.width)


def write_words(path: Path, changes: Sequence[Change]) -> str:
    """Write a new file; returns its digest. Not synced: it is of no use after a crash."""
    rows = [_Row(c.name, c.words, c.new.itemsize, c.positions.size) for c in changes]
    header = msgspec.json.encode(rows)
    digest = blake3()
    file = files.create(path, 0o600)
    try:
        at = 0
        parts = [_PREFIX.pack(MAGIC, len(header)) + header]
        for part in itertools.chain(parts, _bodies(rows, changes)):
            digest.update(part)
            files.write_at(file, part, at)
            at += len(part)
    finally:
        files.close(file)
    return digest.hexdigest()


def _bodies(rows: Sequence[_Row], changes: Sequence[Change]) -> Iterator[bytes]:
    for row, change in zip(rows, changes, strict=True):
        for array in (change.positions.astype(row.counts), change.new, change.old):
            yield array.tobytes()


def read_words(path: Path, digest: str) -> Iterator[Change]:
    """The changes of a file, one tensor in memory at a time. Raises `IntegrityError` if it is
    not the file of that digest, before it gives anything."""
    with files.opened(path) as file:
        size = files.identity_of(file).size
        _check_digest(file, size, digest, path)
        rows, at = _header(file, size, path)
        for row in rows:
            data = files.read_at(file, at, row.nbytes, path)
            at += row.nbytes
            yield _change(row, np.frombuffer(data, np.uint8), path)


def _check_digest(file: int, size: int, digest: str, path: Path) -> None:
    found = blake3()
    for at in range(0, size, _CHUNK):
        found.update(files.read_at(file, at, min(_CHUNK, size - at), path))
    if found.hexdigest() != digest:
        raise IntegrityError(f"{path} is not the file that was staged; stage the version again.")


def _header(file: int, size: int, path: Path) -> tuple[list[_Row], int]:
    magic, length = b"", 0
    if size >= _PREFIX.size:
        magic, length = _PREFIX.unpack(files.read_at(file, 0, _PREFIX.size, path))
    at = _PREFIX.size + length
    if magic != MAGIC or length > MAX_HEADER_BYTES or at > size:
        raise FormatError(f"{path} holds no staged words; stage the version again.")
    try:
        header = bytes(files.read_at(file, _PREFIX.size, length, path))
        rows = msgspec.json.decode(header, type=list[_Row])
    except msgspec.DecodeError as error:
        raise FormatError(f"{path} has a broken header; stage the version again.") from error
    sane = all(row.width in (1, 2, 4, 8) and 0 <= row.changed <= row.words for row in rows)
    if not sane or at + sum(row.nbytes for row in rows) != size:
        raise FormatError(f"{path} does not hold what it lists; stage the version again.")
    return rows, at


def _change(row: _Row, data: np.ndarray[tuple[int], np.dtype[np.uint8]], path: Path) -> Change:
    first = row.changed * row.counts.itemsize
    second = first + row.changed * row.width
    positions: Words = data[:first].view(row.counts)
    if positions.size and (positions[-1] >= row.words or (positions[1:] <= positions[:-1]).any()):
        raise FormatError(f"{path} has positions outside of {row.name[:80]!r}; stage it again.")
    width = f"<u{row.width}"
    return Change(
        row.name, row.words, positions, data[first:second].view(width), data[second:].view(width)
    )
