"""`file://`: a folder as an object store, durable on return.

Written here and not left to a library because durability is the promise: a put returns after
the bytes, the name and every folder above it were fsynced. A new object is written and synced
under a temporary name and then linked (create) or renamed (overwrite) into place, both atomic,
so a reader never sees half an object and exactly one of several creators wins.

Every path is walked from the root's descriptor without following symbolic links. Temporary
files live in their own hidden folder, locked by their writer; the first put of a process
removes those whose writer is gone. Needs a POSIX system and hard links.

Refuses keys outside `farcast.store.keys`, a key that is at once an object and a folder, and to
make the root a second time: a folder that was there and is gone is a store that is away (a lost
mount, a rename), and an empty one in its place would take half of a run.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from farcast.errors import (
    InvalidKeyError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
    StoreUnsupportedError,
)
from farcast.store.base import ObjectInfo
from farcast.store.buffers import byte_view
from farcast.store.failures import over_limit, short_read, translated_os_errors
from farcast.store.keys import MAX_KEY_BYTES, SEGMENT_PATTERN, check_key, check_prefix, check_range

STAGING = ".farcast-staging"

_MAX_WRITE = 1 << 30
"""Linux moves at most 2 GiB in one call; half of that keeps the loop simple."""

_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_OBJECT = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
"""Never blocks on a pipe that somebody put there."""


class FileStore:
    """A folder. It is made by the first put; before that, it reads as empty. Once this object
    has found it there, it is never made anew."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._lock = threading.Lock()
        self._durable: set[tuple[str, ...]] = set()
        self._swept = False
        self._found = False

    @property
    def url(self) -> str:
        return self._root.as_uri()

    def __repr__(self) -> str:
        return f"FileStore({self.url!r})"

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        *folders, name = check_key(key)
        view = byte_view(data)
        try:
            self._put(folders, name, key, view, if_absent)
        except ObjectNotFoundError:
            self._durable.clear()
            raise StoreUnavailableError(
                f"A folder inside {self.url} was removed while it was in use; if that was not "
                "meant, put it back, then try again."
            ) from None

    def _put(
        self, folders: Sequence[str], name: str, key: str, data: memoryview, if_absent: bool
    ) -> None:
        with translated_os_errors(self.url, key), self._folder(folders, make=True) as folder:
            if if_absent and _mode(folder, name) is not None:
                raise self._taken(folder, name, key)
            with self._staged(data) as (staging, temporary):
                try:
                    if if_absent:
                        self._link(temporary, name, staging, folder)
                    else:
                        os.replace(temporary, name, src_dir_fd=staging, dst_dir_fd=folder)
                except (FileExistsError, IsADirectoryError):
                    raise self._taken(folder, name, key) from None
            os.fsync(folder)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        with self._opened(key) as (file, size):
            if size > max_bytes:
                raise over_limit(key, size, max_bytes)
            return _read(file, key, 0, size)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        with self._opened(key) as (file, size):
            if start + length > size:
                raise short_read(key, start, length, max(0, size - start))
            return _read(file, key, start, length)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        folders = check_prefix(prefix)
        if start_after is not None:
            check_key(start_after)
        return self._list(folders, start_after or "")

    def delete(self, key: str) -> None:
        *folders, name = check_key(key)
        try:
            with translated_os_errors(self.url, key), self._folder(folders) as folder:
                os.unlink(name, dir_fd=folder)
                os.fsync(folder)
        except ObjectNotFoundError:
            return

    # --- reading -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, int]]:
        """The object's descriptor and size. A later overwrite does not reach this descriptor."""
        *folders, name = check_key(key)
        with translated_os_errors(self.url, key), self._folder(folders) as folder:
            file = os.open(name, _OBJECT, dir_fd=folder)
            try:
                status = os.fstat(file)
                if not stat.S_ISREG(status.st_mode):
                    raise ObjectNotFoundError(f"{self.url} has no object {key!r}.")
                yield file, status.st_size
            finally:
                os.close(file)

    def _list(self, folders: Sequence[str], start_after: str) -> Iterator[ObjectInfo]:
        prefix = "".join(f"{segment}/" for segment in folders)
        with translated_os_errors(self.url, prefix):
            entries = self._entries(folders, prefix, start_after)
        for name, info in entries:
            if info is None:
                yield from self._list([*folders, name], start_after)
            else:
                yield info

    def _entries(
        self, folders: Sequence[str], prefix: str, start_after: str
    ) -> Sequence[tuple[str, ObjectInfo | None]]:
        """Objects and subfolders (None) of one folder that may hold keys after `start_after`,
        in key order: a subfolder sorts with its slash, since "a-b" < "a/b" < "a0"."""
        found: list[tuple[str, str, ObjectInfo | None]] = []
        try:
            with self._folder(folders) as folder, os.scandir(folder) as entries:
                for entry in entries:
                    if not SEGMENT_PATTERN.fullmatch(entry.name):
                        continue
                    key = prefix + entry.name
                    if len(key) > MAX_KEY_BYTES:  # no key; it also bounds how deep a list goes
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        if f"{key}/" > start_after or start_after.startswith(f"{key}/"):
                            found.append((f"{key}/", entry.name, None))
                    elif key > start_after and entry.is_file(follow_symlinks=False):
                        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                            status = entry.stat(follow_symlinks=False)
                            info = ObjectInfo(key, status.st_size, status.st_mtime)
                            found.append((key, entry.name, info))
        except FileNotFoundError:
            return []
        return [(name, info) for _, name, info in sorted(found, key=lambda item: item[0])]

    # --- folders -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _folder(self, segments: Sequence[str], *, make: bool = False) -> Iterator[int]:
        """A descriptor of the folder, reached without following a link below the root."""
        if make:
            self._make_root()
        current = self._open_root()
        try:
            for depth, segment in enumerate(segments, start=1):
                path = tuple(segments[:depth])
                if make and path not in self._durable:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(segment, dir_fd=current)
                    # Whoever made it, it lasts only once its parent is synced.
                    os.fsync(current)
                below = self._enter(current, segment, make=make)
                os.close(current)
                current = below
                if make:
                    self._durable.add(path)
            yield current
        finally:
            os.close(current)

    def _enter(self, parent: int, segment: str, *, make: bool) -> int:
        try:
            return os.open(segment, _FOLDER, dir_fd=parent)
        except NotADirectoryError:
            mode = os.stat(segment, dir_fd=parent, follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):
                raise StoreAccessError(
                    f"{segment!r} in {self.url} is a symbolic link, which is not followed; "
                    "replace it by a folder, or point the store at its target."
                ) from None
            if make:
                raise InvalidKeyError(
                    f"{segment!r} is an object in {self.url} and cannot hold others; "
                    "choose another key."
                ) from None
            raise FileNotFoundError(errno.ENOENT, "an object is no folder") from None

    def _make_root(self) -> None:
        if self._found or () in self._durable:
            return
        try:
            for path in (*reversed(self._root.parents), self._root):
                if not path.is_dir():
                    path.mkdir(exist_ok=True)
                    _sync_folder(path.parent)
        except (FileNotFoundError, FileExistsError, NotADirectoryError):
            raise StoreAccessError(
                f"The folder of {self.url} cannot be made there; check its path."
            ) from None
        self._durable.add(())

    def _open_root(self) -> int:
        try:
            root = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except NotADirectoryError:
            raise StoreAccessError(f"{self.url} is not a folder; point the store at one.") from None
        except FileNotFoundError:
            if self._found:
                self._durable.clear()
                raise StoreUnavailableError(
                    f"The folder of {self.url} was there and is gone; put it back (or mount it "
                    "again), then try again."
                ) from None
            raise
        self._found = True
        return root

    # --- staging -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _staged(self, data: memoryview) -> Iterator[tuple[int, str]]:
        """The staging folder's descriptor and the name in it under which `data` is durable."""
        with self._folder([STAGING], make=True) as staging:
            self._sweep(staging)
            file, name = _new_locked_file(staging)
            try:
                _write(file, data)
                os.fsync(file)
                yield staging, name
            finally:
                with contextlib.suppress(FileNotFoundError):  # renamed into place
                    os.unlink(name, dir_fd=staging)
                os.close(file)

    def _sweep(self, staging: int) -> None:
        """Remove what dead writers left, once per store object."""
        with self._lock:
            if self._swept:
                return
            self._swept = True
        for name in os.listdir(staging):
            with contextlib.suppress(OSError):  # locked: its writer lives; gone: as good
                file = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=staging)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(name, dir_fd=staging)
                finally:
                    os.close(file)

    def _link(self, temporary: str, name: str, staging: int, folder: int) -> None:
        """Give the object its name, unless that is taken: the one step that commits."""
        try:
            os.link(temporary, name, src_dir_fd=staging, dst_dir_fd=folder)
        except OSError as error:
            if error.errno in _NO_HARD_LINKS:
                raise StoreUnsupportedError(
                    f"The file system of {self.url} has no hard links, without which nothing can "
                    "be created conditionally; use a local disk, or the bucket behind a mount."
                ) from None
            raise

    def _taken(self, folder: int, name: str, key: str) -> StoreError:
        """Why no object can be put there."""
        if stat.S_ISDIR(_mode(folder, name) or 0):
            return InvalidKeyError(
                f"{key!r} is a folder of other objects in {self.url}; choose another key."
            )
        # The winner may still be about to sync the name: "it exists" must be durable as well.
        os.fsync(folder)
        return ObjectExistsError(f"{self.url} already has an object {key!r}.")


def _mode(folder: int, name: str) -> int | None:
    """Of what has the name, a link being one itself; None if nothing has it."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None


def _new_locked_file(staging: int) -> tuple[int, str]:
    """Make a temporary file and hold its lock for as long as it is open.

    A sweep that catches the file between its creation and its lock either holds the lock or
    has unlinked it; both show, and another file is made.
    """
    for _ in range(100):
        name = secrets.token_hex(16)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(name, flags, 0o666, dir_fd=staging)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            continue
        except OSError as error:
            # A file system without locks: a sweep cannot lock either, and leaves it alone.
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                os.close(file)
                raise
        if os.fstat(file).st_nlink:
            return file, name
        os.close(file)
    raise StoreUnavailableError("Temporary files vanish as they are made; look for a cleaner.")


def _write(file: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.write(file, data[done : done + _MAX_WRITE])


def _read(file: int, key: str, start: int, length: int) -> bytes:
    parts: list[bytes] = []
    done = 0
    while done < length:
        part = os.pread(file, min(length - done, _MAX_WRITE), start + done)
        if not part:
            raise short_read(key, start, length, done)
        parts.append(part)
        done += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
