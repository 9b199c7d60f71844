"""The trainer of a run, from its configuration to "done".

    check the store -> prepare the model -> start or reopen the run -> train -> say how it ended

What it records, in this order for each step: the version (durable), the step's record (put once,
with the root of its own live tensors), then, every few steps, a checkpoint. So a trainer that is
killed at any instruction resumes from a checkpoint whose steps are all recorded, and the records
of the steps it lost are void. Refuses to start a second run in a store, and to go on with a run
unless it is told to resume.
"""

import contextlib
import datetime
import math
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict, replace
from transformers.utils.logging import disable_progress_bar

from farcast.config import RunConfig, encode_config
from farcast.engines.modules import load_module
from farcast.errors import BrokenBatchError, ConfigError, RunMismatchError, UnknownVersionError
from farcast.fleet.assets import put_assets
from farcast.fleet.claim import claimed
from farcast.fleet.finding import run_in
from farcast.fleet.heartbeat import Heartbeat
from farcast.fleet.keys import read_signer
from farcast.fleet.layout import RunFolder
from farcast.fleet.ranks import Lines, checkpoint_folder
from farcast.fleet.records import StepRecord
from farcast.fleet.registry import Registry
from farcast.fleet.retention import Retention
from farcast.fleet.saying import say
from farcast.fleet.signals import StopRequest
from farcast.formats import parse_recipe
from farcast.lineage import RunRecord, Signer, TrustedKey
from farcast.publish import Publisher
from farcast.rollout import check_task
from farcast.store import PatientStore, Store, open_store
from farcast.store.archive import Archive
from farcast.store.probe import probe_conditional_put
from farcast.train.checkpoint import Checkpoints
from farcast.train.loop import StepReport, Trainer, to_publish
from farcast.train.lora import add_lora
from farcast.train.models import default_cache, prepare_model
from farcast.train.policy import Policy, served_root
from farcast.train.sharding import is_sharded, shard
from farcast.train.team import Team
from farcast.trajectory import GroupBatcher, TrajectoryReceiver
from farcast.trajectory.batching import RootOf

GROUP_TIMEOUT = 600.0
"""Workers send groups whole, so an incomplete one means that a group was split for its size and
its second half is on a slow line."""


LOCK_PATIENCE = 120.0


def run_trainer(
    config: RunConfig,
    *,
    resume: bool,
    stop: StopRequest,
    cache: Path | None = None,
    lines: Lines | None = None,
) -> None:
    """Train until the configured step, or until `stop` is requested; checkpointed on return.

    With `lines` this is rank 0 of several, the others in `follower_process`."""
    check_task(config.task)
    for name in config.train.also:
        parse_recipe(name)
    # One that lost its parent may still end its step and write its checkpoint.
    lock = RunFolder(Path(config.out)).path / "trainer.lock"
    with claimed(lock, "trainer", patience=LOCK_PATIENCE, wait=stop.wait, tell=say):
        _run_alone(config, resume=resume, stop=stop, cache=cache, lines=lines)


def _run_alone(
    config: RunConfig,
    *,
    resume: bool,
    stop: StopRequest,
    cache: Path | None,
    lines: Lines | None,
) -> None:
    store = open_store(config.store)
    _open_run(store, config, resume=resume)
    # From here on there is a run to lose, and only the store to go on with. The heartbeat keeps
    # the impatient one: it has a way of its own with outages.
    patient = PatientStore(store, config.train.store_patience, wait=stop.wait, tell=say)
    with Heartbeat(Registry(store), config.run_id) as heartbeat:
        _run(config, patient, heartbeat, resume=resume, stop=stop, cache=cache, lines=lines)


def _run(
    config: RunConfig,
    store: Store,
    heartbeat: Heartbeat,
    *,
    resume: bool,
    stop: StopRequest,
    cache: Path | None,
    lines: Lines | None,
) -> None:
    archive = Archive(store, config.run_id, trusted=_trusted(config))
    model = prepared(config, cache)
    if run_in(store) is None:
        _create_run(archive, config, model)
    team = Team(None if lines is None else lines.team)
    team.together(lambda: None)  # there is a run now, which the others may look at
    policy = load_policy(config, model, team)
    with (
        open_publisher(config, store, lines) as publisher,
        contextlib.closing(TrajectoryReceiver(store, config.run_id)) as receiver,
        Retention(publisher, Registry(store), _kept(config, lines)) as retention,
    ):
        recorder = _Recorder(config, Registry(store), heartbeat, receiver, retention)
        trainer = make_trainer(
            config,
            archive,
            policy,
            publisher,
            receiver,
            team,
            report=recorder.step,
            idle=recorder.idle,
            skipped=recorder.skipped,
            stop=lambda: stop.requested,
        )
        if trainer.resume() or resume:
            recorder.resumed_from = trainer.step
            say(f"resuming after step {trainer.step}")
        recorder.first_version(policy, publisher, trainer.step)
        heartbeat.update(state="training", step=trainer.step, version=trainer.version)
        trainer.run()
    done = trainer.step >= config.train.steps
    heartbeat.update(state="done" if done else "stopped")
    say(f"{'done' if done else 'stopped'} after step {trainer.step}")


