"""The demo's supervisor: who starts, who is killed, who joins late, and when.

It watches the run only through its records in the store, as anybody could from anywhere, and
reaches processes only through a `Launcher`. What has happened stands in an event log, so that a
resumed run goes on with the schedule where it stopped. A replica that crashes is started again,
a bounded number of times. Refuses to hide a failure: a trainer that ends badly, or a fleet with
nobody left in it, ends the run with that process's own words.
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from farcast.config import RunConfig, decode_config, encode_config
from farcast.errors import (
    ConfigError,
    ProcessFailedError,
    StoppedAtOnceError,
    StoreUnavailableError,
)
from farcast.fleet.events import EventKind, EventLog
from farcast.fleet.launcher import Handle, Launcher, ProcessSpec, last_words
from farcast.fleet.layout import RunFolder
from farcast.fleet.observe import FleetObserver, FleetSnapshot, View
from farcast.fleet.records import TrainerRecord
from farcast.fleet.restarts import MOST, Restarts
from farcast.fleet.saying import SAID
from farcast.fleet.signals import StopRequest

KILL_AT = 0.4
JOIN_AT = 0.6
LOOK_SECONDS = 0.3
SENTENCE_PREFIX = "farcast: "
"""How a command's one sentence on stderr begins."""
STOP_GRACE = 120.0
"""A trainer asked to stop finishes its step and writes a checkpoint: a minute for a real model."""
DRAIN_SECONDS = 60.0
"""A replica sees that the trainer is done within seconds, but first ends what it samples."""


class Moment(NamedTuple):
    """Something to do once the trainer has taken `step` steps.

    A replica that joins late is started ahead and told to hold back until step `from_step`, so
    that in a short run it does not miss the end while Python imports torch.
    """

    step: int
    action: Literal["kill", "join"]
    replica: str
    from_step: int = 0


class DemoSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a demo adds to a run; kept beside its configuration for a resumed sitting."""

    workers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    kill: bool = True
    link: str | None = None


class DemoPlan(NamedTuple):
    """What this sitting does."""

    config: RunConfig
    settings: DemoSettings
    folder: RunFolder
    resume: bool
    cache: Path | None = None
    """Where prepared models are kept, if not in the usual place."""

    def replicas(self) -> list[str]:
        return [f"r{number}" for number in range(1, self.settings.workers + 1)]

    def schedule(self) -> list[Moment]:
        """One replica is killed if another can carry on meanwhile; one joins late."""
        steps, workers = self.config.train.steps, self.settings.workers
        moments = [Moment(0, "join", f"r{workers + 1}", from_step=math.ceil(JOIN_AT * steps))]
        if self.settings.kill and workers > 1:
            moments.append(Moment(math.ceil(KILL_AT * steps), "kill", "r1"))
        return moments


def new_plan(folder: RunFolder, config: RunConfig, settings: DemoSettings) -> DemoPlan:
    """Make the run's folder; nothing is started."""
    folder.create(config)
    folder.demo.write_bytes(encode_config(settings))
    return DemoPlan(config, settings, folder, resume=False)


def resumed_plan(
    folder: RunFolder,
    *,
    steps: int | None,
    workers: int | None,
    link: str | None,
    kill: bool,
) -> DemoPlan:
    """The plan in `folder`, with what the user now asks for otherwise."""
    config = folder.read_config()
    settings = DemoSettings()
    if folder.demo.exists():
        settings = decode_config(folder.demo.read_bytes(), DemoSettings)
    if steps is not None:
        config = replace(config, train=replace(config.train, steps=steps))
        folder.write_config(config)
    settings = replace(
        settings,
        workers=settings.workers if workers is None else workers,
        link=settings.link if link is None else link,
        kill=settings.kill and kill,
    )
    return DemoPlan(config, settings, folder, resume=True)


Outcome = Literal["done", "stopped"]


