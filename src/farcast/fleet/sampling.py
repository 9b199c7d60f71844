"""The part of a worker that needs torch: model, engine and loop, put together."""

import time
from pathlib import Path

from farcast.config import RunConfig
from farcast.engines.chat import ChatCodec
from farcast.engines.following import Commit
from farcast.engines.modules import empty_module
from farcast.engines.transformers_engine import TransformersEngine
from farcast.fleet.assets import fetch_assets
from farcast.fleet.registry import Registry
from farcast.fleet.reporting import ReplicaReporter
from farcast.fleet.signals import StopRequest
from farcast.fleet.watching import TrainerWatch
from farcast.lineage import RunRecord
from farcast.replica import Subscriber
from farcast.replica.widened import WidenedModule
from farcast.rollout import Worker, WorkerCounters, make_environment
from farcast.store import Store
from farcast.store.archive import Archive
from farcast.trajectory import TrajectorySender

ENGINE_NAME = "transformers"


def sample(
    store: Store,
    record: RunRecord,
    config: RunConfig,
    worker_id: str,
    *,
    folder: Path,
    reporter: ReplicaReporter,
    stop: StopRequest,
) -> None:
    """Build the replica from the run's assets and sample until the run is over."""
    fetch_assets(Archive(store, record.run_id), record.assets, folder)
    codec = ChatCodec.from_folder(folder, config.task)
    # bf16 is served; on a CPU it is computed with in float32.
    target = WidenedModule(empty_module(folder))
    subscriber = Subscriber(store, record.run_id, target)
    engine = TransformersEngine(
        target.module,
        subscriber,
        eos_ids=codec.eos_ids,
        pad_id=codec.pad_id,
        on_commit=lambda commit: _report_commit(reporter, commit),
    )
    with TrainerWatch(Registry(store), worker_id) as trainer:
        worker = _worker(store, config, worker_id, engine, codec, trainer, reporter, stop)
        engine.start()
        try:
            counters = worker.run()
        finally:
            engine.close()
    engine.check()
    print(
        f"left with {counters.trajectories} trajectories sent, {counters.tokens} tokens sampled",
        flush=True,
    )


def _worker(
    store: Store,
    config: RunConfig,
    worker_id: str,
    engine: TransformersEngine,
    codec: ChatCodec,
    trainer: TrainerWatch,
    reporter: ReplicaReporter,
    stop: StopRequest,
) -> Worker:
    sender = TrajectorySender(
        store,
        config.run_id,
        worker_id,
        max_backlog=config.train.max_backlog_groups,
        position_of_reader=trainer.position,
    )

    waited = 0.0

    def report(counters: WorkerCounters) -> None:
        nonlocal waited
        engine.check()
        reporter.check()
        state = engine.status().state
        idle = counters.waiting_seconds > waited
        reporter.state("waiting" if idle and state == "serving" else state)
        reporter.sampled(tokens=counters.tokens, trajectories=counters.trajectories)
        waited = counters.waiting_seconds

    return Worker(
        engine,
        make_environment(config.task),
        codec,
        sender,
        group_size=config.train.group_size,
        task=config.task,
        sampling=config.sampling,
        engine_name=ENGINE_NAME,
        report=report,
        stop=lambda: stop.requested or trainer.done,
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
    print(f"{time.strftime('%H:%M:%S')} serving {commit.ref}", flush=True)
