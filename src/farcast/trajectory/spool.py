"""A worker's disk, for as long as the store does not answer. Opt-in, since it weakens a promise:
what is spooled is lost with the worker's disk, while what is in the store is not.

One folder of one worker holds numbered files, each one batch in the format of `encoding`. A file
appears whole or not at all, and goes once its batch is in the store; a crash between the two
leaves both, and the sender knows the ids when it starts again. Refuses to grow beyond its limit,
to serve two processes at once, and to pass over a file it cannot read.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from farcast.errors import (
    ConfigError,
    FarcastError,
    FormatError,
    IntegrityError,
    RunMismatchError,
    StoreAccessError,
    StoreFullError,
)
from farcast.trajectory.encoding import MAX_BATCH_BYTES, Payload, decode_batch, seal
from farcast.trajectory.wire import Trajectory

_NEW = "new"
_LOCK = "lock"


class Spool:
    """Batches on disk, in the order in which they were added. Not thread-safe."""

    def __init__(self, folder: Path, run_id: str, *, max_bytes: int) -> None:
        self._folder = folder
        self._run_id = run_id
        self._max_bytes = max_bytes
        with _translated(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigError(
                f"The spool {folder} is in use by another process; give each worker its own."
            ) from None
        try:
            self._sizes = dict(sorted(self._scan()))
            self._ids = {number: {t.id for t in self.read(number)} for number in self._sizes}
        except FarcastError:
            self.close()
            raise

    @property
    def bytes(self) -> int:
        return sum(self._sizes.values())

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, trajectory_id: str) -> bool:
        return any(trajectory_id in ids for ids in self._ids.values())

    def has_room(self, size: int) -> bool:
        return self.bytes + size <= self._max_bytes

    def add(self, payload: Payload) -> None:
        """Durable on this disk on return."""
        number = max(self._sizes, default=-1) + 1
        data = seal(payload, number)
        new = self._folder / _NEW
        with _translated(self._folder):
            with new.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            new.rename(self._path(number))
            self._sync_folder()
        self._sizes[number] = len(data)
        self._ids[number] = {t.id for t in payload.trajectories}

    def oldest(self) -> tuple[int, tuple[Trajectory, ...]] | None:
        """The batch to send next, with its number; None when the spool is empty."""
        number = next(iter(self._sizes), None)
        return None if number is None else (number, self.read(number))

    def read(self, number: int) -> tuple[Trajectory, ...]:
        path = self._path(number)
        with _translated(self._folder):
            data = path.read_bytes()
        try:
            batch = decode_batch(data)
        except (FormatError, IntegrityError) as error:
            raise IntegrityError(
                f"The spooled batch {path} is damaged ({error}) Delete it to go on without it."
            ) from error
        if batch.run_id != self._run_id:
            raise RunMismatchError(
                f"The spool {self._folder} holds trajectories of run {batch.run_id}, not "
                f"{self._run_id}; give each run a folder of its own."
            )
        return batch.trajectories

    def remove(self, number: int) -> None:
        """The batch is in the store."""
        with _translated(self._folder):
            self._path(number).unlink(missing_ok=True)
            self._sync_folder()
        del self._sizes[number], self._ids[number]

    def close(self) -> None:
        """Let another process use the folder; what is in it stays."""
        os.close(self._lock)

    def _scan(self) -> Iterator[tuple[int, int]]:
        with _translated(self._folder):
            for path in self._folder.iterdir():
                if len(path.name) == 12 and path.name.isascii() and path.name.isdigit():
                    size = path.stat().st_size
                    if size > MAX_BATCH_BYTES:
                        raise IntegrityError(f"{path} is no spooled batch; delete it to go on.")
                    yield int(path.name), size

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:012d}"

    def _sync_folder(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def _translated(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFullError(
                f"There is no room left for the spool {folder}; free some space."
            ) from error
        raise StoreAccessError(
            f"The spool {folder} cannot be used ({error.strerror}); name a folder that this "
            "worker may write."
        ) from error