class Supervisor:
    """Runs a plan to its end, or until it is asked to stop."""

    def __init__(
        self, plan: DemoPlan, launcher: Launcher, observer: FleetObserver, view: View
    ) -> None:
        self._plan = plan
        self._launcher = launcher
        self._observer = observer
        self._view = view
        self._log = EventLog(plan.folder.events)
        self._trainer: Handle | None = None
        self._workers: dict[str, Handle] = {}
        self._arrivals: set[str] = set()
        """Started by the schedule, not seen serving yet."""
        self._restarts = Restarts()
        self._from_step: dict[str, int] = {}
        self._away_since: float | None = None
        self._snapshot: FleetSnapshot | None = None
        self._starting = "starting the trainer"
        self._doing = ""
        """What this process waits for, "" while the run goes its way."""

    def run(self, stop: StopRequest) -> Outcome:
        """Start everything, follow the schedule, and end with nothing left running."""
        try:
            pending = self._start(stop)
            while self._trainer_runs() and not stop.requested:
                snapshot = self._look()
                pending = self._follow(pending, snapshot)
                self._greet(snapshot)
                self._miss()
                self._start_again()
                stop.wait(LOOK_SECONDS)
            return self._stop() if stop.requested else self._drain()
        except KeyboardInterrupt:
            raise StoppedAtOnceError(self._left()) from None
        finally:
            self._launcher.close()

    def _start(self, stop: StopRequest) -> list[Moment]:
        """Start the trainer and the replicas that should be there; return what is still to do."""
        past = self._log.read()
        for event in past:
            self._view.event(event)
        gone = {event.who for event in past if event.kind == "killed"}
        joined = {event.who for event in past if event.kind == "joined"}
        arguments = ["train", "--config", str(self._plan.folder.config)]
        if self._plan.cache is not None:
            arguments += ["--cache", str(self._plan.cache.absolute())]
        if self._plan.resume:
            arguments.append("--resume")
        before = self._look().trainer if self._plan.resume else None
        self._trainer = self._launch("trainer", arguments)
        if self._plan.resume:
            self._await_trainer(before, stop)
            self._event("resumed", "trainer")
        for name in [*self._plan.replicas(), *sorted(joined)]:
            if name not in gone:
                self._start_worker(name)
        return [m for m in self._plan.schedule() if m.replica not in gone | joined]

    def _await_trainer(self, before: TrainerRecord | None, stop: StopRequest) -> None:
        """Until the trainer has spoken: its record of the last sitting may say "done". What it
        said is told by a change and not by a time, since clocks jump."""
        while self._trainer_runs() and not stop.requested:
            trainer = self._look().trainer
            if trainer is not None and trainer != before:
                return
            stop.wait(LOOK_SECONDS)

    def _follow(self, pending: Sequence[Moment], snapshot: FleetSnapshot) -> list[Moment]:
        """Do what is due; return what is not."""
        due = [moment for moment in pending if snapshot.step >= moment.step]
        for moment in due:
            if moment.action == "kill" and moment.replica in self._workers:
                self._launcher.kill(self._workers.pop(moment.replica))
                self._event("killed", moment.replica, "SIGKILL, as planned")
            elif moment.action == "join":
                self._start_worker(moment.replica, from_step=moment.from_step)
                self._arrivals.add(moment.replica)
        return [moment for moment in pending if moment not in due]

    def _greet(self, snapshot: FleetSnapshot) -> None:
        """Late replicas count as joined once they serve a verified version."""
        for name in sorted(self._arrivals & snapshot.replicas.keys()):
            version = snapshot.replicas[name].record.version
            if version >= 0:
                self._arrivals.remove(name)
                self._event("joined", name, f"late, with version {version}")

    def _miss(self) -> None:
        """Notice replicas that left unasked. A run goes on as long as one is left or will be
        started again; one that met a mistake of the user's is not."""
        for name, handle in list(self._workers.items()):
            status = self._launcher.poll(handle)
            if status is None:
                continue
            del self._workers[name]
            how = self._how(status, name)
            by_chance = status not in (0, ConfigError.exit_code)
            restart = self._restarts.crashed(name) if by_chance else None
            again = f" It starts again in {restart.pause:.0f} s." if restart else ""
            self._event("failed" if status else "left", name, how + again)
            if not self._workers and not self._restarts.waiting and not self._is_over():
                raise ProcessFailedError(
                    f"The last replica, {name}, {how or 'left before the trainer was done.'}",
                    exit_code=max(status, 1),
                )

    def _start_again(self) -> None:
        for name, number, _ in self._restarts.due():
            self._start_worker(name, from_step=self._from_step.get(name, 0))
            self._event("restarted", name, f"after a crash, {number} of at most {MOST} times")

    def _is_over(self) -> bool:
        """Replicas leave by themselves once the trainer has taken its last step."""
        return self._look().step >= self._plan.config.train.steps

    def _trainer_runs(self) -> bool:
        handle = self._trainer
        status = None if handle is None else self._launcher.poll(handle)
        if handle is None or status == 0:
            return False
        if status is None:
            return True
        again = f"`farcast demo --resume --out {self._plan.folder.shown}` goes on"
        raise ProcessFailedError(
            f"The trainer {self._how(status, 'trainer')} {again} from its last checkpoint.",
            exit_code=max(status, 1),
        )

    def _drain(self) -> Outcome:
        """The trainer is done: replicas see that in its record and leave by themselves."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while self._workers and time.monotonic() < deadline:
            self._doing = f"the trainer is done, waiting for {', '.join(self._workers)} to leave"
            self._greet(self._look())
            self._miss()
            time.sleep(LOOK_SECONDS)
        for handle in self._workers.values():
            self._launcher.stop(handle, grace=STOP_GRACE)
        self._greet(self._look())
        return "done"

    def _stop(self) -> Outcome:
        everybody = self._everybody()
        for handle in everybody:
            self._launcher.ask(handle)
        deadline = time.monotonic() + STOP_GRACE
        while time.monotonic() < deadline:
            left = [handle.name for handle in everybody if self._launcher.poll(handle) is None]
            if not left:
                break
            self._doing = f"waiting for {', '.join(left)}"
            self._look()
            time.sleep(LOOK_SECONDS)
        for handle in everybody:
            self._launcher.stop(handle, grace=0.0)
        self._doing = ""
        self._look()
        self._event("stopped", "trainer", "as asked")
        return "stopped"

    def _everybody(self) -> list[Handle]:
        return [*self._workers.values(), *([self._trainer] if self._trainer else [])]

    def _left(self) -> str:
        """What a second Ctrl-C leaves."""
        running = [h.name for h in self._everybody() if self._launcher.poll(h) is None]
        step = 0 if self._snapshot is None else self._snapshot.step
        killed = (
            f"{' and '.join(running)} killed at" if running else "nobody was left, the run is at"
        )
        return (
            f"Ended at once: {killed} step {step}. The store and the last checkpoint are whole; "
            f"`farcast demo --resume --out {self._plan.folder.shown}` goes on from there."
        )

    def _look(self) -> FleetSnapshot:
        """The run now, or as it was last seen while the store cannot be reached."""
        note = self._doing
        try:
            self._snapshot = self._observer.look()
            self._note_return()
        except StoreUnavailableError as error:
            note = str(error)
            self._note_outage(note)
        if self._snapshot is None:
            self._snapshot = FleetSnapshot(None, (), {}, time.time())
        if not self._snapshot.steps and not note:
            words = last_words(self._plan.folder.log("trainer"))
            if SAID.match(words):  # libraries write into the log too
                self._starting = words
            note = self._starting
        self._view.note(note)
        self._view.show(self._snapshot)
        return self._snapshot

    def _note_outage(self, what: str) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
            self._event("away", "store", what)

    def _note_return(self) -> None:
        if self._away_since is not None:
            seconds, self._away_since = time.monotonic() - self._away_since, None
            self._event("back", "store", f"after {seconds:.0f} s")

    def _how(self, status: int, name: str) -> str:
        """How a process ended, in its own words if it had any."""
        log = self._plan.folder.log(name)
        words = last_words(log)
        if status < 0:
            return f"was ended by signal {-status}."
        if words.startswith(SENTENCE_PREFIX):
            return f"ended: {words.removeprefix(SENTENCE_PREFIX)}"
        return f"ended with status {status}; {log} says why ({words[:200]})." if status else ""

    def _event(self, kind: EventKind, who: str, text: str = "") -> None:
        snapshot = self._snapshot
        step, version = (snapshot.step, snapshot.version) if snapshot else (0, -1)
        self._view.event(self._log.add(kind, who, step=step, version=version, text=text))

    def _start_worker(self, name: str, *, from_step: int = 0) -> None:
        arguments = ["worker", "--store", self._plan.config.store, "--id", name]
        if from_step:
            arguments += ["--from-step", str(from_step)]
        if self._plan.settings.link is not None:
            arguments += ["--link", self._plan.settings.link]
        self._from_step[name] = from_step
        self._workers[name] = self._launch(name, arguments)
        self._restarts.started(name)

    def _launch(self, name: str, arguments: Sequence[str]) -> Handle:
        return self._launcher.start(
            ProcessSpec(name, tuple(arguments), self._plan.folder.log(name))
        )
