"""Keeps as many workers running as a run wants, until its trainer is done.

    records in the store -> load -> policy -> crew -> launcher

Runs anywhere that reaches the store and has a launcher; the trainer knows nothing of it. Workers
that others started count as there, so several of these may serve one run, one in each region, each
with its own names and limits. While the store is away it keeps what there is.
"""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from farcast.errors import StoppedAtOnceError
from farcast.fleet.advising import Advisor, because
from farcast.fleet.crew import Change, Crew
from farcast.fleet.launcher import Launcher, ProcessSpec
from farcast.fleet.load import serving_replicas
from farcast.fleet.observe import FleetSnapshot
from farcast.fleet.scaling import Limits, Load
from farcast.fleet.signals import StopRequest
from farcast.store import Store, open_store

LOOK_SECONDS = 1.0


class UpResult(msgspec.Struct, frozen=True, kw_only=True):
    """What `farcast up` did: its `--json`."""

    run_id: str
    started: int
    most_at_once: int
    crashed: int
    replaced: int
    wanted: int
    load: Load | None


class Keeper:
    """The loop of `farcast up`."""

    def __init__(
        self,
        store: Store,
        crew: Crew,
        limits: Limits,
        *,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._advisor = Advisor(store, limits, tell=tell, clock=clock)
        self._crew = crew
        self._limits = limits
        self._tell = tell
        self._wanted = limits.least
        self._changes: list[Change] = []
        self._most = 0

    def run(self, stop: StopRequest) -> UpResult:
        """Until the trainer is done or `stop` is requested; all workers have left on return."""
        try:
            while not stop.requested and self.turn():
                stop.wait(LOOK_SECONDS)
        finally:
            if not stop.insisted:
                names = ", ".join(self._crew.names)
                self._tell(f"waiting for the workers to leave: {names or 'none is left'}")
                self._crew.close()
                self._note(self._crew.tend(None))
        kinds = [change.kind for change in self._changes]
        return UpResult(
            run_id=self._advisor.run_id,
            started=kinds.count("started"),
            most_at_once=self._most,
            crashed=kinds.count("crashed") + kinds.count("given up"),
            replaced=kinds.count("replaced"),
            wanted=self._wanted,
            load=self._advisor.load,
        )

    def turn(self) -> bool:
        """One look and what follows from it; False when the trainer is done."""
        snapshot = self._advisor.look()
        if snapshot is not None and snapshot.trainer is not None:
            if snapshot.trainer.state == "done":
                self._tell("the trainer is done")
                return False
            self._decide(snapshot)
        # Before the exits are minded: one that left because the run is over is not replaced.
        self._crew.scale(self._wanted)
        self._note(self._crew.tend(snapshot))
        self._most = max(self._most, len(self._crew.names))
        return True

    def _decide(self, snapshot: FleetSnapshot) -> None:
        own = self._crew.names
        if not self._advisor.advise(snapshot, own=own):
            return
        others = len(set(serving_replicas(snapshot)).difference(own))
        wanted = min(max(self._advisor.wanted - others, 0), self._limits.most)
        if wanted != self._wanted and self._advisor.load is not None:
            self._tell(f"{self._wanted} -> {wanted} workers: {because(self._advisor.load)}")
            self._wanted = wanted

    def _note(self, changes: list[Change]) -> None:
        self._changes += changes
        for change in changes:
            self._tell(str(change))


def worker_spec(store_url: str, logs: Path, more: tuple[str, ...]) -> Callable[[str], ProcessSpec]:
    """The command line of a worker by its name; `more` are further options of `farcast worker`."""

    def spec(name: str) -> ProcessSpec:
        arguments = ("worker", "--store", store_url, "--id", name, *more)
        return ProcessSpec(name, arguments, logs / f"{name}.log")

    return spec


def keep_up(
    store_url: str,
    launcher: Launcher,
    limits: Limits,
    *,
    prefix: str,
    logs: Path,
    more: tuple[str, ...],
    stop: StopRequest,
    tell: Callable[[str], None],
) -> UpResult:
    """Run workers for the run in `store_url` under `launcher`."""
    crew = Crew(launcher, worker_spec(store_url, logs, more), prefix=prefix)
    try:
        return Keeper(open_store(store_url), crew, limits, tell=tell).run(stop)
    except KeyboardInterrupt:
        names = ", ".join(handle.name for handle in launcher.list())
        raise StoppedAtOnceError(
            f"Ended at once: {names or 'no worker'} was killed. What the workers had put into "
            "the store counts; the rest is sampled again by others."
        ) from None
    finally:
        launcher.close()
