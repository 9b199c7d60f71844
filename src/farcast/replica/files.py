"""The system calls of a checkpoint folder, and what their failures mean.

Everything that changes a folder goes through here, durable before it returns. Files are read
with `pread` and never mapped: a file that shrinks gives an error, not a signal. A symbolic
link is followed for reading only; writing makes new files and renames them, so what a link
points to never changes.
"""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from farcast.errors import IntegrityError, TargetError, TargetFullError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_MAX_MOVE = 1 << 30
"""Linux moves at most 2 GiB in one call; half of that keeps the loop simple."""


class FileIdentity(NamedTuple):
    """Equal as long as a path shows the same file, not written to meanwhile."""

    device: int
    inode: int
    size: int
    modified: int


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """What the operating system refuses about `path` becomes a `TargetError`."""
    try:
        yield
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "unknown")
        if error.errno in _FULL:
            raise TargetFullError(
                f"No space or quota is left for {path} ({name}); the old version is still "
                "there. Free some space and sync again."
            ) from error
        raise TargetError(
            f"The folder {path} can't be used ({name} at {Path(error.filename or path).name!r}); "
            "check that it exists, its owner and its permissions."
        ) from error


def identity(path: Path) -> FileIdentity | None:
    """Of the file a path leads to; None if there is none."""
    try:
        return _identity(path.stat())
    except FileNotFoundError:
        return None


def identity_of(file: int) -> FileIdentity:
    return _identity(os.fstat(file))


def _identity(status: os.stat_result) -> FileIdentity:
    return FileIdentity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """A regular file for reading. Never blocks on a pipe that somebody put there."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise TargetError(f"{path} is not a regular file; remove it and sync again.")
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def writable(path: Path) -> Iterator[int]:
    """A regular file that is there, for changing parts of it. Follows no link."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise TargetError(f"{path} is not a regular file; remove it and sync again.")
        yield file
    finally:
        os.close(file)


def read_at(file: int, start: int, length: int, path: Path) -> bytearray:
    """Exactly `length` bytes from `start`, or `IntegrityError`."""
    data = bytearray(length)
    view = memoryview(data)
    done = 0
    while done < length:
        count = os.preadv(file, [view[done : done + _MAX_MOVE]], start + done)
        if count == 0:
            raise IntegrityError(
                f"{path} ended {length - done} bytes early while it was read; "
                "somebody truncated it. Restore it, or remove it and sync again."
            )
        done += count
    return data


def write_at(file: int, data: bytes | memoryview, start: int) -> None:
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(file, view[done : done + _MAX_MOVE], start + done)


def create(path: Path, mode: int | None) -> int:
    """A new file for reading and writing. `mode` None leaves it to the user's mask."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(path, flags, 0o666)
    try:
        if mode is not None:
            os.fchmod(file, mode)
    except BaseException:
        os.close(file)
        raise
    return file


def resize(file: int, size: int) -> None:
    os.ftruncate(file, size)


def sync(file: int) -> None:
    os.fsync(file)


def close(file: int) -> None:
    os.close(file)


def write_new(path: Path, data: bytes, mode: int | None = None) -> None:
    """Make a file that isn't there; its bytes are durable on return, its name is not yet."""
    file = create(path, mode)
    try:
        write_at(file, data, 0)
        os.fsync(file)
    except BaseException:
        remove(path)
        raise
    finally:
        os.close(file)


def move(source: Path, destination: Path) -> None:
    """Rename over whatever is there, in one step. Durable only after `sync_folder`."""
    source.replace(destination)


def keep_copy(source: Path, destination: Path) -> bool:
    """A second name for the file (or link) at `source`; False where there are no hard links."""
    try:
        os.link(source, destination, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV):
            return False
        raise
    return True


def remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def own_folder(path: Path) -> None:
    """Make a real folder, or accept the one there; refuse a link or anything else."""
    with contextlib.suppress(FileExistsError):
        path.mkdir()
        sync_folder(path.parent)
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise TargetError(f"{path} is not a folder of farcast's own; remove it and sync again.")


def mode_of(path: Path) -> int | None:
    """Permissions of the file that `path` leads to; None if there is none."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return None


def lock(path: Path) -> int:
    """Hold `path` as this process's; the descriptor is closed to let go. Ends with the process."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise TargetError(
            f"{path.parent.parent} is being updated, by another process or by a version that "
            "was staged here; commit or discard that one first."
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            os.close(file)
            raise
    return file
