"""Objects on disk by digest, within a limit of bytes; the one unused for longest goes first.

    <folder>/lock                           held by the one relay that works here
    <folder>/objects/ab/ab12...ef.3000000   an object: the digest of its bytes, and their number
    <folder>/parts/...                      being written; removed at the next start

An object is whole and synced before it gets its name, and names outlive the process: a relay that
was killed goes on with what it had. Which one was used last is its file's time of change. A file
that is not as long as its name says is removed at the start, or when it is opened. What is read is
hashed on its way out (`farcast.relay.serving`), so a disk that rots is found out.

Refuses names that are no digests, a folder that holds anything else, and to fail because of a
disk: what cannot be kept is not kept, and `trouble` says why.
"""

import contextlib
import errno
import os
import re
import stat
import tempfile
import threading
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

from farcast.errors import ConfigError, InvalidKeyError

_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"([0-9a-f]{64})(?:\.([0-9]{1,12}))?")
"""Without a number, the file is of a relay that did not write it yet."""

_OWN = {"lock", "objects", "parts"}


class Held(NamedTuple):
    """An open object, of the size that it was kept with: `descriptor` is the caller's to close."""

    descriptor: int
    size: int


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


class ObjectCache:
    """Up to `limit` bytes below `folder`. Safe to use from several threads, by one process."""

    def __init__(self, folder: Path, limit: int) -> None:
        """Takes in what is there. Raises `ConfigError` for a folder with other files."""
        self._objects, self._parts = folder / "objects", folder / "parts"
        self._limit = limit
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """The one unused for longest is the first."""
        self._bytes = 0
        self.evicted = 0
        self.damaged = 0
        """Found cut or rotten on the disk, and removed."""
        self.trouble = ""
        """Why the last object that could not be kept was not, "" if it was."""
        check_folder(folder)
        self._objects.mkdir(parents=True, exist_ok=True)
        self._parts.mkdir(exist_ok=True)
        for part in self._parts.iterdir():
            part.unlink()
        self._take_in()

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return self._bytes

    def __len__(self) -> int:
        with self._lock:
            return len(self._sizes)

    def open(self, digest: str) -> Held | None:
        """The object as it was kept, None if it is not here. Counts as a use."""
        self._check(digest)
        with self._lock:
            if digest not in self._sizes:
                return None
            self._sizes.move_to_end(digest)
            size = self._sizes[digest]
        try:
            path = self._path(digest, size)
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # somebody tidied up
            self.drop(digest)
            return None
        held = Held(descriptor, size)
        if os.fstat(descriptor).st_size != size:
            self.drop_damaged(digest, held)
            os.close(descriptor)
            return None
        with contextlib.suppress(OSError):  # the order of a disk that takes no more stays
            os.utime(descriptor)
        return held

    def keep(self, digest: str, data: bytes) -> bool:
        """Keep verified bytes; others go for them. False if there is no room, with `trouble`."""
        self._check(digest)
        path = self._path(digest, len(data))
        if len(data) > self._limit:
            self.trouble = "it is larger than the whole cache"
            return False
        self.drop(digest)
        self._make_room(self._limit - len(data))
        try:
            self._write(path, data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                self.trouble = os.strerror(error.errno or 0)
                return False
            # Others use this disk too: give back as much as this needs, and try once more.
            self._make_room(self.held_bytes - len(data))
            try:
                self._write(path, data)
            except OSError as again:
                self.trouble = os.strerror(again.errno or 0)
                return False
        with self._lock:
            self._bytes += len(data)
            self._sizes[digest] = len(data)
        self.trouble = ""
        return True

    def drop(self, digest: str) -> None:
        """Forget an object, and remove it."""
        self._check(digest)
        with self._lock:
            size = self._sizes.pop(digest, None)
            self._bytes -= size or 0
        if size is not None:
            with contextlib.suppress(OSError):
                self._path(digest, size).unlink()

    def drop_damaged(self, digest: str, held: Held) -> None:
        """Drop what was opened and found to be wrong; not what came in its place since."""
        try:
            there = self._path(digest, held.size).lstat()
        except OSError:
            return
        if os.path.samestat(there, os.fstat(held.descriptor)):
            with self._lock:
                self.damaged += 1
            self.drop(digest)

    # --- inside ------------------------------------------------------------------------------

    def _check(self, digest: str) -> None:
        if not is_digest(digest):
            raise InvalidKeyError(f"{digest[:80]!r} is not an object's digest.")

    def _path(self, digest: str, size: int) -> Path:
        return self._objects / digest[:2] / f"{digest}.{size}"

    def _make_room(self, most: int) -> None:
        """Let go of what was unused for longest until `most` bytes are left."""
        while True:
            with self._lock:
                if self._bytes <= max(0, most) or not self._sizes:
                    return
                oldest = next(iter(self._sizes))
            self.drop(oldest)
            self.evicted += 1

    def _write(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=self._parts)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # whole before it has its name
            Path(part).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(part).unlink()
            raise

    def _take_in(self) -> None:
        found = []
        for path in self._objects.glob("??/*"):
            named, status = _FILE.fullmatch(path.name), path.lstat()
            if not named or named[1][:2] != path.parent.name or not stat.S_ISREG(status.st_mode):
                continue  # not of a relay
            digest, size = named[1], status.st_size
            if path != self._path(digest, size):
                self.damaged += named[2] is not None
                with contextlib.suppress(OSError):
                    path.unlink()
                continue
            found.append((status.st_mtime_ns, digest, size))
        for _, digest, size in sorted(found):
            self.drop(digest)  # two lengths of one digest: one of them is wrong
            self._sizes[digest] = size
            self._bytes += size
        self._make_room(self._limit)


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds something else: what a cache lets go of is gone."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; name a new or an empty one with --folder.")
    others = {path.name for path in folder.iterdir()} - _OWN if folder.is_dir() else set()
    if others:
        raise ConfigError(
            f"{folder} holds other files ({min(others)[:80]!r}); name a new or an empty folder "
            "with --folder."
        )
