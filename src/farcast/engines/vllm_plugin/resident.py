"""The weights of one vLLM process, changed word by word.

    staging     positions in the checkpoint become positions in memory, the old words are compared
                with the live ones; in a thread of its own, while the engine serves
    writing     new words are written and read back; on any failure the old ones are written
    undoing     the old words are written again and read back

Refuses to write to memory that was exchanged since it was traced, and anything not staged.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from blake3 import blake3

from farcast.delta import Words, device_bits, entry_of, from_bits
from farcast.engines.blocks import Block
from farcast.engines.http_engine import UNKNOWN, MemberLayout, Receipt, Whole
from farcast.engines.mirror import Mirror
from farcast.engines.vllm_plugin.exchange import exchange, holds, put, warm_up
from farcast.engines.vllm_plugin.holders import Holders
from farcast.engines.vllm_plugin.tracing import Trace, trace
from farcast.engines.words_file import Change, read_words
from farcast.errors import (
    FarcastError,
    IntegrityError,
    TargetChangedError,
    TargetError,
    TargetUncertainError,
)
from farcast.replica import Place

_CHUNK_ROWS = 1 << 22
"""Words hashed at a time where they have to be brought into order, or to the host from a device
that has no hash of its own."""


class _Write(NamedTuple):
    """Places in one memory with the words to write and those before; all on its device."""

    memory: int
    places: torch.Tensor
    new: torch.Tensor
    old: torch.Tensor


class _Staged(NamedTuple):
    label: str
    writes: list[_Write]
    whole: Whole | None


Load: TypeAlias = Callable[[Iterator[tuple[str, torch.Tensor]]], None]
"""Loads whole checkpoint tensors into a model that serves."""


class Resident:
    """Of one process, for one model. One thread at a time, except for staging's own."""

    def __init__(self, model: Any, member: int, load: Load) -> None:
        self._model = model
        self._member = member
        self._load = load
        self._trace: Trace | None = None
        self.places: Mapping[str, Place] = {}
        self._holders = Holders(model, [])
        self._label = self._label_before = UNKNOWN
        self._staged: _Staged | None = None
        self._written: _Staged | None = None
        self._thread: threading.Thread | None = None
        self._failure: FarcastError | None = None
        self._uncertain = False

    # --- attaching ---------------------------------------------------------------------------

    def attach(
        self, places: Mapping[str, Place], dtypes: Mapping[str, torch.dtype]
    ) -> MemberLayout:
        """Trace the model's loader."""
        self._join()
        self._staged = self._written = None
        found = trace(self._model, places, dtypes)
        self.places = dict(places)
        warm_up(found.memories)
        self._trace = found
        self._holders = Holders(self._model, found.memories)
        return MemberLayout(self._member, found.blocks, found.opaque, found.skipped)

    # --- staging -----------------------------------------------------------------------------

    def begin_stage(self, words: Path, digest: str, label: str, whole: Whole | None = None) -> None:
        """Start to stage in a thread; `stage_state` tells when it is ready."""
        self._require_traced()
        self._join()
        self._staged, self._failure = None, None
        self._thread = threading.Thread(
            target=self._stage,
            args=(words, digest, label, whole),
            name="farcast-stage",
            daemon=True,
        )
        self._thread.start()

    def stage_state(self, label: str) -> str:
        """ "busy" or "ready". Raises what staging failed with."""
        if self._thread is not None and self._thread.is_alive():
            return "busy"
        if self._failure is not None:
            raise self._failure
        self._require_staged(label)
        return "ready"

    def _stage(self, words: Path, digest: str, label: str, whole: Whole | None) -> None:
        try:
            writes: list[_Write] = []
            for change in read_words(words, digest):
                writes.extend(self._writes_of(change))
            if whole is not None:  # read once now, so that the pause finds no damage
                for new in (False, True):
                    deque(self._tensors_of(whole, new=new), maxlen=0)
            self._staged = _Staged(label, writes, whole)
        except FarcastError as error:
            self._failure = error
        except Exception as error:  # noqa: BLE001 - a thread's failure must reach its caller
            self._failure = TargetError(f"Staging failed ({type(error).__name__}: {error}).")

    def _writes_of(self, change: Change) -> Iterator[_Write]:
        traced = self._require_traced()
        if change.name not in traced.blocks:
            if change.name in traced.opaque or change.name not in traced.skipped:
                raise TargetError(f"{change.name[:80]!r} has no place in this model to write to.")
            return
        for block in traced.blocks[change.name]:
            chosen, places = block.find(change.positions)
            if not places.size:
                continue
            write = self._write_of(block, places, change.new[chosen], change.old[chosen])
            if not holds(traced.memories[write.memory], write.places, write.old):
                raise TargetChangedError(
                    f"The engine does not hold the words of {change.name[:80]!r} that the new "
                    "version starts from; attach to it anew."
                )
            yield write

    def _write_of(self, block: Block, places: Any, new: Words, old: Words) -> _Write:
        memory = self._require_traced().memories[block.memory]
        narrow = np.int32 if memory.numel() < 1 << 31 else np.int64

        def moved(array: Any) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(memory.device)

        kept = _signed(new), _signed(old)
        return _Write(block.memory, moved(places.astype(narrow)), *map(moved, kept))

    # --- writing -----------------------------------------------------------------------------

    def write(self, label: str) -> None:
        """Write what was staged under `label`, if the live words are still those it starts from.
        After an error but `TargetUncertainError` the old words are there."""
        try:
            staged = self._require_staged(label)
            self._require_unmoved()
            self._written, self._staged = staged, None
            try:
                for write in staged.writes:
                    self._exchange(write)
                if staged.whole is not None:
                    self._load(self._tensors_of(staged.whole, new=True))
                    self._require_unmoved()
            except BaseException:
                self.undo(label)
                raise
            self._label_before, self._label = self._label, label
        except FarcastError as error:
            self._failure = error
            raise

    def undo(self, label: str) -> None:
        """Restore the old words of `label`, if any were overwritten."""
        if self._staged is not None and self._staged.label == label:
            return  # nothing of it was written
        written = self._written
        if written is None or written.label != label:
            raise TargetError(f"{label!r} was not written here, so it can't be undone.")
        try:
            self._require_unmoved()
            self._restore(written)
        except BaseException as error:
            self._uncertain = True
            raise TargetUncertainError(
                "The old words could not be restored; replace this engine."
            ) from error
        self._written, self._staged = None, written
        if self._label == label:
            self._label = self._label_before

    def raise_failure(self) -> None:
        """Raise what the last `write` failed with: vLLM's own route loses it."""
        if self._failure is not None:
            raise self._failure

    def drop(self, label: str) -> None:
        """Free what was kept for `label`."""
        self._join()
        for kept in ("_staged", "_written"):
            held: _Staged | None = getattr(self, kept)
            if held is not None and held.label == label:
                setattr(self, kept, None)

    def _exchange(self, write: _Write) -> None:
        """Old words out, new ones in, read back."""
        memory = self._require_traced().memories[write.memory]
        outcome = exchange(memory, write.places, write.old, write.new)
        if outcome == 1:
            raise TargetChangedError(
                "Somebody else wrote into the engine's weights since the version was staged; "
                "stage it again."
            )
        if outcome:
            raise TargetError("A word read back is not the one that was written.")

    def _tensors_of(self, whole: Whole, *, new: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors to load, each read and verified when it is asked for."""
        entries = whole.entries if new else whole.entries_before
        places = {name: self.places[name] for name in entries} if new else self.places
        source = Mirror(Path(whole.file if new else whole.before), places)
        for name, entry in entries.items():
            bits = source.read(name)
            if entry_of(bits) != entry:
                raise IntegrityError(
                    f"{name[:80]!r} is not on disk what the version has; stage it again."
                )
            yield name, from_bits(bits, like=torch.empty(0))

    def _restore(self, staged: _Staged) -> None:
        if staged.whole is not None:
            self._load(self._tensors_of(staged.whole, new=False))
        memories = self._require_traced().memories
        # Backwards: a word that was written twice was old before the first time.
        for write in reversed(staged.writes):
            put(memories[write.memory], write.places, write.old)
        for write in staged.writes:
            if not holds(memories[write.memory], write.places, write.old):
                raise TargetError("An old word read back is not the one that was restored.")

    # --- identity ----------------------------------------------------------------------------

    def receipt(self, names: Sequence[str]) -> Receipt:
        """What is held now, with digests of the live words of each block of `names`."""
        if self._uncertain:
            raise TargetUncertainError("This engine's weights are not known; replace it.")
        traced = self._require_traced()
        self._require_unmoved()
        digests = {
            name: tuple(self._digest(block) for block in traced.blocks[name])
            for name in names
            if name in traced.blocks
        }
        return Receipt(self._member, self._label, digests)

    def _digest(self, block: Block) -> str:
        memory = self._require_traced().memories[block.memory]
        if block.is_run:
            view = memory[block.place : block.place + block.count]
        else:
            view = memory.as_strided(block.sizes, block.place_steps, block.place)
        placed = device_bits(view)
        if placed is not None:
            return placed.digest()
        hasher = blake3()
        rows = view.shape[0] if view.ndim else 1
        step = max(1, _CHUNK_ROWS // max(1, view.numel() // max(1, rows)))
        for start in range(0, rows, step):
            part = view[start : start + step] if view.ndim else view
            hasher.update(part.contiguous().cpu().numpy().reshape(-1).view(np.uint8).data)
        return hasher.hexdigest()

    # --- inside ------------------------------------------------------------------------------

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _require_staged(self, label: str) -> _Staged:
        if self._staged is None or self._staged.label != label:
            raise TargetError(f"{label!r} is not staged here; stage it again.")
        return self._staged

    def _require_traced(self) -> Trace:
        if self._trace is None:
            raise TargetError("Nobody attached to this engine yet; attach first.")
        return self._trace

    def _require_unmoved(self) -> None:
        # Flat views keep their storage alive, so an exchanged parameter would go unnoticed.
        if not self._holders.still_hold():
            raise TargetChangedError(
                "The engine exchanged tensors of its model since it was attached to; attach anew."
            )


def _signed(words: Words) -> Any:
    """As torch's integers: only bytes are unsigned there."""
    return words if words.itemsize == 1 else words.view(f"i{words.itemsize}")
