"""A study's folder and those inside it are known by a mark that the study itself put there.

Refuses a folder that holds anything and has no mark, and a folder where one of a study's files
belongs. Of a marked one it removes what it names itself, and leaves what else lies there.
"""

import re
from collections.abc import Collection
from pathlib import Path

from farcast.errors import ConfigError

PAGE = "report.md"
MARK = ".farcast-study"
"""Its name says all; an empty file cannot be half-written."""


def check_folder(folder: Path, files: Collection[str] = ()) -> None:
    """Raises `ConfigError` unless `folder` is a study's own, empty, or not there yet, and `files`
    can be written in it as files."""
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; name a new or an empty one with --out.")
    others = min((path.name for path in folder.iterdir()), default=None)
    if others is not None and not (folder / MARK).is_file():
        raise ConfigError(
            f"{folder} holds other files ({others[:80]!r}), which no study wrote; name a new or "
            "an empty folder with --out."
        )
    for name in files:
        if (folder / name).is_dir():
            raise ConfigError(
                f"{folder / name} is a folder, where the study keeps a file; move it, or name "
                "another folder with --out."
            )


def take_folder(folder: Path, files: Collection[str] = ()) -> None:
    """Make it a study's own, after the same checks."""
    check_folder(folder, files)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()


def clear_folder(folder: Path, own: re.Pattern[str]) -> None:
    """Take it, and remove the files whose names `own` matches."""
    take_folder(folder)
    for path in folder.iterdir():
        if own.fullmatch(path.name) and not path.is_dir():
            path.unlink()
