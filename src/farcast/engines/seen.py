"""The newest version that an engine's sidecar ever verified, kept across restarts.

An engine forgets with its process which versions it held. Without a mark beside it, whoever may
write to the bucket could wait for a restart and then show it an old, truly signed state.

    {"format": 1, "seen": {"run_id": "run1", "version": 12, "root": "9f..."}}

The mark is durable before the version goes live, and only ever moves to later versions. It is
written beside its place, synced, and renamed, so a crash leaves the old mark or the new one. One
that cannot be read was damaged by somebody, and is an error: taking it for none would let that
somebody choose what is served.

Refuses to replace another run's mark: versions of two runs cannot be compared.
"""

import secrets
from pathlib import Path
from typing import Annotated

import msgspec

from farcast.errors import RunMismatchError, TargetError
from farcast.replica import files
from farcast.replica.base import later
from farcast.types import VersionRef

FILE = "seen.json"

PART = ".seen"
"""How names of marks that are being written end."""

MAX_MARK_BYTES = 4096
"""The longest name of a run and the longest number are well below a kilobyte."""


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Annotated[int, msgspec.Meta(ge=1, le=1)]
    seen: VersionRef


class SeenMark:
    """The mark in `folder`, which has to be there before `remember`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / FILE

    def read(self) -> VersionRef | None:
        """None before the first version. Raises `TargetError` if the mark cannot be read."""
        with files.translated(self._path):
            try:
                with files.opened(self._path) as file:
                    size = min(files.identity_of(file).size, MAX_MARK_BYTES + 1)
                    data = bytes(files.read_at(file, 0, size, self._path))
            except FileNotFoundError:
                return None
        try:
            if len(data) > MAX_MARK_BYTES:
                raise msgspec.DecodeError("too long")
            return msgspec.json.decode(data, type=_Wire).seen
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TargetError(
                f"{self._path}, which says how new the versions verified here were, is damaged "
                f"({error}); nothing is taken from the store. Remove it only if you trust what "
                "the store shows now."
            ) from error

    def remember(self, ref: VersionRef) -> None:
        """Durable on return. An older version than the marked one changes nothing."""
        held = self.read()
        if held is not None and held.run_id != ref.run_id:
            raise RunMismatchError(
                f"{self._path} belongs to the run {held.run_id!r}, not to {ref.run_id!r}; use "
                "another folder for this engine, or remove that file."
            )
        if later(held, ref) == held:
            return
        data = msgspec.json.encode(_Wire(1, ref)) + b"\n"
        part = self._folder / f"{secrets.token_hex(8)}{PART}"
        with files.translated(self._path):
            files.write_new(part, data, 0o600)
            files.move(part, self._path)
            files.sync_folder(self._folder)
