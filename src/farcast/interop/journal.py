"""What a recorder holds, on disk: an interaction is here before it is said to be recorded.

One folder of one recorder. Each open session is a file `<session>.log` of entries, each its length
(4 bytes, little endian), the first 16 bytes of its BLAKE3, and msgpack; it is written and made
durable entry by entry. An entry that a crash cut short was never acknowledged, and is cut off.
`closed` has a line of JSON for each session that went home, so that its outcome can be said again.

Refuses to serve two processes, to use a name that is no `Name` as a file's, and to read an entry
beyond `MAX_ENTRY`.
"""

import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
from blake3 import blake3

from farcast.errors import ConfigError, StoreFullError
from farcast.types import NAME_PATTERN

MAX_ENTRY = 1 << 26
MAX_CLOSED = 1 << 16
"""Sessions whose outcome may be said again; older ones are forgotten at the next start."""

_HEAD = struct.Struct("<I16s")
_SUFFIX = ".log"


class Closed(msgspec.Struct, frozen=True):
    """A session that went home: the digest of its outcome, and its trajectories."""

    session: str
    digest: str
    ids: list[str]


class Journal:
    """One recorder's folder. Calls for one session come from one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"The journal {folder} cannot be used ({error.strerror}); name another folder."
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigError(
                f"The journal {folder} is in use by another recorder; give each its own."
            ) from None

    def close(self) -> None:
        """Let go of the folder; what is in it waits for the next recorder."""
        os.close(self._lock)

    def append(self, session: str, entry: bytes) -> None:
        """Durable on return."""
        path = self._path(session)
        fresh = not path.exists()
        self._write(path, _HEAD.pack(len(entry), blake3(entry).digest()[:16]) + entry)
        if fresh:
            self._sync_folder()

    def sessions(self) -> Iterator[tuple[str, list[bytes]]]:
        """What was open when the last recorder ended."""
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            session = path.name.removesuffix(_SUFFIX)
            if NAME_PATTERN.fullmatch(session) is not None and not path.is_symlink():
                yield session, _entries(path)

    def settle(self, closed: Closed) -> None:
        """A session went home: that is durable before what it held is gone."""
        self._write(self._folder / "closed", msgspec.json.encode(closed) + b"\n")
        self.drop(closed.session)

    def drop(self, session: str) -> None:
        """Forget a session."""
        self._path(session).unlink(missing_ok=True)

    def closed(self) -> list[Closed]:
        """The last that went home, oldest first; a line that a crash cut short is left out."""
        try:
            lines = (self._folder / "closed").read_bytes().splitlines()[-MAX_CLOSED:]
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            try:
                found.append(msgspec.json.decode(line, type=Closed))
            except msgspec.DecodeError:
                continue
        return found

    def _path(self, session: str) -> Path:
        if NAME_PATTERN.fullmatch(session) is None:
            raise ConfigError(f"{session[:60]!r} is no session's name; rename it.")
        return self._folder / (session + _SUFFIX)

    def _write(self, path: Path, data: bytes) -> None:
        """Append; after a failure the file is as it was, so that the next entry can be read."""
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            held = os.fstat(handle).st_size
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(handle, view) :]
                os.fsync(handle)
            except OSError as error:
                os.ftruncate(handle, held)
                raise StoreFullError(
                    f"The journal {self._folder} takes no more ({error.strerror}); make room."
                ) from error
        finally:
            os.close(handle)

    def _sync_folder(self) -> None:
        handle = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _entries(path: Path) -> list[bytes]:
    """The whole entries of a file; the rest, which nobody was told of, is cut off."""
    found, whole = [], 0
    with path.open("r+b") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            size, digest = _HEAD.unpack(head)
            entry = file.read(size) if size <= MAX_ENTRY else b""
            if len(entry) != size or blake3(entry).digest()[:16] != digest:
                break
            found.append(entry)
            whole = file.tell()
        file.truncate(whole)
    return found