def prepared(config: RunConfig, cache: Path | None) -> Path:
    """The model's folder. What takes long says so."""
    disable_progress_bar()
    say(f"preparing the model {config.model}")
    return prepare_model(config.model, cache or default_cache(), say)


def load_policy(config: RunConfig, model: Path, team: Team) -> Policy:
    """The policy as a run begins; on several ranks, this one's share of it."""
    say("loading the model")
    module = load_module(model)
    if config.train.lora is not None:
        if team.size > 1:
            raise ConfigError("Adapters train on one rank; leave out lora, or torchrun.")
        add_lora(module, config.train.lora, seed=config.train.seed)
    return Policy(module if team.size == 1 else shard(module), config.train)


def open_publisher(config: RunConfig, store: Store, lines: Lines | None) -> Publisher:
    """The run's publisher; on several ranks, this one's part of it."""
    return Publisher(
        store,
        config.run_id,
        anchor_every=config.train.anchor_every,
        # A step taken again after a crash has a record of its own, so it needs a version of its
        # own, even if it comes to the same weights.
        repeats=False,
        # The weights are in the checkpoint: a damaged object costs a full copy, not the run.
        reanchor=True,
        comms=None if lines is None else lines.publish,
        squash=config.train.squash if lines is None else None,
        # The trainer's own forward pass is in bf16, and the root that it vouches for is of that.
        formats=("bf16", *config.train.also) if config.train.also else (),
        fork_of=config.fork_of,
        signer=_signer(config),
    )


def _kept(config: RunConfig, lines: Lines | None) -> int | None:
    """Versions that stay. Those that trajectories may still be of do in any case."""
    keep = config.train.keep_versions
    return None if keep is None or lines is not None else max(keep, config.train.max_staleness + 1)


def _signer(config: RunConfig) -> Signer | None:
    return None if config.signing_key is None else read_signer(Path(config.signing_key))


def _trusted(config: RunConfig) -> TrustedKey | None:
    signer = _signer(config)
    return None if signer is None else signer.public


def _open_run(store: Store, config: RunConfig, *, resume: bool) -> None:
    """Make sure that this trainer may write to the store, and that it is the run's own."""
    record = run_in(store)
    if record is None:
        if resume:
            _refuse_lost_run(store, config)
        probe_conditional_put(store)
        return
    Archive(store, config.run_id, trusted=_trusted(config)).open_run()
    if not resume:
        raise RunMismatchError(
            f"{store.url} already holds the run {config.run_id}; "
            "continue it with --resume, or use another store prefix."
        )


def _refuse_lost_run(store: Store, config: RunConfig) -> None:
    """A run with checkpoints had versions. Going on in an empty store would begin it anew under
    the same name, and replicas that hold its versions could never follow."""
    checkpoints = Checkpoints(RunFolder(Path(config.out)).checkpoint, config.run_id)
    if checkpoints.newest_step is not None:
        raise RunMismatchError(
            f"{store.url} does not hold the run {config.run_id}, which is at step "
            f"{checkpoints.newest_step} in {config.out}; put the store back and resume, or start "
            "a new run in another folder."
        )


