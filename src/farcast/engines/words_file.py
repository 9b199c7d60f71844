"""Words to write into an engine, as a file between the sidecar and the engine's processes.

    what                                                                       bytes
    "fcw1"                                                                     4
    for each tensor: positions (ascending; u32, or u64 beyond 2^32 words),
        new words, old words; little endian, nothing between them              ...
    table: JSON, [[name, words of the tensor, bytes of a word, changed], ...]  n
    n, little endian                                                           4

The table comes last, so that a writer holds one tensor at a time.

The reader is given the file's digest over another way and checks it first, so what it reads is
what the sidecar wrote. It still checks every number: a mistake must not become a wild write.
"""

import struct
from collections.abc import Iterator
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
MAX_TABLE_BYTES = 1 << 26
"""A quarter of a million tensors with long names."""

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 22


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


class WordsWriter:
    """A new file of words. Not synced: it is of no use after a crash."""

    def __init__(self, path: Path) -> None:
        self._file = files.create(path, 0o600)
        self._digest = blake3()
        self._rows: list[_Row] = []
        self._at = 0
        self._put(MAGIC)

    def add(self, change: Change) -> None:
        row = _Row(change.name, change.words, change.new.itemsize, change.positions.size)
        self._rows.append(row)
        self._put(change.positions.astype(row.counts).tobytes())
        self._put(change.new.tobytes())
        self._put(change.old.tobytes())

    def finish(self) -> str:
        """Write the table; returns the digest of the file."""
        table = msgspec.json.encode(self._rows)
        self._put(table)
        self._put(_LENGTH.pack(len(table)))
        self.close()
        return self._digest.hexdigest()

    def close(self) -> None:
        """Let go of the file. Safe to repeat."""
        if self._file >= 0:
            files.close(self._file)
            self._file = -1

    def _put(self, data: bytes) -> None:
        self._digest.update(data)
        files.write_at(self._file, data, self._at)
        self._at += len(data)


def read_words(path: Path, digest: str) -> Iterator[Change]:
    """The changes of a file, one tensor in memory at a time. Raises `IntegrityError` if it is
    not the file of that digest, before it gives anything."""
    with files.opened(path) as file:
        size = files.identity_of(file).size
        _check_digest(file, size, digest, path)
        at = len(MAGIC)
        for row in _table(file, size, path):
            data = files.read_at(file, at, row.nbytes, path)
            at += row.nbytes
            yield _change(row, np.frombuffer(data, np.uint8), path)


def _check_digest(file: int, size: int, digest: str, path: Path) -> None:
    found = blake3()
    for at in range(0, size, _CHUNK):
        found.update(files.read_at(file, at, min(_CHUNK, size - at), path))
    if found.hexdigest() != digest:
        raise IntegrityError(f"{path} is not the file that was staged; stage the version again.")


def _table(file: int, size: int, path: Path) -> list[_Row]:
    least = len(MAGIC) + _LENGTH.size
    if size < least or bytes(files.read_at(file, 0, len(MAGIC), path)) != MAGIC:
        raise FormatError(f"{path} holds no staged words; stage the version again.")
    (length,) = _LENGTH.unpack(files.read_at(file, size - _LENGTH.size, _LENGTH.size, path))
    if length > min(MAX_TABLE_BYTES, size - least):
        raise FormatError(f"{path} holds no staged words; stage the version again.")
    try:
        table = bytes(files.read_at(file, size - _LENGTH.size - length, length, path))
        rows = msgspec.json.decode(table, type=list[_Row])
    except msgspec.DecodeError as error:
        raise FormatError(f"{path} has a broken table; stage the version again.") from error
    sane = all(row.width in (1, 2, 4, 8) and 0 <= row.changed <= row.words for row in rows)
    if not sane or least + length + sum(row.nbytes for row in rows) != size:
        raise FormatError(f"{path} does not hold what it lists; stage the version again.")
    return rows


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
