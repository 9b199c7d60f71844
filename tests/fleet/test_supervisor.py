"""The demo's schedule, over a launcher that plays a run in memory."""

import subprocess
import sys
from pathlib import Path

import pytest

from farcast.config import RunConfig, TrainConfig
from farcast.errors import ConfigError, ProcessFailedError, StoppedAtOnceError
from farcast.fleet import demo as demo_module
from farcast.fleet import restarts as restarts_module
from farcast.fleet.claim import claimed
from farcast.fleet.demo import DemoPlan, DemoSettings, Supervisor, new_plan, resumed_plan
from farcast.fleet.events import EventLog, FleetEvent
from farcast.fleet.launcher import Handle, ProcessSpec
from farcast.fleet.layout import RunFolder
from farcast.fleet.observe import FleetObserver, FleetSnapshot
from farcast.fleet.records import ReplicaRecord, StepRecord, TrainerRecord
from farcast.fleet.registry import Registry
from farcast.fleet.restarts import MOST, STEADY_SECONDS, Restarts
from farcast.fleet.signals import StopRequest
from farcast.store import open_store
from farcast.store.testing import Fail, FaultStore, Rule


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
    monkeypatch.setattr(restarts_module, "FIRST_PAUSE_SECONDS", 0.0)


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


def test_a_second_request_ends_at_once_and_says_what_was_left(tmp_path: Path) -> None:
    class Insisted(PlayedRun):
        def ask(self, handle: Handle) -> None:
            super().ask(handle)
            raise KeyboardInterrupt

    class AlreadyAsked(StopRequest):
        requested = True  # type: ignore[assignment]

    plan, run = plan_in(tmp_path / "run"), Insisted(10)
    with pytest.raises(StoppedAtOnceError, match="r1 and r2 and trainer killed at step") as caught:
        play(plan, run, AlreadyAsked())
    assert f"--resume --out {plan.folder.shown}" in str(caught.value)
    assert [call for call in run.calls if not call.startswith("start")] == ["ask r1", "close"]


def test_who_is_waited_for_is_said_while_it_stops(tmp_path: Path) -> None:
    class Noting(SilentView):
        def __init__(self) -> None:
            super().__init__()
            self.notes: list[str] = []

        def note(self, text: str) -> None:
            self.notes.append(text)

    class AlreadyAsked(StopRequest):
        requested = True  # type: ignore[assignment]

    plan, run, view = plan_in(tmp_path / "run"), PlayedRun(3), Noting()
    Supervisor(plan, run, FleetObserver(run.registry), view).run(AlreadyAsked())
    assert "waiting for r1, r2, trainer" in view.notes
    assert view.notes[-1] == ""  # nothing is waited for any more


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


class Crashing(PlayedRun):
    """r1 crashes `times` times with `status`, each time as soon as somebody looks."""

    def __init__(self, steps: int, times: int, status: int) -> None:
        super().__init__(steps)
        self.left, self.status = times, status

    def poll(self, handle: Handle) -> int | None:
        if handle.name == "r1" and self.left:
            self.left -= 1
            return self.status
        return super().poll(handle)


@pytest.mark.parametrize(
    ("times", "status", "restarts"), [(2, 1, 2), (1, -9, 1), (99, 4, MOST), (99, 2, 0)]
)
def test_a_crashed_replica_starts_again_a_bounded_number_of_times(
    tmp_path: Path, times: int, status: int, restarts: int
) -> None:
    """Not one whose user made a mistake (status 2): it would make it again."""
    plan, run = plan_in(tmp_path / "run", kill=False), Crashing(12, times, status)
    outcome, events = play(plan, run)
    assert outcome == "done"
    assert events.count("r1 restarted") == restarts
    assert events.count("r1 failed") == min(times, restarts + 1)
    assert sum(call.startswith("start r1 ") for call in run.calls) == restarts + 1


