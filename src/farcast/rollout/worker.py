"""The worker loop: draw tasks, sample them, score the answers, send whole groups home.

Backpressure comes first: while the trainer is behind by the sender's bound, nothing is sampled,
since what is sampled now would be stale when it is read. What one round of sampling brought is
one object in the store, since each costs a round trip: whole groups, many small ones together.
While it goes up the line, the next round is sampled. An outage of the store holds the loop once
`MAX_IN_FLIGHT` rounds wait, until the store answers again.

Refuses to re-tokenise, to give an episode that failed a reward, and to send what it did not
sample itself. An engine whose weights are uncertain ends the loop with the engine's error.
"""

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from farcast.config import SamplingConfig, TaskConfig
from farcast.engines.base import Engine
from farcast.errors import (
    BacklogFullError,
    FarcastError,
    StoreUnavailableError,
    TrajectoryTooLargeError,
)
from farcast.rollout.environment import Environment, Task
from farcast.rollout.playing import Limits, Play
from farcast.rollout.prompts import PromptCodec, ask
from farcast.rollout.seeds import seed_of
from farcast.trajectory import Trajectory, TrajectorySender

MAX_IN_FLIGHT = 2
"""Rounds that may wait to be written. A crash loses these: they were never acknowledged."""

_IDLE_SECONDS = 0.1
_FIRST_RETRY_SECONDS = 0.5
_LAST_RETRY_SECONDS = 15.0


