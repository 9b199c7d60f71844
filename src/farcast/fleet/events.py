"""What happened to the processes of a run, as the supervisor saw it: one JSON line each.

The file is the supervisor's memory: a resumed run reads it to know what has already happened.
"""

import time
from pathlib import Path
from typing import Literal

import msgspec

from farcast.errors import FormatError

EventKind = Literal["started", "joined", "killed", "left", "failed", "stopped", "resumed"]


class FleetEvent(msgspec.Struct, frozen=True, kw_only=True):
    """`who` is "trainer" or a replica's id; `step` is the trainer's when it happened."""

    kind: EventKind
    who: str
    step: int
    version: int
    at: float
    text: str = ""

    def __str__(self) -> str:
        return f"{self.who} {self.kind}" + (f": {self.text}" if self.text else "")


class EventLog:
    """Appends events to a file, and reads those of earlier sittings."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[FleetEvent]:
        """All events so far; a last line cut short by a crash is left out."""
        if not self._path.exists():
            return []
        text = self._path.read_bytes()
        lines = text[: text.rfind(b"\n") + 1].splitlines()
        try:
            return [msgspec.json.decode(line, type=FleetEvent) for line in lines]
        except msgspec.DecodeError as error:
            raise FormatError(f"{self._path} is damaged ({error}); move it away.") from error

    def add(
        self, kind: EventKind, who: str, *, step: int, version: int, text: str = ""
    ) -> FleetEvent:
        event = FleetEvent(
            kind=kind, who=who, step=step, version=version, at=time.time(), text=text
        )
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")
        return event
