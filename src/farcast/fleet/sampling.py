"""The part of a worker that needs torch: model, engine and loop, put together."""

from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from farcast.config import RunConfig
from farcast.engines.chat import ChatCodec
from farcast.engines.following import Commit
from farcast.engines.modules import empty_module
from farcast.engines.transformers_engine import TransformersEngine
from farcast.fleet.connecting import ReplicaStore
from farcast.fleet.registry import Registry
from farcast.fleet.reporting import ReplicaReporter
from farcast.fleet.saying import say
from farcast.fleet.signals import StopRequest
from farcast.fleet.watching import TrainerWatch
from farcast.lineage import TrustedKey
from farcast.replica import Subscriber
from farcast.replica.freshness import OnExpiry
from farcast.replica.widened import WidenedModule
from farcast.rollout import Worker, WorkerCounters, make_environment
from farcast.trajectory import TrajectorySender

ENGINE_NAME = "transformers"


class Sampler:
    """A replica that is ready to join: its model is built from the run's small files in
    `folder`, and has no version yet."""

    def __init__(
        self,
        store: ReplicaStore,
        config: RunConfig,
        name: str,
        *,
        folder: Path,
        trusted: TrustedKey | None = None,
        on_expiry: OnExpiry = "refuse",
        alive: Path | None = None,
    ) -> None:
        disable_progress_bar()
        self._store = store
        self._config = config
        self._name = name
        self._alive = alive
        self._trusted: TrustedKey | None = trusted
        self._on_expiry: OnExpiry = on_expiry
        self._codec = ChatCodec.from_folder(folder, config.task)
        # bf16 is served; on a CPU it is computed with in float32.
        self._target = WidenedModule(empty_module(folder))

    def run(self, stop: StopRequest) -> None:
        """Follow the run and sample until its trainer is done or `stop` is requested."""
        registry = Registry(self._store)
        with (
            ReplicaReporter(registry, self._name, traffic=self._store) as reporter,
            TrainerWatch(registry, self._name) as trainer,
        ):
            engine = self._engine(reporter)
            worker = self._worker(engine, trainer, reporter, stop)
            engine.start()
            try:
                counters = worker.run()
            finally:
                engine.close()
            engine.check()
        say(f"left with {counters.trajectories} trajectories sent, {counters.tokens} tokens")

    def _engine(self, reporter: ReplicaReporter) -> TransformersEngine:
        return TransformersEngine(
            self._target.module,
            Subscriber(
                self._store,
                self._config.run_id,
                self._target,
                trusted_key=self._trusted,
                on_expiry=self._on_expiry,
            ),
            eos_ids=self._codec.eos_ids,
            pad_id=self._codec.pad_id,
            on_commit=lambda commit: _report_commit(reporter, commit),
        )

    def _worker(
        self,
        engine: TransformersEngine,
        trainer: TrainerWatch,
        reporter: ReplicaReporter,
        stop: StopRequest,
    ) -> Worker:
        config = self._config
        sender = TrajectorySender(
            self._store,
            config.run_id,
            self._name,
            max_backlog_groups=config.train.max_backlog_groups,
            position_of_reader=trainer.position,
        )
        return Worker(
            engine,
            make_environment(config.task),
            self._codec,
            sender,
            group_size=config.train.group_size,
            task=config.task,
            sampling=config.sampling,
            engine_name=ENGINE_NAME,
            seed=config.train.seed,
            report=_Report(engine, reporter, sender, self._alive),
            stop=lambda: stop.requested or trainer.done,
        )


class _Report:
    """Called by the worker loop every round and while it waits."""

    def __init__(
        self,
        engine: TransformersEngine,
        reporter: ReplicaReporter,
        sender: TrajectorySender,
        alive: Path | None,
    ) -> None:
        self._engine = engine
        self._reporter = reporter
        self._sender = sender
        self._alive = alive
        self._waited = 0.0

    def __call__(self, counters: WorkerCounters) -> None:
        self._engine.check()
        self._reporter.check()
        if self._alive is not None:
            self._alive.touch()
        state = self._engine.status().state
        idle = counters.waiting_seconds > self._waited
        self._waited = counters.waiting_seconds
        self._reporter.state("waiting" if idle and state == "serving" else state)
        self._reporter.sampled(
            tokens=counters.tokens,
            trajectories=counters.trajectories,
            waiting_seconds=counters.waiting_seconds,
            unread=self._sender.backlog().groups if counters.groups else 0,
        )


def _report_commit(reporter: ReplicaReporter, commit: Commit) -> None:
    reporter.state("serving")
    reporter.committed(
        commit.ref,
        staged_seconds=commit.staged_seconds,
        commit_seconds=commit.pause_seconds,
        bytes_fetched=commit.bytes_fetched,
        bytes_full=commit.bytes_full,
    )
    say(f"serving {commit.ref}")
