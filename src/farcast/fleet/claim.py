"""One process at a time for a job in a folder. The lock is the system's, so it ends with its
holder, however that ends; the file stays and means nothing by itself. Refuses to break a lock."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from farcast.errors import ConfigError

LOOK_SECONDS = 0.5


@contextlib.contextmanager
def claimed(
    file: Path,
    what: str,
    *,
    patience: float = 0.0,
    wait: Callable[[float], bool] = lambda _: False,
    tell: Callable[[str], None] = lambda _: None,
) -> Iterator[None]:
    """Hold `file` while inside. Waits up to `patience` seconds for another holder to leave, or
    until `wait` says that this process should; then raises `ConfigError`, which names `what`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline, told = time.monotonic() + patience, False
        while not _locked(handle):
            if time.monotonic() >= deadline or wait(LOOK_SECONDS):
                raise ConfigError(
                    f"Another {what} works in {file.parent}; wait until it has ended, or use "
                    "another folder."
                )
            if not told:
                tell(f"another {what} is still at work in {file.parent}, waiting for its end")
                told = True
        yield
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
