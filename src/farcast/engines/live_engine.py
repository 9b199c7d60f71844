"""`EngineTarget`: an engine in other processes, as a place that a version lives in.

The sidecar decodes and verifies a version against its mirror of the engine's weights, hands the
engine the words that change, and lets it write them in a pause:

    begin     names, dtypes and shapes fit, or nothing happens
    add       new bits against the mirror: positions, new and old words
    seal      one file of words; every member compares the old ones with its memory, and is ready;
              the version is marked as seen, durably, so that a restart does not go back before it
    commit    pause, old words still there, write, caches, digests of the live words, label, resume
    settle    the mirror follows; what was kept is freed

A member that fails makes all of them go back. Until the engine confirmed that, it stays paused:
a half-written model answers nobody.

Refuses an engine that does not hold, word for word, the weights of the folder it was started with
(or those this sidecar gave it): without that nothing could be said of what it serves.
"""

import contextlib
import logging
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from blake3 import blake3

from farcast.delta import (
    AnyBits,
    TensorBits,
    Words,
    entry_of,
    nbytes_of,
    to_bits,
    word_bytes,
    words_of,
)
from farcast.engines.blocks import covered
from farcast.engines.http_engine import (
    UNKNOWN,
    InPlaceEngine,
    MemberLayout,
    Receipt,
    Whole,
    label_of,
    pause,
    resume,
)
from farcast.engines.mirror import Mirror
from farcast.engines.seen import PART, SeenMark
from farcast.engines.words_file import Change, WordsWriter, read_words
from farcast.errors import (
    EngineError,
    FarcastError,
    IntegrityError,
    TargetError,
    TargetUncertainError,
    TensorMismatchError,
)
from farcast.replica import Draft, Goal, Place, Target, files
from farcast.replica.layout import Layout, read_layout
from farcast.replica.live import check_fit
from farcast.types import TensorEntry, VersionRef

Caches = Literal["salted", "dropped"]
"""How prefixes cached under old weights are kept from new requests: each request's salt names
its version (the sidecar adds it), or the engine drops all of them at each commit."""

SAMPLE_BYTES = 1 << 22
"""Read back in each commit's pause beside the written words: a few milliseconds."""

_WORDS, _TENSORS = ".words", ".tensors"
"""How names of staged files end."""

_COMPARED = 1 << 20
"""Words compared at a time while staging."""

_log = logging.getLogger(__name__)


