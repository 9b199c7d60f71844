"""Where a run keeps its files on the machine that trains.

    runs/demo/
      config.json      RunConfig
      demo.json        what the demo adds: workers, link, whether one is killed
      store/           the object store, unless it is elsewhere
      checkpoint/      the trainer's newest state
      logs/<name>.log  what each process said
      events.jsonl     who started, was killed, joined
      metrics.jsonl    one line per optimizer step
      summary.json, plot.png

Refuses a folder that holds something else, and a used one unless the run is to be resumed.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from farcast.config import RunConfig, decode_config, encode_config
from farcast.errors import ConfigError


class RunFolder:
    """The paths of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path = path.expanduser().absolute()
        self.config = path / "config.json"
        self.demo = path / "demo.json"
        self.store = path / "store"
        self.checkpoint = path / "checkpoint"
        self.events = path / "events.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.plot = path / "plot.png"

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    @property
    def shown(self) -> str:
        """The folder as a person would type it from here."""
        here = Path.cwd()
        return str(self.path.relative_to(here) if self.path.is_relative_to(here) else self.path)

    @property
    def used(self) -> bool:
        return self.config.exists()

    def create(self, config: RunConfig) -> None:
        """Make the folder and write the configuration, or say why that is not possible."""
        if self.used:
            raise ConfigError(
                f"{self.path} already holds a run; "
                "continue it with --resume, or name another folder with --out."
            )
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ConfigError(
                f"{self.path} holds other files; name an empty or a new folder with --out."
            )
        try:
            (self.path / "logs").mkdir(parents=True, exist_ok=True)
            self.write_config(config)
        except OSError as error:
            raise ConfigError(
                f"The folder {self.path} cannot be written ({error.strerror}); "
                "name another one with --out."
            ) from error

    def write_config(self, config: RunConfig) -> None:
        part = self.config.with_suffix(".part")
        part.write_bytes(encode_config(config))
        part.replace(self.config)

    def read_config(self) -> RunConfig:
        """The configuration of a run to be resumed."""
        try:
            data = self.config.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(
                f"There is no run to resume in {self.path}; leave --resume out to start one."
            ) from None
        return decode_config(data, RunConfig)


def numbered(base: Path) -> Iterator[RunFolder]:
    """`runs/demo`, `runs/demo-2`, `runs/demo-3`, ..."""
    yield RunFolder(base)
    number = 2
    while True:
        yield RunFolder(base.with_name(f"{base.name}-{number}"))
        number += 1


def fresh(base: Path) -> RunFolder:
    """The first of the numbered folders that does not exist yet."""
    return next(folder for folder in numbered(base) if not folder.path.exists())


def newest(base: Path) -> RunFolder:
    """The highest numbered folder that holds a run; `base` itself when none does."""
    pattern = re.compile(rf"{re.escape(base.name)}(?:-(\d+))?")
    found = []
    for path in base.parent.iterdir() if base.parent.is_dir() else ():
        match = pattern.fullmatch(path.name)
        if match and RunFolder(path).used:
            found.append((int(match[1] or 1), path))
    return RunFolder(max(found)[1]) if found else RunFolder(base)
