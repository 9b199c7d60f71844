"""A whole run, small, with the link and without: is anything slower, is anything learnt worse?

Trainer and replica are the parts that processes of a run are put together from, here as two
threads: a tiny model learns `letters`, one replica samples and follows, and both reach a folder
store only through emulated links of their own. Runs with and without the link take turns, so that
what else this machine does meets both.

    trainer_blocked_fraction      time the loop waited for publishing, of the time of its steps
    tokens_per_s_linked_over_free tokens trained on per second, with the link over without
    curve_gap                     mean reward of the last steps, with the link minus without
    curve_spread                  how far runs without the link differ among seeds (max - min)

A step is timed from one report to the next, and one is reported when its version is durable and
the next has found its gradients. Two are not timed: the first, for which a replica has to fetch
all of version 0, and the last, whose version is waited for since no step follows to hide it. That
wait comes once a run, however long the run, and is told apart.
"""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from farcast.config import LinkConfig, RunConfig
from farcast.engines.chat import ChatCodec
from farcast.engines.modules import empty_module, load_module
from farcast.engines.transformers_engine import TransformersEngine
from farcast.fleet.presets import run_config
from farcast.publish import Publisher
from farcast.replica import Subscriber
from farcast.replica.widened import WidenedModule
from farcast.rollout import Worker, make_environment
from farcast.store import LinkedStore, open_store
from farcast.store.archive import Archive
from farcast.store.base import Store
from farcast.train.checkpoint import Checkpoints
from farcast.train.loop import StepReport, Trainer
from farcast.train.models import TINY, prepare_model
from farcast.train.policy import Policy
from farcast.trajectory import GroupBatcher, TrajectoryReceiver, TrajectorySender

REPLICA = "r1"
OBJECTIVE = "tis"
"""What answers of another version lose least under, by the page on staleness: the link makes them
half a version older here."""

GROUPS = 32
"""Of a step, four times the preset's: a step of a second, which no real model has, would be
mostly round trips."""

