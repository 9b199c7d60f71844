"""What a run looks like from outside: its records, gathered from the store.

Reads, and once a minute asks the store's time by writing a mark. Steps are listed from the last
one seen, so a look at a long run costs a few small requests. A record that is damaged, or a stray
file, is left out and logged once.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from farcast.errors import FormatError
from farcast.fleet.events import FleetEvent
from farcast.fleet.leases import Life, StoreClock, clock_of, life, life_of
from farcast.fleet.records import StepRecord, TrainerRecord
from farcast.fleet.registry import TRAINER_KEY, Registry, Sighting

_LOG = logging.getLogger(__name__)

MAX_NAMED = 20
"""Damaged records that are named; one word tells of the others, however many somebody wrote."""


class FleetSnapshot(NamedTuple):
    """A run at one moment. All times are the store's, in seconds since the epoch."""

    trainer: TrainerRecord | None
    steps: tuple[StepRecord, ...]
    replicas: Mapping[str, Sighting]
    seen: float
    """When this was, by the store's clock: ages of records are differences from it."""
    trainer_written: float | None = None

    @property
    def version(self) -> int:
        """The newest published version, -1 before the first."""
        return self.steps[-1].version if self.steps else -1

    @property
    def step(self) -> int:
        return self.steps[-1].step if self.steps else 0

    @property
    def tokens_per_second(self) -> float:
        """Of all replicas that are alive."""
        return sum(
            sighting.record.tokens_per_second
            for name, sighting in self.replicas.items()
            if self.life(name) == "alive"
        )

    def staleness(self, replica: str) -> int | None:
        """How many versions a replica serves behind the trainer's newest."""
        served = self.replicas[replica].record.version
        return None if served < 0 else max(0, self.version - served)

    def age(self, replica: str) -> float:
        """Seconds since a replica's record was last rewritten."""
        return max(0.0, self.seen - self.replicas[replica].modified)

    def life(self, replica: str) -> Life:
        return life(self.replicas[replica], self.seen)

    def silent(self, replica: str) -> bool:
        """The replica still claims to work but has not said so for a while."""
        return self.life(replica) in ("silent", "dead")

    @property
    def trainer_life(self) -> Life | None:
        """How the trainer stands; None before its first record."""
        if self.trainer is None or self.trainer_written is None:
            return None
        if self.trainer.state in ("done", "stopped"):
            return "left"
        return life_of(self.seen - self.trainer_written)


class FleetObserver:
    """Looks at one run again and again. `steady` counts seconds between two looks."""

    def __init__(self, registry: Registry, *, steady: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._clock: StoreClock = clock_of(registry, steady=steady)
        self._steps: list[StepRecord] = []
        self._trainer: TrainerRecord | None = None
        self._damaged: set[str] = set()

    def look(self) -> FleetSnapshot:
        newest = self._steps[-1].version if self._steps else -1
        self._steps.extend(self._registry.steps(after=newest, damaged=self._leave_out))
        try:
            self._trainer = self._registry.trainer()
        except FormatError as error:  # the next beat writes it anew
            self._leave_out(TRAINER_KEY, error)
        replicas = self._registry.replicas(damaged=self._leave_out)
        written = None if self._trainer is None else self._registry.trainer_written()
        for modified in (s.modified for s in replicas.values()):
            self._clock.saw(modified)
        if written is not None:
            self._clock.saw(written)
        return FleetSnapshot(
            trainer=self._trainer,
            steps=tuple(self._steps),
            replicas=replicas,
            seen=self._clock.now() if replicas or written is not None else 0.0,
            trainer_written=written,
        )

    def _leave_out(self, key: str, error: FormatError) -> None:
        if key in self._damaged or len(self._damaged) > MAX_NAMED:
            return
        self._damaged.add(key)
        if len(self._damaged) > MAX_NAMED:
            _LOG.warning("More records below fleet/ are damaged, and left out.")
        else:
            _LOG.warning("%s is left out: %s", key, error)


class View(Protocol):
    """Where a supervisor shows a run."""

    def note(self, text: str) -> None:
        """What is waited for, "" when nothing is."""
        ...

    def event(self, event: FleetEvent) -> None: ...

    def show(self, snapshot: FleetSnapshot) -> None: ...
