"""The worker loop with a fake engine: whole groups, exact tokens, backpressure, outages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from farcast.config import SamplingConfig, TaskConfig
from farcast.engines.base import Completion
from farcast.errors import (
    FormatError,
    ScoringError,
    StoreFullError,
    TargetUncertainError,
    TrajectoryTooLargeError,
)
from farcast.rollout import Episode, Letters, Score, SingleTurn, Task, Worker, WorkerCounters
from farcast.rollout import worker as worker_module
from farcast.store.memory import MemoryStore
from farcast.store.testing import Fail, FaultStore, LoseReply, Rule
from farcast.trajectory import (
    Trajectory,
    TrajectoryReceiver,
    TrajectorySender,
    check_trajectory,
)
from farcast.trajectory.keys import TRAJECTORIES_PREFIX
from farcast.types import VersionRef
from trajectory_world import RUN, ids, root_of, span

SAMPLING = SamplingConfig(max_new_tokens=4, batch_groups=2, temperature=0.7, top_p=0.9)


@dataclass
class FakeEngine:
    """Answers with ids that depend on the seed. Version 3 takes over after the second token."""

    version: VersionRef | None = field(default_factory=lambda: VersionRef(RUN, 2, root_of(2)))
    prompts: list[list[int]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    finish: Callable[[int], str] = lambda _: "length"
    error: Exception | None = None

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, *, seed: int
    ) -> list[Completion]:
        if self.error is not None:
            raise self.error
        self.prompts += [list(p) for p in prompts]
        self.seeds.append(seed)
        return [
            Completion(
                token_ids=tuple(97 + (seed + i + j) % 2 for j in range(sampling.max_new_tokens)),
                logprobs=(-0.5, -0.25, -1.0, -2.0),
                spans=(span(0, 2, 2), span(2, 4, 3)),
                finish_reason=self.finish(i),  # type: ignore[arg-type]
            )
            for i in range(len(prompts))
        ]


class Codec:
    """Characters as ids. Refuses to encode anything that was sampled."""

    def encode_prompt(self, text: str) -> list[int]:
        assert text.startswith("Answer.\n\nWrite the letter")
        return [1, *text.encode(), 2]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode()


class World:
    def __init__(
        self, store: object = None, *, rounds: int = 2, worker: str = "w0", **sender: object
    ):
        self.store = store if store is not None else MemoryStore()
        self.engine = FakeEngine()
        self.reports: list[WorkerCounters] = []
        self.rounds = rounds
        self.environment: object = Letters()
        self.sender = TrajectorySender(self.store, RUN, worker, **sender)  # type: ignore[arg-type]

    def run(self, stop: Callable[[], bool] | None = None) -> WorkerCounters:
        worker = Worker(
            self.engine,
            self.environment,  # type: ignore[arg-type]
            Codec(),
            self.sender,
            group_size=3,
            task=TaskConfig(instruction="Answer."),
            sampling=SAMPLING,
            engine_name="fake",
            report=self.reports.append,
            stop=stop or (lambda: len(self.engine.seeds) >= self.rounds),
        )
        return worker.run()

    def arrived(self) -> list:
        return TrajectoryReceiver(self.store, RUN).consume(1000)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_IDLE_SECONDS", 0.002)
    monkeypatch.setattr(worker_module, "_FIRST_RETRY_SECONDS", 0.005)


def test_groups_come_home_whole_and_as_sampled() -> None:
    world = World()
    counters = world.run()
    home = world.arrived()
    assert len(home) == 2 * 2 * 3
    for start in range(0, 12, 3):
        members = home[start : start + 3]
        assert len({m.group_id for m in members}) == 1
        assert len({m.token_ids[:-4] for m in members}) == 1
    for trajectory, prompt in zip(home, world.engine.prompts, strict=True):
        check_trajectory(trajectory)
        start = len(prompt)
        assert list(trajectory.token_ids[:start]) == prompt
        assert trajectory.loss_mask == (False,) * start + (True,) * 4
        assert trajectory.logprobs[start:] == (-0.5, -0.25, -1.0, -2.0)
        assert trajectory.spans == (span(start, start + 2, 2), span(start + 2, start + 4, 3))
        assert [t.role for t in trajectory.turns] == ["user", "model"]
        assert (trajectory.temperature, trajectory.top_p) == (0.7, 0.9)
        assert (trajectory.task, trajectory.engine, trajectory.group_size) == ("letters", "fake", 3)
        text = Codec().decode(trajectory.token_ids[start:])
        asked = Letters().task(trajectory.seed)
        assert trajectory.reward == Letters().score(asked, text).reward
    assert (counters.groups, counters.trajectories, counters.tokens) == (4, 12, 48)
    assert world.reports[-1] == counters


def test_one_object_is_one_round() -> None:
    world = World()
    assert world.run().groups == 4
    assert len(list(world.store.list(TRAJECTORIES_PREFIX))) == 2


def test_neither_another_worker_nor_a_restart_draws_the_same_seeds_or_ids() -> None:
    store = MemoryStore()
    seeds: list[int] = []
    for worker in ("w0", "w0", "w1"):
        world = World(store, worker=worker)
        world.run()
        seeds += world.engine.seeds
    home = world.arrived()
    assert len(set(ids(home))) == 36
    assert len({t.group_id for t in home}) == 12
    assert len({t.seed for t in home}) == 12
    assert len(set(seeds)) == 6


def test_an_aborted_member_says_so() -> None:
    world = World(rounds=1)
    world.engine.finish = lambda index: "aborted" if index == 1 else "stop"
    assert world.run().aborted == 1
    assert [(t.finish_reason, t.reward) for t in world.arrived()][1] == ("aborted", 0.0)


class Failing(SingleTurn):
    """Cannot score, or scores with what is no number."""

    name = "failing"

    def __init__(self, reward: float | None) -> None:
        self.reward = reward

    def task(self, seed: int) -> Task:
        return Task(question="Write the letter", answer=str(seed))

    def score(self, task: Task, text: str) -> Score:
        if self.reward is None:
            raise ScoringError(f"{task.question} {text}")
        return Score(reward=self.reward)


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_an_answer_that_cannot_be_scored_is_aborted(reward: float | None) -> None:
    world = World(rounds=1)
    world.environment = Failing(reward)
    world.run()
    assert {(t.finish_reason, t.reward) for t in world.arrived()} == {("aborted", 0.0)}


def test_nothing_is_sampled_while_the_trainer_is_behind() -> None:
    position = 0
    world = World(max_backlog_groups=4, position_of_reader=lambda: position, rounds=99)
    idle = 0

    def stop() -> bool:
        nonlocal position, idle
        waiting = world.reports and world.reports[-1].waiting_seconds > 0
        idle += bool(waiting)
        if idle == 50:
            position = 1
        return idle > 100

    counters = world.run(stop)
    # Two rounds of two groups before the first wait, and one once the trainer had read one.
    assert counters.groups == 6
    assert counters.waiting_seconds > 0


def test_no_version_no_sampling() -> None:
    world = World()
    world.engine.version = None
    world.run(lambda: len(world.reports) >= 3)
    assert world.engine.seeds == []


@pytest.mark.parametrize("fault", [Fail(), LoseReply()], ids=["not written", "reply lost"])
def test_an_outage_of_the_store_delays_and_doubles_nothing(fault: object) -> None:
    store = FaultStore()
    store.add(Rule(fault, verb="put", nth=2, times=3))  # type: ignore[arg-type]
    world = World(store, rounds=3)
    counters = world.run(lambda: world.reports != [] and world.reports[-1].trajectories >= 18)
    home = ids(world.arrived())
    assert len(home) == len(set(home)) == counters.trajectories
    assert counters.retries >= 1


def test_a_full_store_ends_the_worker_with_its_error() -> None:
    store = FaultStore()
    store.add(Rule(Fail(StoreFullError("full")), verb="put", prefix=TRAJECTORIES_PREFIX))
    with pytest.raises(StoreFullError):
        World(store, rounds=9).run()


def test_an_uncertain_engine_ends_the_worker() -> None:
    world = World()
    world.engine.error = TargetUncertainError("torn")
    with pytest.raises(TargetUncertainError):
        world.run()


def test_an_engine_that_fails_during_an_outage_does_not_hang_the_worker() -> None:
    store = FaultStore()
    store.add(Rule(Fail(), verb="put", prefix=TRAJECTORIES_PREFIX, times=None))
    world = World(store)

    def stop() -> bool:
        if len(world.engine.seeds) == 1:
            world.engine.error = TargetUncertainError("torn")
        return False

    with pytest.raises(TargetUncertainError):
        world.run(stop)


def test_a_group_that_is_too_large_is_given_up_and_counted() -> None:
    world = World(rounds=1, max_batch_bytes=100, max_trajectory_bytes=100)
    assert world.run().refused == 2
    assert world.arrived() == []


def test_a_group_that_is_too_large_does_not_hold_up_the_others() -> None:
    world = World(rounds=1)
    whole = world.sender.submit_many

    def submit_many(trajectories: Sequence[Trajectory]) -> None:
        if any(t.group_id.endswith("000000") for t in trajectories):
            raise TrajectoryTooLargeError("the first group is too large")
        whole(trajectories)

    world.sender.submit_many = submit_many  # type: ignore[assignment]
    counters = world.run()
    assert (counters.refused, counters.groups, counters.trajectories) == (1, 1, 3)
    assert {t.group_id[-6:] for t in world.arrived()} == {"000001"}


def test_case_075_a_prompt_that_does_not_continue_the_episode_is_refused() -> None:
    """[5, 6] and [7] may read the same: a template that renders turn two anew can tell them
    apart only by their ids."""
    completion = Completion((5, 6), (-1.0, -1.0), (span(0, 2, 1),), "stop")
    episode = Episode()
    episode.show_prompt([1, 2], "user")
    episode.sampled(completion)
    with pytest.raises(FormatError, match="token 2 of 4"):
        episode.show_prompt([1, 2, 7, 3], "observation")
    with pytest.raises(FormatError, match="token 3 of 4"):
        episode.show_prompt([1, 2, 5], "observation")
    episode.show_prompt([1, 2, 5, 6, 3], "observation")
    episode.sampled(completion)
    assert episode.token_ids == [1, 2, 5, 6, 3, 5, 6]
    assert episode.loss_mask == [False, False, True, True, False, True, True]
    assert episode.spans == [span(2, 4, 1), span(5, 7, 1)]
    assert [(t.role, t.start, t.end) for t in episode.turns] == [
        ("user", 0, 2),
        ("model", 2, 4),
        ("observation", 4, 5),
        ("model", 5, 7),
    ]
