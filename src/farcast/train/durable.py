"""Makes what was written last: of files and of the names of folders. Refuses nothing; an error is
the operating system's."""

import os
from pathlib import Path


def sync_tree(folder: Path) -> None:
    """Every file below `folder`, then the names in it."""
    for path in folder.iterdir():
        if path.is_dir():
            sync_tree(path)
        else:
            sync_file(path)
    sync_folder(folder)


def sync_file(path: Path) -> None:
    _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """The names in a folder; what they lead to is synced by itself."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
