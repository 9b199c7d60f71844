"""The next version of a checkpoint folder, from its first staged byte to the renamed pointer.

The order of steps is the one in `farcast.replica.directory`; this module is the steps.
"""

import contextlib
import secrets
import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from farcast.delta import AnyBits, TensorBits, entry_of, to_bits
from farcast.errors import IntegrityError, TargetChangedError, TargetError
from farcast.replica import files
from farcast.replica.base import Draft, Goal, later
from farcast.replica.layout import (
    INDEX,
    SINGLE,
    Layout,
    encode_index,
    read_layout,
    shard_name,
)
from farcast.replica.shards import DEFAULT_METADATA, Shard, Span, plan_shard, read_shard
from farcast.replica.workplace import State, Workplace
from farcast.types import TensorEntry, VersionRef


@dataclass(kw_only=True)
class _NewFile:
    """A file on its way: `path` in the staging folder, `name` once it is in place."""

    name: str
    path: Path
    file: int
    spans: Mapping[str, Span]
    identity: files.FileIdentity | None = None
    """Of the file whose every tensor was read back and verified."""
    placed: bool = False


class DirectoryDraft(Draft):
    """`groups` are the tensors of each file; a file in which nothing changes stays."""

    def __init__(
        self,
        goal: Goal,
        layout: Layout,
        work: Workplace,
        *,
        groups: Mapping[str, list[str]],
        rehash: bool,
        newest: VersionRef | None,
    ) -> None:
        super().__init__(goal, awaited=sorted(goal.changed))
        self._layout = layout
        self._work = work
        self._rehash = rehash
        self._newest = newest
        single = layout.is_single or (layout.pointer is None and len(groups) == 1)
        self._pointer = layout.folder / (SINGLE if single else INDEX)
        self._kept = {} if single else {g: n for g, n in groups.items() if self._stays(g, n)}
        self._files: list[_NewFile] = []
        self._home: dict[str, _NewFile] = {}
        self._staged_pointer: Path | None = None
        self._new_pointer: files.FileIdentity | None = None
        self._backup: Path | None = None
        # A draft that is forgotten gives the folder back too; what it wrote, the next one removes.
        self._unlock = weakref.finalize(self, files.close, work.enter())
        self._unlock.atexit = False  # the lock ends with the process
        try:
            work.clean(used=layout.shards.keys())
            rewritten = {g: n for g, n in groups.items() if g not in self._kept}
            self._open_files(rewritten, single=single)
        except BaseException:
            self.discard()
            raise

    # --- staging -----------------------------------------------------------------------------

    def _stays(self, group: str, names: Iterable[str]) -> bool:
        shard = self._layout.shards.get(group)
        # By what is in the file, not by what the index says of it: engines load all of a file, and
        # a tensor that the index places elsewhere would be an old one.
        held = set() if shard is None else shard.spans.keys()
        return held == set(names) and held.isdisjoint(self.goal.changed)

    def _open_files(self, groups: Mapping[str, list[str]], *, single: bool) -> None:
        token = secrets.token_hex(8)
        for number, (group, names) in enumerate(groups.items(), start=1):
            before = self._layout.shards.get(group)
            header, spans = plan_shard(
                {name: self.goal.entries[name] for name in names},
                DEFAULT_METADATA if before is None else before.metadata,
            )
            path = self._work.staged()
            mode = None if before is None else files.mode_of(before.path)
            new = _NewFile(
                name=SINGLE if single else shard_name(self.goal.ref.version, token, number),
                path=path,
                file=files.create(path, mode),
                spans=spans,
            )
            self._files.append(new)
            self._home.update(dict.fromkeys(names, new))
            files.write_at(new.file, header, 0)

    def _add(self, name: str, bits: AnyBits) -> None:
        with files.translated(self._layout.folder):
            self._put(name, to_bits(bits))

    def _put(self, name: str, bits: TensorBits) -> None:
        new = self._home[name]
        files.write_at(new.file, bits.data.data, new.spans[name].start)

    def _seal(self) -> None:
        """Complete the files, make them durable, and verify them as they lie on the disk."""
        with files.translated(self._layout.folder):
            for name in self._home.keys() - self.goal.changed:
                self._put(name, self._layout.shards[self._layout.where[name]].read(name))
            for new in self._files:
                files.sync(new.file)
                files.close(new.file)
                new.file = -1
                new.identity = self._verified(new.path)
            self._stage_pointer()

    def _verified(self, path: Path) -> files.FileIdentity:
        shard = read_shard(path)
        for name in shard.spans:
            if entry_of(shard.read(name)) != self.goal.entries[name]:
                raise IntegrityError(
                    f"The tensor {name[:80]!r} read back differently from {path}; "
                    "check the disk. The old version is untouched."
                )
        return shard.identity

    def _stage_pointer(self) -> None:
        if self._pointer.name == SINGLE:
            (new,) = self._files
            self._staged_pointer = new.path
        else:
            where = {name: group for group, names in self._kept.items() for name in names}
            where |= {name: new.name for name, new in self._home.items()}
            size = sum(span.size for new in self._files for span in new.spans.values())
            size += sum(
                self._layout.shards[file].spans[name].size
                for file, names in self._kept.items()
                for name in names
            )
            self._staged_pointer = self._work.staged()
            files.write_new(
                self._staged_pointer,
                encode_index(where, self._layout.metadata, size),
                files.mode_of(self._pointer),
            )
        self._new_pointer = files.identity(self._staged_pointer)

    # --- the switch --------------------------------------------------------------------------

    def check_unmoved(self) -> None:
        with files.translated(self._layout.folder):
            moved = self._layout.moved()
        if moved is not None:
            raise TargetChangedError(
                f"Somebody else replaced {self._layout.folder / moved} since this version was "
                "staged; nothing was written. Sync again to start from what is there now."
            )

    def write(self) -> None:
        folder, staged = self._layout.folder, self._staged_pointer
        if staged is None:
            raise TargetError(f"The draft of {self.goal.ref} was not sealed; stage it again.")
        with files.translated(folder):
            self._work.write_state(self._state(done=False))
            if self._pointer.name == INDEX:
                for new in self._files:
                    files.move(new.path, folder / new.name)
                    new.placed = True
                files.sync_folder(folder)
            if self._layout.pointer is not None:
                backup = self._work.staged()
                self._backup = backup if files.keep_copy(self._pointer, backup) else None
            # Everything the pointer leads to is durable and verified: this is the commit point.
            files.move(staged, self._pointer)
            files.sync_folder(folder)

    def read_back(self, names: Collection[str]) -> Mapping[str, TensorEntry]:
        """What the folder holds now. A file that was hashed and is still the same is not hashed
        again, unless every commit is to read everything."""
        with files.translated(self._layout.folder):
            layout = read_layout(self._layout.folder)
            absent = sorted(set(names) - layout.where.keys())
            if absent:
                raise IntegrityError(
                    f"{self._layout.folder} lacks {absent[0][:80]!r} after it was written; "
                    "somebody else writes to it. Do not serve from it."
                )
            return {name: self._entry(layout.shards[layout.where[name]], name) for name in names}

    def _entry(self, shard: Shard, name: str) -> TensorEntry:
        new = self._home.get(name)
        if not self._rehash and new is not None and new.identity == shard.identity:
            return self.goal.entries[name]
        return entry_of(shard.read(name))

    def undo(self) -> None:
        with files.translated(self._layout.folder):
            if self._new_pointer == files.identity(self._pointer):
                self._restore_pointer()
            for new in self._files:
                if new.placed:
                    files.remove(self._layout.folder / new.name)
            files.sync_folder(self._layout.folder)

    def _restore_pointer(self) -> None:
        if self._layout.pointer is None:
            files.remove(self._pointer)
        elif self._backup is not None:
            files.move(self._backup, self._pointer)
        else:
            raise TargetError(
                f"The old {self._pointer.name} could not be kept, since this file system has no "
                "hard links."
            )
        files.sync_folder(self._layout.folder)

    # --- afterwards --------------------------------------------------------------------------

    def _state(self, *, done: bool) -> State:
        gone = self._layout.shards.keys() - self._kept.keys() - {SINGLE}
        base = self.goal.base
        return State(
            run_id=self.goal.ref.run_id,
            current=self.goal.ref if done else base,
            pending=None if done else self.goal.ref,
            newest=later(self._newest, self.goal.ref) if done else self._newest,
            obsolete=() if done else tuple(sorted(gone)),
        )

    def settle(self) -> None:
        for name in self._layout.shards.keys() - self._kept.keys() - {SINGLE}:
            files.remove(self._layout.folder / name)
        self._work.write_state(self._state(done=True))

    def _discard(self) -> None:
        if not self._unlock.alive:
            return
        try:
            with contextlib.suppress(OSError):  # the next `begin` removes what stays behind
                self._remove_staged()
        finally:
            self._unlock()

    def _remove_staged(self) -> None:
        for new in self._files:
            if new.file >= 0:
                files.close(new.file)
                new.file = -1
            files.remove(new.path)
        for path in (self._staged_pointer, self._backup):
            if path is not None:
                files.remove(path)
