"""What a run looks like from outside: its records, gathered from the store.

Reads only. Steps are listed from the last one seen, so a look at a long run costs a few
small requests. A record that is damaged, or a stray file, is left out and logged once.
"""

import logging
import time
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from farcast.errors import FormatError
from farcast.fleet.events import FleetEvent
from farcast.fleet.records import StepRecord, TrainerRecord
from farcast.fleet.registry import TRAINER_KEY, Registry, Sighting

_LOG = logging.getLogger(__name__)

SILENT_SECONDS = 10.0
"""A replica writes its record about once a second; ten times that without one is silence."""


class FleetSnapshot(NamedTuple):
    """A run at one moment. `seen` is when, in seconds since the epoch by this machine's clock."""

    trainer: TrainerRecord | None
    steps: tuple[StepRecord, ...]
    replicas: Mapping[str, Sighting]
    """`modified` is by this machine's clock, as far as that is known."""
    seen: float

    @property
    def version(self) -> int:
        """The newest published version, -1 before the first."""
        return self.steps[-1].version if self.steps else -1

    @property
    def step(self) -> int:
        return self.steps[-1].step if self.steps else 0

    def staleness(self, replica: str) -> int | None:
        """How many versions a replica serves behind the trainer's newest."""
        served = self.replicas[replica].record.version
        return None if served < 0 else max(0, self.version - served)

    def silent(self, replica: str) -> bool:
        """The replica still claims to work but has not said so for a while."""
        sighting = self.replicas[replica]
        return (
            sighting.record.state not in ("stopped", "failed")
            and self.seen - sighting.modified > SILENT_SECONDS
        )


class FleetObserver:
    """Looks at one run again and again."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._steps: list[StepRecord] = []
        self._trainer: TrainerRecord | None = None
        self._damaged: set[str] = set()
        self._heard: dict[str, tuple[float, float]] = {}
        """By replica: the store's time of its record, and when that was first seen here."""

    def look(self) -> FleetSnapshot:
        newest = self._steps[-1].version if self._steps else -1
        self._steps.extend(self._registry.steps(after=newest, damaged=self._leave_out))
        try:
            self._trainer = self._registry.trainer()
        except FormatError as error:  # the next beat writes it anew
            self._leave_out(TRAINER_KEY, error)
        return FleetSnapshot(
            trainer=self._trainer,
            steps=tuple(self._steps),
            replicas=self._dated(self._registry.replicas(damaged=self._leave_out)),
            seen=time.time(),
        )

    def _dated(self, replicas: Mapping[str, Sighting]) -> dict[str, Sighting]:
        """Sightings by this machine's clock. The store's may be minutes off, so only at the first
        look is it taken at its word; after that a record is as old as its last change."""
        now = time.time()
        for name, (_, modified) in replicas.items():
            before = self._heard.get(name)
            if before is None:
                self._heard[name] = (modified, min(modified, now))
            elif before[0] != modified:
                self._heard[name] = (modified, now)
        return {name: Sighting(s.record, self._heard[name][1]) for name, s in replicas.items()}

    def _leave_out(self, key: str, error: FormatError) -> None:
        if key not in self._damaged:
            self._damaged.add(key)
            _LOG.warning("%s is left out: %s", key, error)


class View(Protocol):
    """Where a supervisor shows a run."""

    def note(self, text: str) -> None:
        """Long work before the first step: what it is doing."""
        ...

    def event(self, event: FleetEvent) -> None: ...

    def show(self, snapshot: FleetSnapshot) -> None: ...