class WorkerCounters(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker did since it started. Seconds are wall time of the loop."""

    groups: int = 0
    trajectories: int = 0
    """Acknowledged by the sender: durable."""
    tokens: int = 0
    """Sampled."""
    aborted: int = 0
    refused: int = 0
    """Groups given up because a trajectory was too large."""
    retries: int = 0
    """Submissions repeated because the store did not answer."""
    reward_sum: float = 0.0
    sampling_seconds: float = 0.0
    waiting_seconds: float = 0.0
    """Held up by the trainer's backlog, by the store, or for a first version."""


class _Drawn(NamedTuple):
    """A task with its prompt, and the seed and id of its group."""

    group_id: str
    seed: int
    task: Task
    prompt: tuple[int, ...]


class _Sent(NamedTuple):
    """What became of some groups, after how many repetitions."""

    groups: int = 0
    trajectories: int = 0
    retries: int = 0
    refused: int = 0


class Worker:
    """Samples for one run with one engine. `report` is called after each round of sampling and
    every tenth of a second while waiting."""

    def __init__(
        self,
        engine: Engine,
        environment: Environment,
        codec: PromptCodec,
        sender: TrajectorySender,
        *,
        group_size: int,
        task: TaskConfig,
        sampling: SamplingConfig,
        engine_name: str = "",
        seed: int = 0,
        report: Callable[[WorkerCounters], None] = lambda _: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine = engine
        self._environment = environment
        self._codec = codec
        self._sender = sender
        self._group_size = group_size
        self._task = task
        self._sampling = sampling
        self._engine_name = engine_name
        self._seed = seed
        self._report = report
        self._stop = stop
        self._session = secrets.token_hex(6)
        self._first_sequence: int | None = None
        self._drawn = 0
        self._counters = WorkerCounters()
        self._in_flight: deque[Future[_Sent]] = deque()
        self._leaving = False

    @property
    def counters(self) -> WorkerCounters:
        return self._counters

    def run(self) -> WorkerCounters:
        """Sample until `stop` says so; what was sampled by then is sent before it returns,
        unless the store does not answer."""
        with ThreadPoolExecutor(1, thread_name_prefix="farcast-submit") as pool:
            try:
                self._loop(pool)
            finally:
                self._leaving = True
        self._collect()
        if self._sender.spooled_bytes:
            with contextlib.suppress(StoreUnavailableError, BacklogFullError):
                self._sender.flush()  # or the next process of this worker does
        self._report(self._counters)
        return self._counters

    def _loop(self, pool: ThreadPoolExecutor) -> None:
        while not self._stop():
            if self._is_ready():
                self._round(pool)
            else:
                time.sleep(_IDLE_SECONDS)
                self._count(waiting_seconds=_IDLE_SECONDS)
            self._report(self._counters)

    def _is_ready(self) -> bool:
        """Whether sampling now would be of use. Errors of earlier submissions surface here."""
        self._collect()
        if self._engine.version is None or len(self._in_flight) >= MAX_IN_FLIGHT:
            return False
        try:
            if self._first_sequence is None:
                self._first_sequence = self._sender.next_sequence
            coming = len(self._in_flight) * self._sampling.batch_groups
            return not self._sender.is_full(coming_groups=coming)
        except FarcastError as error:
            if not error.retry:
                raise
            return False  # a store that does not answer has no room

    def _collect(self) -> None:
        """Take the results of submissions that are done."""
        while self._in_flight and self._in_flight[0].done():
            sent = self._in_flight.popleft().result()
            self._count(**sent._asdict())

    def _round(self, pool: ThreadPoolExecutor) -> None:
        """`batch_groups` groups through the engine together, turn by turn, sent once all of them
        have ended."""
        drawn = [self._draw() for _ in range(self._sampling.batch_groups)]
        plays = [[self._play(one) for _ in range(self._group_size)] for one in drawn]
        going = [play for group in plays for play in group]
        turn = 0
        while going:
            self._turn(going, seed_of(drawn[0].group_id, "sample", *([turn] if turn else [])))
            going, turn = [play for play in going if play.finish is None], turn + 1
            if going and self._stop():
                for play in going:
                    play.abort()
                break
        groups = [
            [self._trajectory(one, member, play) for member, play in enumerate(group)]
            for one, group in zip(drawn, plays, strict=True)
        ]
        self._in_flight.append(pool.submit(self._submit, groups))

    def _turn(self, going: Sequence[Play], seed: int) -> None:
        """One turn of every episode that goes on: one batch, then the environment's replies."""
        started, clock = time.time(), time.monotonic()
        completions = self._engine.generate(
            [play.prompt for play in going], self._sampling, seed=seed
        )
        self._count(
            sampling_seconds=time.monotonic() - clock,
            tokens=sum(len(c.token_ids) for c in completions),
        )
        for play, completion in zip(going, completions, strict=True):
            play.take(completion, started=started)

    def _play(self, drawn: _Drawn) -> Play:
        limits = Limits(self._task.max_turns, self._task.max_tokens, self._sampling.max_new_tokens)
        conversation = self._environment.begin(drawn.task)
        return Play(conversation, self._codec, drawn.prompt, limits)

    def _draw(self) -> _Drawn:
        """The next task. Seeds come from the run's seed, this worker's id, where its sequence stood
        at the start, and a count, so that neither another worker nor a restart draws them again."""
        first = self._first_sequence or 0
        seed = seed_of(self._seed, self._sender.worker_id, first, self._drawn)
        group_id = f"{self._session}-{self._drawn:06d}"
        self._drawn += 1
        task = self._environment.task(seed)
        prompt = self._codec.encode_prompt(ask(self._task.instruction, task.question))
        return _Drawn(group_id, seed, task, tuple(prompt))

    def _trajectory(self, drawn: _Drawn, member: int, play: Play) -> Trajectory:
        self._count(aborted=int(play.finish == "aborted"), reward_sum=play.score.reward)
        return play.episode.trajectory(
            id=f"{drawn.group_id}-{member}",
            group_id=drawn.group_id,
            group_size=self._group_size,
            worker_id=self._sender.worker_id,
            reward=play.score.reward,
            rewards=play.score.parts,
            finish_reason=play.finish,
            task=self._environment.name,
            seed=drawn.seed,
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            engine=self._engine_name,
        )

    def _submit(self, groups: Sequence[Sequence[Trajectory]]) -> _Sent:
        """Until the groups are durable, or the loop is over while the store does not answer. One
        with a trajectory that is too large does not hold up the others."""
        retries, delay = 0, _FIRST_RETRY_SECONDS
        while True:
            try:
                self._sender.submit_many([member for group in groups for member in group])
            except TrajectoryTooLargeError:
                if len(groups) == 1:
                    return _Sent(retries=retries, refused=1)
                alone = [self._submit([group]) for group in groups]
                return _Sent(*map(sum, zip(_Sent(retries=retries), *alone, strict=True)))
            except FarcastError as error:
                if not error.retry:
                    raise
                if self._sleep_unless_stopped(delay):
                    return _Sent(retries=retries)
                retries += 1
                # A trainer that is behind catches up soon; a store that fails wants peace.
                if not isinstance(error, BacklogFullError):
                    delay = min(2 * delay, _LAST_RETRY_SECONDS)
            else:
                return _Sent(len(groups), sum(map(len, groups)), retries)

    def _sleep_unless_stopped(self, seconds: float) -> bool:
        """True when the loop is over, so that nothing is tried again."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._is_over():
            time.sleep(_IDLE_SECONDS)
        return self._is_over()

    def _is_over(self) -> bool:
        return self._leaving or self._stop()

    def _count(self, **more: float) -> None:
        now = {name: getattr(self._counters, name) + value for name, value in more.items()}
        self._counters = msgspec.structs.replace(self._counters, **now)
