"""The served tensors of an engine as a file beside it: what the next delta is decoded against.

An engine's own memory is fused, sharded and out of reach, so the sidecar keeps the same bits
once more, on disk, in checkpoint order. It is a cache without promises: nothing is synced, and
what it gives is verified where it is used (a wrong base yields a wrong digest).

Read with `pread`, never mapped: a file that shrinks gives an error, not a signal.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from farcast.delta import TensorBits, nbytes_of, word_bytes, words_of
from farcast.errors import TargetError
from farcast.replica import Place, files
from farcast.replica.words import Positions, Words


class Mirror:
    """One file with room for the tensors of `places`, in the order of their names."""

    def __init__(self, path: Path, places: Mapping[str, Place]) -> None:
        self._path = path
        self._places = dict(places)
        self._starts: dict[str, int] = {}
        size = 0
        for name, place in sorted(places.items()):
            self._starts[name] = size
            size += nbytes_of(place.dtype, place.shape)
        self._size = size

    @property
    def path(self) -> Path:
        return self._path

    @property
    def exists(self) -> bool:
        found = files.identity(self._path)
        return found is not None and found.size == self._size

    def allocate(self) -> None:
        """Make the file, without content."""
        with files.translated(self._path):
            file = files.create(self._path, 0o600)
            try:
                files.resize(file, self._size)
            finally:
                files.close(file)

    def put(self, name: str, bits: TensorBits) -> None:
        """Write a whole tensor."""
        with files.translated(self._path), files.writable(self._path) as file:
            files.write_at(file, bits.data.data, self._starts[name])

    def create(self, source: Mapping[str, TensorBits]) -> None:
        """Write the file anew. `source` gives each tensor when it is asked for it."""
        files.remove(self._path)
        self.allocate()
        for name in self._starts:
            self.put(name, source[name])

    def read(self, name: str) -> TensorBits:
        """A copy of the tensor's bits."""
        place = self._place(name)
        size = nbytes_of(place.dtype, place.shape)
        with files.translated(self._path), files.opened(self._path) as file:
            data = files.read_at(file, self._starts[name], size, self._path)
        return TensorBits(place.dtype, place.shape, np.frombuffer(data, np.uint8))

    def pieces(self, name: str, count: int) -> Iterator[tuple[int, Words]]:
        """The tensor's words, `count` at a time, each piece with where it begins."""
        place = self._place(name)
        width = word_bytes(place.dtype)
        size = nbytes_of(place.dtype, place.shape)
        with files.translated(self._path), files.opened(self._path) as file:
            for at in range(0, size, count * width):
                length = min(count * width, size - at)
                data = files.read_at(file, self._starts[name] + at, length, self._path)
                words: Words = np.frombuffer(data, f"<u{width}")
                yield at // width, words

    def write(self, name: str, positions: Positions | Words, words: Words) -> None:
        """Change some words of a tensor."""
        bits = self.read(name)
        words_of(bits)[positions] = words
        self.put(name, bits)

    def _place(self, name: str) -> Place:
        place = self._places.get(name)
        if place is None:
            raise TargetError(f"The engine's model has no tensor {name[:80]!r}.")
        return place
