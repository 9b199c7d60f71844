"""What a recorder holds, on disk: an interaction is here before it is said to be recorded.

One folder of one recorder. Each open session is a file `<session>.log` of entries, written and made
durable entry by entry. All integers are little endian.

    offset  size  field
    0       4     N, bytes of the entry
    4       4     first bytes of the BLAKE3 of the four before
    8       16    first bytes of the BLAKE3 of the entry
    24      N     the entry

A write that a crash cut short was never acknowledged: where a file ends inside an entry, or in
nothing but zeros, that tail is cut off. The length has a check of its own so that a damaged one is
not taken for such a tail. A file with any other damage is set aside as it is, under a name with
`.damaged`, and its session is not open; what else the folder holds goes on.

`closed` has a line of JSON for each session that went home, so that its outcome can be said again.

Refuses to serve two processes, to use a name that is no `Name` as a file's, to take an entry beyond
`MAX_ENTRY`, and to add to a file that is not as it was left.
"""

import contextlib
import errno
import fcntl
import logging
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from blake3 import blake3

from farcast.errors import ConfigError, LimitError, StoreAccessError, StoreFullError
from farcast.types import NAME_PATTERN

MAX_ENTRY = 1 << 26
"""A turn of four million tokens takes about 60 MB."""

MAX_CLOSED = 1 << 16
"""Sessions whose outcome may be said again; older ones are forgotten at the next start."""

_LOG = logging.getLogger(__name__)
_HEAD = struct.Struct("<I4s16s")
_FULL = (errno.ENOSPC, errno.EDQUOT)
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
        self._sizes: dict[Path, int] = {}
        """What each file must hold before the next write, where this process wrote or read it."""
        self.set_aside: list[Path] = []
        """Files that were damaged, as they are kept."""
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
        """Durable on return. After an error the session is as it was."""
        path = self._path(session)
        if len(entry) > MAX_ENTRY:
            raise LimitError(
                f"An entry of {len(entry)} bytes is beyond the {MAX_ENTRY} that the journal takes; "
                "begin another session."
            )
        fresh = not path.exists()
        with self._translated():
            self._write(path, _HEAD.pack(*_head(entry)) + entry)
            if fresh:
                self._sync_folder()

    def sessions(self) -> Iterator[tuple[str, list[bytes]]]:
        """What was open when the last recorder ended, but for what is set aside."""
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            session = path.name.removesuffix(_SUFFIX)
            if NAME_PATTERN.fullmatch(session) is None or path.is_symlink():
                continue
            with self._translated():
                entries = _entries(path)
                self._sizes[path] = path.stat().st_size
            if entries is None:
                self.put_aside(session)
            else:
                yield session, entries

    def put_aside(self, session: str) -> None:
        """Keep the file of a session that cannot be read under another name."""
        path, number = self._path(session), 0
        while (kept := path.with_name(f"{path.name}.damaged{number or ''}")).exists():
            number += 1
        with self._translated():
            path.rename(kept)
            self._sync_folder()
        self._sizes.pop(path, None)
        self.set_aside.append(kept)
        _LOG.warning(
            "What was recorded of the session %s is damaged; it is kept as %s.", session, kept
        )

    def settle(self, closed: Closed) -> None:
        """A session went home: that is durable before what it held is gone."""
        with self._translated():
            self._write(self._folder / "closed", msgspec.json.encode(closed) + b"\n", lines=True)
        self.drop(closed.session)

    def drop(self, session: str) -> None:
        """Forget a session."""
        path = self._path(session)
        self._sizes.pop(path, None)
        with self._translated():
            path.unlink(missing_ok=True)

    def closed(self) -> list[Closed]:
        """The last that went home, oldest first; a line that a crash cut short is left out. Older
        ones leave the file where they are many."""
        path = self._folder / "closed"
        with self._translated():
            try:
                lines = path.read_bytes().splitlines()
            except FileNotFoundError:
                return []
            if len(lines) > 2 * MAX_CLOSED:
                self._replace(path, b"\n".join([*lines[-MAX_CLOSED:], b""]))
        found = []
        for line in lines[-MAX_CLOSED:]:
            with contextlib.suppress(msgspec.DecodeError):
                found.append(msgspec.json.decode(line, type=Closed))
        return found

    def _replace(self, path: Path, data: bytes) -> None:
        new = path.with_name(f"{path.name}.new")
        new.unlink(missing_ok=True)
        self._write(new, data)
        self._sizes.pop(new, None)
        new.replace(path)
        self._sync_folder()

    def _path(self, session: str) -> Path:
        if NAME_PATTERN.fullmatch(session) is None:
            raise ConfigError(f"{session[:60]!r} is no session's name; rename it.")
        return self._folder / (session + _SUFFIX)

    def _write(self, path: Path, data: bytes, *, lines: bool = False) -> None:
        """Append; after a failure the file is as it was, so that the next entry can be read. Of
        `lines`, one that a crash cut short is ended first."""
        create = 0 if self._sizes.get(path) else os.O_CREAT
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | create, 0o600)
        try:
            held = self._sizes.setdefault(path, os.fstat(handle).st_size)
            if os.fstat(handle).st_size != held:
                self._take_back(handle, held)
            try:
                torn = lines and held and os.pread(handle, 1, held - 1) != b"\n"
                view = memoryview((b"\n" if torn else b"") + data)
                while view:
                    view = view[os.write(handle, view) :]
                os.fsync(handle)
            except OSError:
                with contextlib.suppress(OSError):  # then the next write does it, before its own
                    os.ftruncate(handle, held)
                raise
            self._sizes[path] = os.fstat(handle).st_size
        finally:
            os.close(handle)

    def _take_back(self, handle: int, held: int) -> None:
        """Cut off what a failed write left behind."""
        if os.fstat(handle).st_size < held:
            raise StoreAccessError(
                f"The journal {self._folder} was changed by somebody else; begin another session."
            )
        os.ftruncate(handle, held)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise StoreFullError(
                    f"The journal {self._folder} takes no more ({error.strerror}); make room."
                ) from error
            raise StoreAccessError(
                f"The journal {self._folder} cannot be used ({error.strerror}); see to the folder."
            ) from error

    def _sync_folder(self) -> None:
        handle = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _head(entry: bytes) -> tuple[int, bytes, bytes]:
    return len(entry), _check_of(len(entry)), blake3(entry).digest()[:16]


def _check_of(size: int) -> bytes:
    return blake3(size.to_bytes(4, "little")).digest()[:4]


def _entries(path: Path) -> list[bytes] | None:
    """The whole entries of a file, its torn tail cut off; None where it is damaged."""
    found, whole = [], 0
    with path.open("r+b") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            size, check, digest = _HEAD.unpack(head)
            if check != _check_of(size) or size > MAX_ENTRY:
                if any(head) or _has_more(file):
                    return None
                break
            entry = file.read(size)
            if len(entry) < size:
                break
            if blake3(entry).digest()[:16] != digest:
                return None
            found.append(entry)
            whole = file.tell()
        file.truncate(whole)
    return found


def _has_more(file: BinaryIO) -> bool:
    """Whether anything but zeros follows."""
    return any(any(chunk) for chunk in iter(lambda: file.read(1 << 20), b""))