def _create_run(archive: Archive, config: RunConfig, model: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    signer = _signer(config)
    record = RunRecord(
        run_id=config.run_id,
        created=now.isoformat(timespec="seconds"),
        assets=put_assets(archive, model),
        # Where the trainer keeps its key is nobody else's business.
        settings=encode_config(replace(config, signing_key=None)).decode(),
    )
    archive.create_run(record if signer is None else signer.sign(record))


def root_reader(archive: Archive) -> RootOf:
    """Roots of published versions; None for those that were not, or are gone."""

    def root_of(version: int) -> str | frozenset[str] | None:
        try:
            views = archive.manifest(version).views
        except UnknownVersionError:
            return None
        return views[0].root if len(views) == 1 else frozenset(view.root for view in views)

    return root_of


def make_trainer(
    config: RunConfig,
    archive: Archive,
    policy: Policy,
    publisher: Publisher,
    receiver: TrajectoryReceiver,
    team: Team,
    *,
    report: Callable[[StepReport], None],
    idle: Callable[[], None] = lambda: None,
    skipped: Callable[[BrokenBatchError], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
) -> Trainer:
    """The trainer of a run; on several ranks, this one's."""
    return Trainer(
        policy,
        config.train,
        run_id=config.run_id,
        publisher=publisher,
        receiver=receiver,
        batcher=GroupBatcher(
            config.run_id,
            max_staleness=config.train.max_staleness,
            group_timeout=GROUP_TIMEOUT,
            fits=policy.fits,
        ),
        checkpoints=Checkpoints(checkpoint_folder(config, team.rank), config.run_id),
        root_of=root_reader(archive),
        report=report,
        idle=idle,
        skipped=skipped,
        stop=stop,
        team=team,
    )


class _Recorder:
    """Turns what the loop reports into records, metrics and lines of the log."""

    def __init__(
        self,
        config: RunConfig,
        registry: Registry,
        heartbeat: Heartbeat,
        receiver: TrajectoryReceiver,
        retention: Retention,
    ) -> None:
        self._retention = retention
        self._steps = config.train.steps
        self._registry = registry
        self._heartbeat = heartbeat
        self._receiver = receiver
        self._metrics = RunFolder(Path(config.out)).metrics
        self._incarnation = f"trainer-{secrets.token_hex(4)}"
        self.resumed_from = -1

    def first_version(self, policy: Policy, publisher: Publisher, step: int) -> None:
        """Publish the weights before the first step and record them. A trainer that was killed
        between the two makes up for the record."""
        if step > 0 or (publisher.newest is not None and self._is_recorded(0)):
            return
        served = policy.served()
        if publisher.newest is None:
            publisher.publish(to_publish(policy, publisher), 0)
        report = publisher.last
        self._registry.put_step(
            StepRecord(
                version=0,
                step=0,
                root=_root_of(served, publisher),
                incarnation=self._incarnation,
                resumed_from=self.resumed_from,
                changed=0,
                elements=report.elements if report else 0,
                bytes_sent=report.bytes_sent if report else 0,
                bytes_full=report.bytes_full if report else 0,
            )
        )

    def idle(self) -> None:
        """The loop waits for trajectories."""
        self._heartbeat.check()
        self._heartbeat.update(positions=self._receiver.positions())

    def skipped(self, error: BrokenBatchError) -> None:
        """A worker's batch is lost to the run; `farcast verify` lists it, too."""
        say(
            f"skipped batch {error.sequence} of worker {error.worker_id}, whose trajectories are "
            f"lost ({self._receiver.skipped} so far): {error.__cause__}"
        )

    def step(self, report: StepReport) -> None:
        """A step's version is durable: record it."""
        self._heartbeat.check()
        record = self._record(report)
        self._registry.put_step(record)
        self._heartbeat.update(
            step=report.step,
            version=report.published.ref.version,
            positions=self._receiver.positions(),
        )
        self._write_metrics(record, report)
        self._retention.published(report.published.ref.version)
        say(
            f"step {report.step}/{self._steps} version {report.published.ref.version} "
            f"reward {report.reward_mean:.3f} loss {report.loss:+.4f}"
        )

    def _record(self, report: StepReport) -> StepRecord:
        published = report.published
        return StepRecord(
            version=report.published.ref.version,
            step=report.step,
            root=report.root,
            incarnation=self._incarnation,
            resumed_from=self.resumed_from,
            reward_mean=report.reward_mean,
            reward_std=report.reward_std,
            loss=_finite(report.loss),
            grad_norm=_finite(report.grad_norm),
            staleness_mean=report.staleness_mean,
            staleness_max=report.staleness_max,
            consumed=report.consumed,
            dropped=report.dropped,
            tokens=report.tokens,
            changed=published.changed,
            elements=published.elements,
            bytes_sent=published.bytes_sent,
            bytes_full=published.bytes_full,
            step_seconds=report.step_seconds,
            blocked_seconds=report.blocked_seconds,
            waited_seconds=report.waited_seconds,
        )

    def _write_metrics(self, record: StepRecord, report: StepReport) -> None:
        """The record with counts for ids, and what only people look at."""
        line: dict[str, Any] = asdict(record)
        line["consumed"] = len(record.consumed)
        line["dropped"] = {reason: len(ids) for reason, ids in record.dropped.items()}
        line |= {"kl": report.kl, "clipped": report.clipped, "time": time.time()}
        line |= {"masked": report.masked, "left_out": report.left_out}
        line |= {"largest_ratio": report.largest_ratio}
        line["publish"] = asdict(report.published)
        with self._metrics.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")

    def _is_recorded(self, version: int) -> bool:
        steps = self._registry.steps(damaged=lambda key, error: say(f"{key}: {error}"))
        return any(record.version == version for record in steps)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _root_of(served: Mapping[str, Any], publisher: Publisher) -> str:
    """Computed from the trainer's own tensors; of a sharded model, by the publisher's owners."""
    newest = publisher.newest
    if newest is not None and any(map(is_sharded, served.values())):
        return newest.root
    return served_root(served)
