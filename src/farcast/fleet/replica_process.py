"""A replica without an engine: a checkpoint folder that follows a run."""

import contextlib
from pathlib import Path

import msgspec

from farcast.errors import (
    ConfigError,
    FormatError,
    FreshnessError,
    IntegrityError,
    LimitError,
    StoreUnavailableError,
    TargetError,
    UnknownVersionError,
)
from farcast.fleet.assets import fetch_assets
from farcast.fleet.connecting import Reach
from farcast.fleet.finding import open_archive
from farcast.fleet.registry import Registry
from farcast.fleet.reporting import ReplicaReporter
from farcast.fleet.saying import say
from farcast.fleet.signals import StopRequest
from farcast.replica import CheckpointDirectory, Subscriber, SyncStats
from farcast.store.archive import Archive
from farcast.types import VersionRef

POLL_SECONDS = 1.0


class Followed(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica did: `farcast replica --json`."""

    replica_id: str
    run_id: str
    version: int
    root: str
    commits: int
    bytes_fetched: int
    bytes_full: int
    seconds: float


def follow(
    reach: Reach, folder: Path, replica_id: str, *, once: bool, overwrite: bool, stop: StopRequest
) -> Followed:
    """Bring `folder` to the newest version, and keep it there until the trainer is done.

    Without `overwrite` a folder that holds anything else is refused before it is touched.
    """
    store = reach.open()
    archive = open_archive(store, reach.trusted)
    registry = Registry(store)
    if not overwrite:
        _require_own(folder, archive)
    subscriber = Subscriber(
        store,
        archive.run_id,
        CheckpointDirectory(folder),
        trusted_key=reach.trusted,
        on_expiry=reach.on_expiry,
    )
    fetch_assets(archive, archive.open_run().assets, folder)

    told: list[str] = []
    with ReplicaReporter(registry, replica_id, traffic=store) as reporter:
        if once:
            _step(subscriber, reporter)
        while not once and not stop.requested:
            reporter.check()
            done = _trainer_is_done(registry)
            moved = _step_patiently(subscriber, reporter, told)
            if done and not moved:
                break
            stop.wait(0 if moved else POLL_SECONDS)
    return _followed(replica_id, subscriber)


def _require_own(folder: Path, archive: Archive) -> None:
    """Refuse a folder with files that are neither a replica's nor a version of the run."""
    if not folder.is_dir() or (folder / ".farcast").is_dir() or not any(folder.iterdir()):
        return
    held = None
    with contextlib.suppress(
        TargetError, FormatError, LimitError, IntegrityError, UnknownVersionError
    ):
        target = CheckpointDirectory(folder)
        held = Subscriber(archive.store, archive.run_id, target).plan().have
    if held is None:
        raise ConfigError(
            f"{folder} holds files that are no version of this run; name an empty folder, or say "
            "--overwrite to replace the model in it."
        )


def _step_patiently(subscriber: Subscriber, reporter: ReplicaReporter, told: list[str]) -> bool:
    """A step, or none while the store is away, the run has no version yet, or what the store
    shows cannot be believed: what the folder holds stays. `told` is what was said of it last."""
    try:
        return _step(subscriber, reporter)
    except (StoreUnavailableError, UnknownVersionError):
        reporter.state("waiting")
    except (FreshnessError, IntegrityError, FormatError) as error:
        reporter.state("waiting")
        if told != [str(error)]:
            told[:] = [str(error)]
            say(f"stays where it is: {error}")
    return False


def _step(subscriber: Subscriber, reporter: ReplicaReporter) -> bool:
    before = subscriber.ref
    ref = subscriber.sync()
    reporter.state("serving")
    if ref == before:
        return False
    report_commit(reporter, ref, subscriber.last)
    say(f"holds {ref}")
    return True


def report_commit(reporter: ReplicaReporter, ref: VersionRef, stats: SyncStats) -> None:
    """Tell the reporter what a commit took."""
    reporter.committed(
        ref,
        staged_seconds=stats.fetch_seconds + stats.decode_seconds,
        commit_seconds=stats.commit_seconds,
        bytes_fetched=stats.bytes_fetched,
        bytes_full=stats.bytes_full,
    )


def _trainer_is_done(registry: Registry) -> bool:
    try:
        trainer = registry.trainer()
    except (StoreUnavailableError, FormatError):  # its next beat writes it anew
        return False
    return trainer is not None and trainer.state == "done"


def _followed(replica_id: str, subscriber: Subscriber) -> Followed:
    ref, totals = subscriber.ref, subscriber.totals
    return Followed(
        replica_id=replica_id,
        run_id=subscriber.archive.run_id,
        version=-1 if ref is None else ref.version,
        root="" if ref is None else ref.root,
        commits=totals.versions,
        bytes_fetched=totals.bytes_fetched,
        bytes_full=totals.bytes_full,
        seconds=totals.fetch_seconds + totals.decode_seconds + totals.commit_seconds,
    )
