"""How many replicas a run wants, as its records in the store say it.

    records -> snapshot -> load -> policy -> a number

Reads, and starts nothing: `farcast up` brings the number about itself, an autoscaler asks for it.
While the store is away, or the trainer was not heard of, the last number stays.
"""

import time
from collections.abc import Callable, Collection

from farcast.config import RunConfig, decode_config
from farcast.errors import StoreUnavailableError
from farcast.fleet.finding import run_in
from farcast.fleet.load import LoadMeter, serving_replicas
from farcast.fleet.observe import FleetObserver, FleetSnapshot
from farcast.fleet.registry import Registry
from farcast.fleet.scaling import Limits, Load, Scaler
from farcast.store import Store

DECIDE_SECONDS = 5.0
"""Replicas take longer than this to come and go; a decision a second would only repeat itself."""


class Advisor:
    """`look` about once a second, and hand what was seen to `advise`."""

    def __init__(
        self,
        store: Store,
        limits: Limits,
        *,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._observer = FleetObserver(Registry(store))
        self._scaler = Scaler(limits)
        self._meter: LoadMeter | None = None
        self._tell = tell
        self._clock = clock
        self._away = False
        self._decided: float | None = None
        self.run_id = ""
        self.load: Load | None = None
        self.wanted = limits.least
        """In all, whoever started them."""

    def look(self) -> FleetSnapshot | None:
        """The run as it is now; None while the store is away."""
        try:
            snapshot = self._observer.look()
        except StoreUnavailableError as error:
            if not self._away:
                self._tell(f"the store does not answer, the replicas stay: {error}")
            self._away = True
            return None
        if self._away:
            self._tell("the store answers again")
        self._away = False
        return snapshot

    def advise(self, snapshot: FleetSnapshot, *, own: Collection[str] | None = None) -> bool:
        """Take in what was seen. Whether it was decided anew: then `wanted` says what.

        `own` are the replicas that the caller started; those of them that do not serve are on
        their way. Without it, what was wanted and is not there is taken to be.
        """
        meter = self._found_run()
        if snapshot.trainer is None or meter is None:
            return False
        now = self._clock()
        serving = set(serving_replicas(snapshot))
        missing = self.wanted - len(serving) if own is None else len(set(own) - serving)
        self.load = meter.measure(snapshot, now, coming=max(0, missing))
        if self._decided is not None and now - self._decided < DECIDE_SECONDS:
            return False
        if snapshot.trainer_life != "alive":  # nothing is known of what it needs
            return False
        self._decided = now
        self.wanted = self._scaler.decide(self.load, now)
        return True

    def _found_run(self) -> LoadMeter | None:
        """A meter of the run, None while there is no run."""
        if self._meter is None:
            record = run_in(self._store)
            if record is None:
                return None
            self.run_id = record.run_id
            config = decode_config(record.settings.encode(), RunConfig)
            self._meter = LoadMeter(groups_per_step=config.train.groups_per_step)
        return self._meter


def because(load: Load) -> str:
    """Why so many, for people."""
    if load.demand <= 0 or load.throughput <= 0:
        return f"{load.serving} serve"
    return (
        f"the trainer uses {load.demand:.2f} trajectories a second and waited "
        f"{load.waiting:.0%}, {load.serving} replicas make {load.throughput:.2f} each"
    )