def test_the_only_replica_may_crash_and_come_back(tmp_path: Path) -> None:
    plan, run = plan_in(tmp_path / "run", workers=1), Crashing(12, 1, 1)
    assert play(plan, run)[0] == "done"


def test_replicas_that_all_leave_before_the_end_end_the_run(tmp_path: Path) -> None:
    plan, run = plan_in(tmp_path / "run", kill=False), PlayedRun(10)
    run._gone = dict.fromkeys(("r1", "r2", "r3"), 0)
    with pytest.raises(ProcessFailedError, match="left before the trainer was done"):
        play(plan, run)


def test_an_outage_of_the_store_is_told_at_both_ends(tmp_path: Path) -> None:
    plan, run = plan_in(tmp_path / "run", workers=1), PlayedRun(10)
    faulty = FaultStore(open_store("memory://"))
    run.registry = Registry(faulty)
    faulty.add(Rule(Fail(), verb="list", prefix="fleet/steps/", nth=3, times=2))
    outcome, events = play(plan, run)
    assert outcome == "done"
    assert [event for event in events if event.startswith("store")] == ["store away", "store back"]


def test_a_resumed_trainer_is_awaited_by_its_word_and_not_by_a_clock(tmp_path: Path) -> None:
    """Its clock, or this one, may have been set back since the last sitting."""

    class Speaks(PlayedRun):
        def start(self, spec: ProcessSpec) -> Handle:
            if spec.name == "trainer":
                self.registry.write_trainer(
                    TrainerRecord(run_id="run", state="training", version=1, step=1, updated=5.0)
                )
            return super().start(spec)

    plan, run = plan_in(tmp_path / "run", workers=1), Speaks(10, first=1)
    run.registry.write_trainer(
        TrainerRecord(run_id="run", state="done", version=1, step=1, updated=1e12)
    )
    again = resumed_plan(plan.folder, steps=None, workers=None, link=None, kill=True)
    play(again, run)
    assert "start r1 at 2" in run.calls


def test_restarts_wait_longer_each_time_and_are_forgotten_after_a_steady_time() -> None:
    now = [0.0]
    restarts = Restarts(clock=lambda: now[0])
    restarts._due.clear()

    def crash() -> int | None:
        restarts.started("r1")
        found = restarts.crashed("r1")
        return None if found is None else found.number

    assert [crash() for _ in range(MOST + 1)] == [*range(1, MOST + 1), None]
    restarts.started("r1")
    now[0] += STEADY_SECONDS
    found = restarts.crashed("r1")
    assert found is not None
    assert found.number == 1
    assert restarts.waiting


def test_a_line_cut_short_takes_no_other_with_it(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.add("killed", "r1", step=4, version=4)
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"kind":"joined","who":"r')
    log.add("joined", "r3", step=6, version=6)
    log.add("left", "r3", step=7, version=7)
    assert [event.kind for event in log.read()] == ["killed", "joined", "left"]


def test_a_folder_is_claimed_by_one_process_and_freed_by_its_end(tmp_path: Path) -> None:
    file, told = tmp_path / "run/trainer.lock", list[str]()
    code = (
        "import sys\nfrom pathlib import Path\nfrom farcast.fleet.claim import claimed\n"
        f"with claimed(Path({str(file)!r}), 'trainer'):\n    print('held', flush=True)\n"
        "    sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="Another trainer"), claimed(file, "trainer"):
            pass

        def end_it(_: float) -> bool:
            holder.kill()
            holder.wait()
            return False

        with claimed(file, "trainer", patience=20, wait=end_it, tell=told.append):
            assert len(told) == 1
    finally:
        holder.kill()
        holder.communicate()


def test_more_steps_can_be_asked_for_when_a_run_is_resumed(tmp_path: Path) -> None:
    plan = plan_in(tmp_path / "run")
    resumed_plan(plan.folder, steps=20, workers=3, link="1gbit,1ms", kill=True)
    again = resumed_plan(plan.folder, steps=None, workers=None, link=None, kill=True)
    assert again.config.train.steps == 20
