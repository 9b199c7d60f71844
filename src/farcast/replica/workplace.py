"""`.farcast` inside a checkpoint folder: what farcast itself keeps there.

    .farcast/state.json    State: which version the folder holds or is about to
    .farcast/staging/      files being written; anything in it may be removed by the lock's holder
    .farcast/lock          held while a version is staged and committed

The state is a hint: a version it claims is believed only after hashing the folder.
"""

import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import msgspec

from farcast.errors import FormatError, LimitError
from farcast.replica import files
from farcast.replica.layout import is_own_shard, is_plain_name
from farcast.types import Name, VersionRef

MAX_STATE_BYTES = 1 << 24
"""Sixteen megabytes hold a hundred thousand file names of old shards."""


class State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`pending` is set from just before a switch to just after it. `obsolete` are files that
    the switch leaves without use; they are removed if the pointer names none of them. `newest`
    is the newest version that the folder ever held."""

    format: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    run_id: Name
    current: VersionRef | None = None
    pending: VersionRef | None = None
    newest: VersionRef | None = None
    obsolete: tuple[str, ...] = ()


class Workplace:
    """Paths and small files below `.farcast`. Callers translate `OSError`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._own = folder / ".farcast"
        self._state = self._own / "state.json"
        self._staging = self._own / "staging"

    def enter(self) -> int:
        """Make the folders and take the lock; returns its descriptor, to be closed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        files.own_folder(self._own)
        files.own_folder(self._staging)
        return files.lock(self._own / "lock")

    def staged(self) -> Path:
        """A path for a new file. Its name ends in nothing that an engine would load."""
        return self._staging / secrets.token_hex(16)

    def clean(self, used: Collection[str]) -> None:
        """Remove what crashes left: staged files, and old or never used shards not in `used`."""
        for path in self._staging.iterdir():
            files.remove(path)
        state = self.read_state()
        candidates = set() if state is None else set(state.obsolete)
        candidates |= {path.name for path in self.folder.iterdir() if is_own_shard(path.name)}
        for name in sorted(candidates - set(used)):
            if is_plain_name(name):
                files.remove(self.folder / name)

    def interrupted(self) -> bool:
        """Whether a process died here in the middle of staging or committing, or still does it."""
        state = self.read_state()
        if state is not None and state.pending is not None:
            return True
        return self._staging.is_dir() and any(self._staging.iterdir())

    def read_state(self) -> State | None:
        try:
            with files.opened(self._state) as file:
                size = files.identity_of(file).size
                if size > MAX_STATE_BYTES:
                    raise LimitError(f"{self._state} has {size} bytes; remove it and sync again.")
                data = bytes(files.read_at(file, 0, size, self._state))
        except FileNotFoundError:
            return None
        try:
            return msgspec.json.decode(data, type=State)
        except msgspec.DecodeError as error:
            raise FormatError(
                f"{self._state} is not farcast's ({error}); remove it and sync again."
            ) from error

    def write_state(self, state: State) -> None:
        """Replace the state in one step; durable on return."""
        staged = self.staged()
        files.write_new(staged, msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
        files.move(staged, self._state)
        files.sync_folder(self._own)
