"""`EngineFolder`: a checkpoint folder and the server that serves what is in it.

The folder switches as any checkpoint folder does, crash-safe; then the paused engine reads it
again, names what it holds, and its first values of a changed tensor are compared with the folder.
If any of that fails the folder goes back and the engine reads the old version again; only when
that fails too is the engine uncertain.

Refuses to call a version live that the engine does not name itself.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from farcast.delta import TensorBits
from farcast.engines.http_engine import ReloadingEngine, label_of, pause, resume
from farcast.errors import IntegrityError, TargetError, TargetUncertainError
from farcast.replica import CheckpointDirectory, Draft, files
from farcast.replica.layout import read_layout
from farcast.types import TensorEntry, VersionRef

SAMPLED_TENSORS = 16
SAMPLED_VALUES = 4096
"""Compared at each commit, of tensors that change: a reload that did nothing shows there."""

_KINDS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}


class EngineFolder(CheckpointDirectory):
    """The folder in `path`, which `engine` reads. `drops_caches`: at each commit the engine has to
    confirm that it forgot its cached prefixes."""

    def __init__(self, engine: ReloadingEngine, path: str | Path, *, drops_caches: bool) -> None:
        super().__init__(path)
        self._engine = engine
        self._drops_caches = drops_caches

    def adopt(self) -> VersionRef | None:
        """Let the engine read what the folder already holds; returns which version that is."""
        with self._lock:
            ref = self.ref
            if ref is not None:
                with self._exclusive():
                    self._reload(ref)
            return ref

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        pause(self._engine)
        try:
            yield
        finally:
            if self._uncertain is None:
                self._resume()

    def _confirm(self, draft: Draft, ref: VersionRef, entries: Mapping[str, TensorEntry]) -> None:
        super()._confirm(draft, ref, entries)
        self._reload(ref)
        self._compare(ref, sorted(draft.goal.changed & entries.keys())[:SAMPLED_TENSORS])

    def _reload(self, ref: VersionRef) -> None:
        label = label_of(ref)
        self._engine.reload(self.path, label)
        if self._drops_caches and self._engine.drop_caches() is not True:
            raise TargetError(
                "The engine did not confirm that it dropped its cached prefixes, so the version "
                "is not reported; look into its log."
            )
        held = self._engine.label()
        if held != label:
            raise IntegrityError(
                f"The engine was told to load {ref} and names what it holds {held[:80]!r}; "
                "look into its log."
            )

    def _compare(self, ref: VersionRef, names: Sequence[str]) -> None:
        with files.translated(self.path):
            layout = read_layout(self.path)
            held = {name: layout.shards[layout.where[name]].read(name) for name in names}
        for name, bits in held.items():
            expected = first_values(bits, SAMPLED_VALUES)
            live = None if expected is None else self._engine.sample(name, SAMPLED_VALUES)
            if live is None or expected is None:
                continue
            if not np.array_equal(np.array(live), np.array(expected), equal_nan=True):
                raise IntegrityError(
                    f"The engine was told to load {ref}, but {name[:80]!r} holds other values "
                    "than the folder; look into its log."
                )

    def _resume(self) -> None:
        try:
            resume(self._engine)
        except TargetUncertainError as error:
            self._uncertain = str(error)
            raise


def first_values(bits: TensorBits, length: int) -> list[float] | None:
    """The first values of a tensor, None if its dtype has no plain values."""
    if bits.dtype == "BF16":
        words = bits.data[: 2 * length].view("<u2").astype(np.uint32) << 16
        return [float(value) for value in words.view(np.float32)]
    kind = _KINDS.get(bits.dtype)
    if kind is None:
        return None
    size = np.dtype(kind).itemsize
    return [float(value) for value in bits.data[: size * length].view(kind)]
