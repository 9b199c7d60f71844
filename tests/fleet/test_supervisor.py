"""The demo's schedule, over a launcher that plays a run in memory."""

from pathlib import Path

import pytest

from farcast.config import RunConfig, TrainConfig
from farcast.errors import ProcessFailedError
from farcast.fleet import demo as demo_module
from farcast.fleet.demo import DemoPlan, DemoSettings, Supervisor, new_plan, resumed_plan
from farcast.fleet.events import EventLog, FleetEvent
from farcast.fleet.launcher import Handle, ProcessSpec
from farcast.fleet.layout import RunFolder
from farcast.fleet.observe import FleetObserver, FleetSnapshot
from farcast.fleet.records import ReplicaRecord, StepRecord
from farcast.fleet.registry import Registry
from farcast.fleet.signals import StopRequest
from farcast.store import open_store


class PlayedRun:
    """A launcher whose trainer takes a step each time somebody looks, and whose replicas serve
    as soon as they are started."""

    def __init__(self, steps: int, *, first: int = 0, trainer_fails_at: int | None = None) -> None:
        self.registry = Registry(open_store("memory://"))
        self.calls: list[str] = []
        self._step = first
        self._steps = steps
        self._fails_at = trainer_fails_at
        self._gone: dict[str, int] = {}
        self.failing: set[str] = set()

    def start(self, spec: ProcessSpec) -> Handle:
        held = f" until {spec.arguments[-1]}" if "--from-step" in spec.arguments else ""
        self.calls.append(f"start {spec.name} at {self._step}{held}")
        if spec.name != "trainer":
            self.registry.write_replica(
                ReplicaRecord(replica_id=spec.name, state="serving", version=self._step)
            )
        return Handle(spec.name, len(self.calls))

    def poll(self, handle: Handle) -> int | None:
        if handle.name != "trainer":
            if handle.name in self.failing:
                return 4
            return self._gone.get(handle.name, 0 if self._step >= self._steps else None)
        if self._step == self._fails_at:
            return 6
        if self._step >= self._steps:
            return 0
        self._step += 1
        self.registry.put_step(
            StepRecord(version=self._step, step=self._step, root="0" * 64, incarnation="a")
        )
        return None

    def kill(self, handle: Handle) -> None:
        self.calls.append(f"kill {handle.name} at {self._step}")
        self._gone[handle.name] = -9

    def ask(self, handle: Handle) -> None:
        self.calls.append(f"ask {handle.name}")

    def stop(self, handle: Handle, *, grace: float) -> int:  # noqa: ARG002
        self.calls.append(f"stop {handle.name}")
        return 0

    def close(self) -> None:
        self.calls.append("close")


class SilentView:
    def __init__(self) -> None:
        self.events: list[FleetEvent] = []

    def note(self, text: str) -> None:
        pass

    def event(self, event: FleetEvent) -> None:
        self.events.append(event)

    def show(self, snapshot: FleetSnapshot) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "LOOK_SECONDS", 0.0)


def plan_in(path: Path, *, steps: int = 10, workers: int = 2, kill: bool = True) -> DemoPlan:
    config = RunConfig(
        run_id="run", store="memory://", model="tiny", out=str(path), train=TrainConfig(steps=steps)
    )
    return new_plan(RunFolder(path), config, DemoSettings(workers=workers, kill=kill))


def play(plan: DemoPlan, run: PlayedRun, stop: StopRequest | None = None) -> tuple[str, list[str]]:
    view = SilentView()
    outcome = Supervisor(plan, run, FleetObserver(run.registry), view).run(stop or StopRequest())
    return outcome, [f"{event.who} {event.kind}" for event in view.events]


def test_one_is_killed_midway_and_a_third_joins_late(tmp_path: Path) -> None:
    run = PlayedRun(10)
    outcome, events = play(plan_in(tmp_path / "run"), run)
    assert outcome == "done"
    assert events == ["r3 joined", "r1 killed", "r2 left", "r3 left"]
    assert run.calls == [
        "start trainer at 0",
        "start r1 at 0",
        "start r2 at 0",
        "start r3 at 1 until 6",
        "kill r1 at 4",
        "close",
    ]


def test_the_only_replica_is_never_killed(tmp_path: Path) -> None:
    run = PlayedRun(10)
    play(plan_in(tmp_path / "run", workers=1), run)
    assert not [call for call in run.calls if call.startswith("kill")]


def test_no_kill_is_obeyed(tmp_path: Path) -> None:
    run = PlayedRun(10)
    play(plan_in(tmp_path / "run", kill=False), run)
    assert not [call for call in run.calls if call.startswith("kill")]


def test_a_request_to_stop_reaches_everybody_and_is_remembered(tmp_path: Path) -> None:
    class AlreadyAsked(StopRequest):
        requested = True  # type: ignore[assignment]

    plan, run = plan_in(tmp_path / "run"), PlayedRun(10)
    outcome, events = play(plan, run, AlreadyAsked())
    assert outcome == "stopped"
    assert [c for c in run.calls if c.startswith("ask")] == ["ask r1", "ask r2", "ask trainer"]
    assert run.calls[-1] == "close"
    assert events == ["trainer stopped"]


def test_a_resumed_sitting_knows_who_was_killed_and_who_joined(tmp_path: Path) -> None:
    plan = plan_in(tmp_path / "run")
    log = EventLog(plan.folder.events)
    log.add("killed", "r1", step=4, version=4)
    log.add("joined", "r3", step=6, version=6)
    run = PlayedRun(10, first=7)
    again = resumed_plan(plan.folder, steps=None, workers=None, link=None, kill=True)
    outcome, _ = play(again, run)
    assert outcome == "done"
    started = [call.split()[1] for call in run.calls if call.startswith("start")]
    assert started == ["trainer", "r2", "r3"]
    assert not [call for call in run.calls if call.startswith("kill")]


def test_a_trainer_that_fails_ends_the_run_in_its_own_words(tmp_path: Path) -> None:
    plan, run = plan_in(tmp_path / "run"), PlayedRun(10, trainer_fails_at=3)
    plan.folder.log("trainer").write_text("step 3\nfarcast: The weights are NaN; lower the rate.\n")
    with pytest.raises(
        ProcessFailedError, match=r"The weights are NaN; lower the rate\."
    ) as caught:
        play(plan, run)
    assert caught.value.exit_code == 6
    assert run.calls[-1] == "close"


def test_a_run_goes_on_until_its_last_replica_fails(tmp_path: Path) -> None:
    plan, run = plan_in(tmp_path / "run", kill=False), PlayedRun(10)
    run.failing = {"r1"}
    outcome, events = play(plan, run)
    assert outcome == "done"
    assert "r1 failed" in events
    plan, run = plan_in(tmp_path / "again", kill=False), PlayedRun(10)
    run.failing = {"r1", "r2", "r3"}
    with pytest.raises(ProcessFailedError, match="last replica"):
        play(plan, run)


def test_more_steps_can_be_asked_for_when_a_run_is_resumed(tmp_path: Path) -> None:
    plan = plan_in(tmp_path / "run")
    resumed_plan(plan.folder, steps=20, workers=3, link="1gbit,1ms", kill=True)
    again = resumed_plan(plan.folder, steps=None, workers=None, link=None, kill=True)
    assert again.config.train.steps == 20
