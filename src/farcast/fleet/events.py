"""What happened to the processes of a run, as the supervisor saw it: one JSON line each.

The file is the supervisor's memory: a resumed run reads it to know what has already happened.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import Literal

import msgspec

from farcast.fleet.saying import plain

EventKind = Literal[
    "started",
    "joined",
    "killed",
    "left",
    "failed",
    "restarted",
    "stopped",
    "resumed",
    "away",
    "back",
]


class FleetEvent(msgspec.Struct, frozen=True, kw_only=True):
    """`who` is "trainer", a replica's id, or "store", which alone can be away and back; `step`
    is the trainer's when it happened."""

    kind: EventKind
    who: str
    step: int
    version: int
    at: float
    text: str = ""

    def __str__(self) -> str:
        return plain(f"{self.who} {self.kind}" + (f": {self.text}" if self.text else ""))


class EventLog:
    """Appends events to a file, and reads those of earlier sittings."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[FleetEvent]:
        """All events so far. A line cut short by a crash or a full disk is left out."""
        if not self._path.exists():
            return []
        return [event for line in self._path.read_bytes().splitlines() if (event := _event(line))]

    def add(
        self, kind: EventKind, who: str, *, step: int, version: int, text: str = ""
    ) -> FleetEvent:
        event = FleetEvent(
            kind=kind, who=who, step=step, version=version, at=time.time(), text=text
        )
        with self._path.open("a+b") as file:
            # A crash or a full disk may have cut the last line short: it must not take this one.
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            whole = file.read(1) in (b"", b"\n")
            file.write((b"" if whole else b"\n") + msgspec.json.encode(event) + b"\n")
        return event


def _event(line: bytes) -> FleetEvent | None:
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(line, type=FleetEvent)
    return None
