"""Reads the arrays of an npz that somebody else may have written.

Refuses pickles, and an array whose header asks for other bytes than follow it: numpy would take
the memory first. Whatever is wrong is one `FormatError`.
"""

import io
import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from farcast.errors import FormatError

Array = npt.NDArray[Any]

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError, RuntimeError)
"""RuntimeError: zipfile's word for what is encrypted, or packed in another way."""


class Arrays:
    """The arrays of an open npz, by their names."""

    def __init__(self, file: zipfile.ZipFile) -> None:
        self._file = file
        self._sizes = {info.filename: info.file_size for info in file.infolist()}

    def __contains__(self, key: str) -> bool:
        return f"{key}.npy" in self._sizes

    def read(self, key: str, largest: int) -> Array:
        """The array under `key`, of `largest` bytes at most."""
        if self._sizes[f"{key}.npy"] > largest + _MOST_HEADER:
            raise FormatError(f"The array {key} is larger than its tensor allows; record again.")
        return _parsed(self._file.read(f"{key}.npy"))


_MOST_HEADER = 1 << 16
"""Bytes; numpy's own headers of such arrays have 128."""


@contextmanager
def open_arrays(path: Path) -> Iterator[Arrays]:
    """The arrays in `path`; damage found while they are read is a `FormatError`."""
    try:
        with zipfile.ZipFile(path) as file:
            yield Arrays(file)
    except _DAMAGE as error:
        raise FormatError(
            f"{path} is damaged or does not match the files beside it; record again."
        ) from error


def _parsed(data: bytes) -> Array:
    stream = io.BytesIO(data)
    read_header = _HEADERS.get(np.lib.format.read_magic(stream))
    if read_header is None:
        raise ValueError("an array of another version")
    shape, by_columns, dtype = read_header(stream)
    left = len(data) - stream.tell()
    if dtype.hasobject or by_columns or dtype.itemsize * math.prod(shape) != left:
        raise ValueError("an array whose header does not tell what follows")
    return np.frombuffer(data, dtype, offset=stream.tell()).reshape(shape)