class EngineTarget(Target):
    """The engine that loaded the model in `folder`. `scratch` is for the mirror, staged words and
    the mark of the newest version seen: a folder of this replica's own, which outlives restarts,
    on a disk with room for the model once more.

    Each commit reads back every written word, and the digests of some whole tensors, `sample`
    bytes of them, rotating; None takes all, so that the root is recomputed in each pause.
    `verify()` recomputes it at any time, while the engine serves.
    """

    gives_copies = True

    def __init__(
        self,
        engine: InPlaceEngine,
        folder: Path,
        *,
        scratch: Path,
        caches: Caches = "salted",
        sample: int | None = SAMPLE_BYTES,
    ) -> None:
        super().__init__(check="all" if sample is None else "changed")
        self._engine = engine
        self._folder = folder
        self._scratch = scratch
        self._caches = caches
        self._sample = sample
        self._members: Sequence[MemberLayout] = ()
        self._places: dict[str, Place] = {}
        self._mirror = Mirror(scratch / "mirror", {})
        self._mark = SeenMark(scratch)
        self._own: set[Path] = set()
        self._known: Mapping[str, TensorEntry] = {}
        self._turn = 0

    @property
    def engine(self) -> InPlaceEngine:
        return self._engine

    @property
    def members(self) -> Sequence[MemberLayout]:
        """How each member of the engine holds the tensors; empty before the first `begin`."""
        return self._members

    @property
    def newest(self) -> VersionRef | None:
        """Kept in `scratch`: an engine that starts again has forgotten it."""
        with self._lock:
            if self._newest is None:
                self._newest = self._mark.read()
            return self._newest

    @property
    def run_id(self) -> str | None:
        ref = self.ref or self.newest
        return None if ref is None else ref.run_id

    def recognise(self, roots: Callable[[], Mapping[str, VersionRef]]) -> VersionRef | None:
        with self._lock:
            ref = super().recognise(roots)
            if self._members:
                self._require_finished(ref)
                # A sidecar that died in a commit's pause, before it wrote, left it standing.
                resume(self._engine)
            if ref is not None:
                self._mark.remember(ref)
            return ref

    def read(self, name: str) -> TensorBits:
        return self._mirror.read(name)

    def holds(self, name: str) -> bool:
        return name in self._places

    def holdings(self) -> Iterator[Mapping[str, TensorEntry]]:
        self._attach()
        yield self._known

    def forget(self) -> None:
        with self._lock:
            super().forget()
            self._members, self._known = (), {}

    def verify(self) -> str:
        """Recompute the root from the words that the engine holds."""
        with self._lock:
            ref = self.ref
            if ref is None:
                raise TargetError("The engine holds no known version yet; sync it first.")
            live = self.live_entries(self._entries)
            return self._same_root(ref, {**self._entries, **live})

    def live_entries(self, names: Collection[str]) -> dict[str, TensorEntry]:
        """Entries of `names` from what the engine holds now; those it has no place for are left
        out."""
        placed = [name for name in names if self._is_placed(name)]
        receipts = self._engine.receipts(placed)
        return {name: self._live_entry(name, receipts) for name in placed}

    # --- holes -------------------------------------------------------------------------------

    def _begin(self, goal: Goal) -> Draft:
        if not self._members:
            self._attach()
        placed = {goal.entries[name] for name in goal.entries if self._is_placed(name)}
        aliases = {name for name, entry in goal.entries.items() if entry in placed}
        check_fit(self._places, goal.entries, allow_unexpected=aliases)
        self._refuse_unwritable(goal, aliases)
        return _EngineDraft(goal, self)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        self._engine.open_update()
        pause(self._engine)
        try:
            yield
        finally:
            if self._uncertain is None:
                self._resume()
                self._engine.close_update()

    def _settle_on(self, ref: VersionRef, entries: Mapping[str, TensorEntry]) -> None:
        # After the digests, before the gate opens: what is labelled so was verified.
        self._engine.name_weights(label_of(ref))
        super()._settle_on(ref, entries)
        self._known = dict(entries)

    # --- attaching ---------------------------------------------------------------------------

    def _resume(self) -> None:
        try:
            resume(self._engine)
        except TargetUncertainError as error:
            self._uncertain = str(error)
            raise

    def _refuse_unwritable(self, goal: Goal, aliases: Collection[str]) -> None:
        """Nothing that changes may be left out silently."""
        passed = [
            repr(name)
            for name in sorted(self._places)
            if not (self._is_placed(name) or name in aliases or self._is_opaque(name))
            and goal.entries.get(name) != self._known.get(name)
        ]
        if passed:
            raise TensorMismatchError(
                f"The engine's loader passes over {len(passed)} changed tensors "
                f"({', '.join(passed[:10])}), so it would serve something else; start it with the "
                "model that the run trains. Nothing was written."
            )

    def _loaded_whole(self, goal: Goal) -> list[str]:
        """Changed tensors without a map, and all that may share a fused or packed form with one:
        the tensors of its layer, by their names."""
        changed = [
            name
            for name in goal.changed
            if self._is_opaque(name) and goal.entries[name] != self._known.get(name)
        ]
        layers = {_layer_of(name) for name in changed}
        whole = sorted(name for name in self._places if _layer_of(name) in layers)
        if whole:
            _log.warning(
                "%d tensors of %s are loaded whole, since the engine holds %d changed ones in a "
                "form that can't be written in place nor read back: %s",
                *(len(whole), goal.ref, len(changed), self.why_opaque(changed[0])),
            )
        return whole

    def why_opaque(self, name: str) -> str:
        """The reason for which a tensor can't be written in place; empty if it can."""
        return next((m.opaque[name] for m in self._members if name in m.opaque), "")

    def _is_opaque(self, name: str) -> bool:
        return any(name in member.opaque for member in self._members)

    def _attach(self) -> None:
        """Learn where everything lies, and make sure of what the engine holds: the mirror of an
        earlier life of this sidecar, or the folder it was started with."""
        with files.translated(self._folder):
            layout = read_layout(self._folder)
        tensors = _FolderTensors(layout)
        self._places = tensors.places()
        self._members = self._engine.attach(self._places)
        self._check_covered()
        with files.translated(self._scratch):
            self._scratch.mkdir(parents=True, exist_ok=True)
            self._clean()
        self._mirror = Mirror(self._scratch / "mirror", self._places)
        receipts = self._engine.receipts([name for name in self._places if self._is_placed(name)])
        if not self._mirror.exists or self._unlike(receipts):
            self._mirror.create(tensors)
            self._require_like(receipts)

    def _require_finished(self, ref: VersionRef | None) -> None:
        """Opaque tensors can't be hashed, so there the members' own word has to tell that no
        commit was left half done by a sidecar that died in it."""
        if not any(member.opaque for member in self._members):
            return
        told = {receipt.label for receipt in self._engine.receipts()}
        if told not in ({UNKNOWN}, {label_of(ref)}):
            self._uncertain = (
                "The engine was left in the middle of a commit, and holds tensors that can't be "
                "read back; start it again."
            )
            raise TargetUncertainError(self._uncertain)

    def _require_like(self, receipts: Sequence[Receipt]) -> None:
        wrong = self._unlike(receipts)
        if wrong:
            self._members = ()
            raise TensorMismatchError(
                f"The engine does not hold the weights of {self._folder}: {sorted(wrong)[:5]} "
                f"and {max(0, len(wrong) - 5)} more differ; start it with that folder again."
            )

    def _clean(self) -> None:
        """Remove what earlier lives staged and could not remove: each may be of the model's
        size."""
        for path in self._scratch.iterdir():
            if path.suffix in (_WORDS, _TENSORS, PART) and path not in self._own:
                files.remove(path)

    def _unlike(self, receipts: Sequence[Receipt]) -> list[str]:
        """Tensors of which some member's part is not the mirror's. If there are none, the
        mirror's entries are what is known of the engine."""
        known, wrong = {}, []
        for name in self._places:
            bits = self._mirror.read(name)
            known[name] = entry_of(bits)
            parts = self._parts(name, words_of(bits), known[name])
            if self._is_placed(name) and self._live_entry(name, receipts, parts) != known[name]:
                wrong.append(name)
        self._known = {} if wrong else known
        return wrong

    def _check_covered(self) -> None:
        """Every placed tensor is held completely by the members together."""
        for name in self._places:
            blocks = [b for member in self._members for b in member.blocks.get(name, ())]
            if blocks and covered(blocks) != self._words(name):
                raise TensorMismatchError(
                    f"The engine's members hold {covered(blocks)} of the {self._words(name)} "
                    f"words of {name[:80]!r}; its loader leaves some out, so it can't be updated "
                    "in place."
                )

    def _words(self, name: str) -> int:
        place = self._places[name]
        return nbytes_of(place.dtype, place.shape) // word_bytes(place.dtype)

    def _is_placed(self, name: str) -> bool:
        return any(name in member.blocks for member in self._members)

    # --- identity ----------------------------------------------------------------------------

    def _parts(self, name: str, words: Words, entry: TensorEntry) -> "_Parts":
        """What each member has to hold of a tensor with these words."""
        count = self._words(name)
        return _Parts(
            entry,
            {
                layout.member: tuple(
                    entry.digest if block.is_all_of(count) else _digest(block.take(words))
                    for block in layout.blocks.get(name, ())
                )
                for layout in self._members
            },
        )

    def _live_entry(
        self, name: str, receipts: Sequence[Receipt], parts: "_Parts | None" = None
    ) -> TensorEntry:
        """The entry of what the members hold. Where one member holds all of the tensor as it is,
        that is the digest of the live words; else the known one if every part is right."""
        place = self._places[name]
        found = {receipt.member: receipt.digests.get(name, ()) for receipt in receipts}
        blocks = [b for member in self._members for b in member.blocks.get(name, ())]
        if len(blocks) == 1 and blocks[0].is_all_of(self._words(name)):
            (digest,) = [digest for digests in found.values() for digest in digests]
            return TensorEntry(place.dtype, place.shape, digest)
        if parts is None:
            bits = self._mirror.read(name)
            parts = self._parts(name, words_of(bits), entry_of(bits))
        if found == parts.digests:
            return parts.entry
        odd = "".join(digest for digests in found.values() for digest in digests)
        return TensorEntry(place.dtype, place.shape, blake3(odd.encode()).hexdigest())

    def _sampled(self, names: Collection[str]) -> list[str]:
        """Which of `names` are read back whole this time."""
        placed = sorted(name for name in names if self._is_placed(name))
        if self._sample is None or not placed:
            return placed
        chosen: list[str] = []
        left = self._sample
        for step in range(len(placed)):
            name = placed[(self._turn + step) % len(placed)]
            place = self._places[name]
            left -= nbytes_of(place.dtype, place.shape)
            if chosen and left < 0:
                break
            chosen.append(name)
        self._turn = (self._turn + len(chosen)) % len(placed)
        return chosen