LAST = 4
"""A run is judged by the mean reward of its last quarter of steps."""


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Sums are over the timed steps, all but the first and the last;
    `last_wait_seconds` is the wait for the last version."""

    linked: bool
    seed: int
    tokens: int
    seconds: float
    step_seconds: float
    blocked_seconds: float
    last_wait_seconds: float
    waited_seconds: float
    bytes_sent: int
    staleness_mean: float
    curve: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def result(self) -> float:
        """Mean reward of the last steps."""
        return fmean(self.curve[-max(1, len(self.curve) // LAST) :])


class TrainingReport(msgspec.Struct, frozen=True, kw_only=True):
    trainer_blocked_fraction: float
    tokens_per_s_linked_over_free: float
    """Median over seeds."""
    tokens_per_s_linked_over_free_by_seed: tuple[float, ...]
    curve_gap: float
    curve_spread: float
    curves_agree: bool
    """The gap is no larger than the spread."""
    runs: tuple[RunOutcome, ...]


def measure_training(
    folder: Path,
    cache: Path,
    link: LinkConfig,
    *,
    steps: int,
    seeds: Sequence[int],
    say: Callable[[str], None],
) -> TrainingReport:
    """Each seed with the link and without, the order turning with each seed."""
    model, runs = prepare_model(TINY, cache), []
    say("training: three steps before the clock runs")  # kernels are compiled on their first use
    run_once(folder / "first", model, None, steps=3, seed=0)
    for place, seed in enumerate(seeds):
        for linked in (True, False) if place % 2 else (False, True):
            say(f"training: seed {seed} {'with' if linked else 'without'} the link")
            own = folder / f"{seed}-{'linked' if linked else 'free'}"
            runs.append(run_once(own, model, link if linked else None, steps=steps, seed=seed))
    return summarise_training(runs)


def summarise_training(runs: Sequence[RunOutcome]) -> TrainingReport:
    """Compare runs in pairs of one seed."""
    free = {run.seed: run for run in runs if not run.linked}
    linked = {run.seed: run for run in runs if run.linked}
    ratios = [linked[seed].tokens_per_s / free[seed].tokens_per_s for seed in sorted(free)]
    results = [run.result for run in free.values()]
    gap = fmean(run.result for run in linked.values()) - fmean(results)
    spread = max(results) - min(results)
    return TrainingReport(
        trainer_blocked_fraction=sum(run.blocked_seconds for run in linked.values())
        / sum(run.step_seconds for run in linked.values()),
        tokens_per_s_linked_over_free=median(ratios),
        tokens_per_s_linked_over_free_by_seed=tuple(ratios),
        curve_gap=gap,
        curve_spread=spread,
        curves_agree=abs(gap) <= spread,
        runs=tuple(runs),
    )


def run_once(
    folder: Path, model: Path, link: LinkConfig | None, *, steps: int, seed: int
) -> RunOutcome:
    """Train once in `folder`."""
    preset = run_config(
        TINY, run_id="bench", store=str(folder / "store"), out=folder, steps=steps, seed=seed
    )
    config = replace(
        preset,
        train=replace(
            preset.train,
            objective=OBJECTIVE,
            groups_per_step=GROUPS,
            max_backlog_groups=2 * GROUPS,
        ),
        sampling=replace(preset.sampling, batch_groups=GROUPS // 4),
    )
    side = _TrainerSide(config, folder, model, _reach(folder, link))
    stop, failures = threading.Event(), list[Exception]()
    replica = threading.Thread(
        target=_replica_side, args=(config, model, _reach(folder, link), side, stop, failures)
    )
    replica.start()
    try:
        side.train(failures)
    finally:
        stop.set()
        replica.join()
    if failures:
        raise failures[0]
    return side.outcome(linked=link is not None)


def _reach(folder: Path, link: LinkConfig | None) -> Store:
    store = open_store(folder / "store")
    return store if link is None else LinkedStore(store, link)


class _Step(NamedTuple):
    ended: float
    report: StepReport


class _TrainerSide:
    """Trainer, publisher and receiver on one store."""

    def __init__(self, config: RunConfig, folder: Path, model: Path, store: Store) -> None:
        self._config = config
        self._store = store
        self._checkpoints = Checkpoints(folder / "checkpoint", config.run_id)
        self._policy = Policy(load_module(model), config.train)
        self._archive = Archive(store, config.run_id)
        self._receiver = TrajectoryReceiver(store, config.run_id)
        self._steps: list[_Step] = []

    def position(self) -> int | None:
        """Where the receiver stands, as a worker learns it from the trainer's record."""
        return self._receiver.positions().get(REPLICA)

    def train(self, failures: Sequence[Exception]) -> None:
        settings = self._config.train
        publisher = Publisher(self._store, self._config.run_id, anchor_every=settings.anchor_every)
        with publisher:
            Trainer(
                self._policy,
                settings,
                run_id=self._config.run_id,
                publisher=publisher,
                receiver=self._receiver,
                batcher=GroupBatcher(
                    self._config.run_id,
                    max_staleness=settings.max_staleness,
                    group_timeout=600,
                    fits=self._policy.fits,
                ),
                checkpoints=self._checkpoints,
                root_of=lambda version: self._archive.manifest(version).root,
                report=lambda report: self._steps.append(_Step(time.perf_counter(), report)),
                stop=lambda: bool(failures),
            ).run()
        self._receiver.close()

    def outcome(self, *, linked: bool) -> RunOutcome:
        first, *timed, last = self._steps
        reports = [step.report for step in timed]
        return RunOutcome(
            linked=linked,
            seed=self._config.train.seed,
            tokens=sum(report.tokens for report in reports),
            seconds=timed[-1].ended - first.ended,
            step_seconds=sum(report.step_seconds for report in reports),
            blocked_seconds=sum(report.blocked_seconds for report in reports),
            last_wait_seconds=last.report.blocked_seconds,
            waited_seconds=sum(report.waited_seconds for report in reports),
            bytes_sent=sum(report.published.bytes_sent for report in reports),
            staleness_mean=fmean(report.staleness_mean for report in reports),
            curve=tuple(step.report.reward_mean for step in self._steps),
        )


def _replica_side(
    config: RunConfig,
    model: Path,
    store: Store,
    side: _TrainerSide,
    stop: threading.Event,
    failures: list[Exception],
) -> None:
    """A replica with a worker, until it is stopped. What ends it early ends the measurement."""
    codec = ChatCodec.from_folder(model, config.task)
    target = WidenedModule(empty_module(model))
    engine = TransformersEngine(
        target.module,
        Subscriber(store, config.run_id, target),
        eos_ids=codec.eos_ids,
        pad_id=codec.pad_id,
    )
    sender = TrajectorySender(
        store,
        config.run_id,
        REPLICA,
        max_backlog_groups=config.train.max_backlog_groups,
        position_of_reader=side.position,
    )
    worker = Worker(
        engine,
        make_environment(config.task),
        codec,
        sender,
        group_size=config.train.group_size,
        task=config.task,
        sampling=config.sampling,
        seed=config.train.seed,
        stop=stop.is_set,
    )
    engine.start()
    try:
        worker.run()
        engine.check()
    except Exception as error:  # noqa: BLE001 - raised by run_once, in the caller's thread
        failures.append(error)
    finally:
        engine.close()