class _Parts(NamedTuple):
    """A tensor, and the digests of the parts of it that each member has to hold."""

    entry: TensorEntry
    digests: Mapping[int, tuple[str, ...]]


class _FolderTensors(Mapping[str, TensorBits]):
    """The tensors of a checkpoint folder, read when they are asked for."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def __getitem__(self, name: str) -> TensorBits:
        return self._layout.shards[self._layout.where[name]].read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.where)

    def __len__(self) -> int:
        return len(self._layout.where)

    def places(self) -> dict[str, Place]:
        spans = ((n, self._layout.shards[file].spans[n]) for n, file in self._layout.where.items())
        return {name: Place(span.dtype, span.shape) for name, span in spans}


class _EngineDraft(Draft):
    """The words to write, in a file that grows with each tensor."""

    def __init__(self, goal: Goal, target: EngineTarget) -> None:
        super().__init__(goal, awaited=[name for name in goal.changed if target.holds(name)])
        self._target = target
        self._label = label_of(goal.ref)
        self._parts: dict[str, _Parts] = {}
        self._words = target._scratch / f"{secrets.token_hex(8)}{_WORDS}"
        self._own = {self._words, self._words.with_suffix(_TENSORS)}
        target._own |= self._own
        with files.translated(self._words):
            self._writer = WordsWriter(self._words)
        self._digest = ""
        self._whole = target._loaded_whole(goal)
        places = {name: target._places[name] for name in self._whole}
        self._tensors = Mirror(self._words.with_suffix(_TENSORS), places)
        if self._whole:
            self._tensors.allocate()
        self._staged = self._is_written = False

    def _add(self, name: str, bits: AnyBits) -> None:
        bits = to_bits(bits)
        new = words_of(bits)
        self._parts[name] = self._target._parts(name, new, self.goal.entries[name])
        if name in self._whole:
            self._tensors.put(name, bits)
            return
        change = self._change(name, new)
        if change.positions.size:
            with files.translated(self._words):
                self._writer.add(change)

    def _change(self, name: str, new: Words) -> Change:
        """Compared with the mirror in pieces, so that the tensor is in memory only once."""
        kind = np.uint32 if new.size <= 1 << 32 else np.uint64
        positions, old_words = [np.empty(0, kind)], [new[:0]]
        for start, old in self._target._mirror.pieces(name, _COMPARED):
            found = np.flatnonzero(new[start : start + old.size] != old)
            positions.append((found + start).astype(kind))
            old_words.append(old[found])
        where: Words = np.concatenate(positions)
        return Change(name, new.size, where, new[where], np.concatenate(old_words))

    def _seal(self) -> None:
        with files.translated(self._words):
            self._digest = self._writer.finish()
        self._staged = True
        self._target._engine.stage(self._words, self._digest, self._label, self._whole_ones())
        # Seen, whether or not its commit goes well. Not in the pause, since it waits for a disk.
        self._target._mark.remember(self.goal.ref)

    def _whole_ones(self) -> Whole | None:
        if not self._whole:
            return None
        target, entries = self._target, self.goal.entries
        before = {name: target._known[name] for name in self._whole}
        for name in self._whole:
            if name not in self.goal.changed:
                self._tensors.put(name, target._mirror.read(name))
        return Whole(
            file=str(self._tensors.path),
            before=str(target._mirror.path),
            entries={name: entries[name] for name in self._whole},
            entries_before=before,
        )

    def check_unmoved(self) -> None:
        """The engine compares each old word just before it writes the new one: a pass less."""

    def write(self) -> None:
        self._is_written = True
        self._target._engine.write(self._label)
        self._drop_caches()

    def undo(self) -> None:
        self._target._engine.undo(self._label)
        self._is_written = False
        self._drop_caches()

    def read_back(self, names: Collection[str]) -> Mapping[str, TensorEntry]:
        target = self._target
        sampled = target._sampled(names)
        receipts = target._engine.receipts(sampled)
        label = self._label if self._is_written else label_of(target._ref)
        strangers = [receipt.member for receipt in receipts if receipt.label != label]
        if self._is_written and strangers:
            raise IntegrityError(
                f"Members {strangers} of the engine do not hold {self.goal.ref}; it is undone in "
                "all of them."
            )
        parts = self._parts if self._is_written else {}
        return {name: target._live_entry(name, receipts, parts.get(name)) for name in sampled}

    def settle(self) -> None:
        try:
            mirror = self._target._mirror
            for change in read_words(self._words, self._digest):
                mirror.write(change.name, change.positions, change.new)
            for name in self._whole:
                mirror.put(name, self._tensors.read(name))
        except FarcastError as error:  # the commit stands; the next stage will find it out
            _log.error("The mirror of the engine could not be kept up: %s", error)

    def _drop_caches(self) -> None:
        if self._target._caches == "dropped" and self._target._engine.drop_caches() is not True:
            raise TargetError(
                "The engine did not confirm that it dropped its cached prefixes, so the version "
                "is not reported; look into its log."
            )

    def _discard(self) -> None:
        self._writer.close()
        self._parts.clear()
        files.remove(self._words)
        files.remove(self._tensors.path)
        self._target._own -= self._own
        if self._staged:
            try:
                self._target._engine.drop(self._label)
            except EngineError as error:
                _log.warning("The engine may keep words of %s: %s", self.goal.ref, error)


def _layer_of(name: str) -> str:
    """What tensors that an engine may fuse have in common: all up to the first number, and it."""
    parts = name.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


def _digest(words: Words) -> str:
    return blake3(np.ascontiguousarray(words).view(np.uint8).data).hexdigest()
