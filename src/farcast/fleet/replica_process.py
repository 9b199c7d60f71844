"""A replica without an engine: a checkpoint folder that follows a run."""

import contextlib
from collections.abc import Iterable
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
from farcast.fleet.assets import fetch_assets, write_served_config
from farcast.fleet.connecting import Reach
from farcast.fleet.finding import open_archive
from farcast.fleet.registry import Registry
from farcast.fleet.reporting import ReplicaReporter
from farcast.fleet.saying import say
from farcast.fleet.signals import StopRequest
from farcast.formats import parse_recipe
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
        served_format=reach.served_format,
        trusted_key=reach.trusted,
        on_expiry=reach.on_expiry,
    )
    fetch_assets(archive, archive.open_run().assets, folder)
    if subscriber.ref is not None:  # what was fetched is the model's own, in high precision
        describe(folder, subscriber, subscriber.ref, subscriber.target.entries)

    told: list[str] = []
    with ReplicaReporter(registry, replica_id, traffic=store) as reporter:
        if once:
            _step(subscriber, reporter, folder)
        while not once and not stop.requested:
            reporter.check()
            done = _trainer_is_done(registry)
            moved = _step_patiently(subscriber, reporter, folder, told)
            if done and not moved:
                break
            stop.wait(0 if moved else POLL_SECONDS)
    return _followed(replica_id, subscriber)


def describe(folder: Path, subscriber: Subscriber, ref: VersionRef, names: Iterable[str]) -> None:
    """Let the folder's config.json say in which served format the tensors `names` are."""
    served = subscriber.archive.manifest(ref.version).served_format
    with contextlib.suppress(ConfigError):  # a name of the publisher's own, or an older farcast's
        write_served_config(folder, parse_recipe(served), names)


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


def _step_patiently(
    subscriber: Subscriber, reporter: ReplicaReporter, folder: Path, told: list[str]
) -> bool:
    """A step, or none while the store is away, the run has no version yet, or what the store
    shows cannot be believed: what the folder holds stays. `told` is what was said of it last."""
    try:
        return _step(subscriber, reporter, folder)
    except (StoreUnavailableError, UnknownVersionError):
        reporter.state("waiting")
    except (FreshnessError, IntegrityError, FormatError) as error:
        reporter.state("waiting")
        if told != [str(error)]:
            told[:] = [str(error)]
            say(f"stays where it is: {error}")
    return False


def _step(subscriber: Subscriber, reporter: ReplicaReporter, folder: Path) -> bool:
    staged = subscriber.stage()
    if staged is None:
        if subscriber.ref is None:
            subscriber.sync()  # raises what is wrong
        reporter.state("serving")
        return False
    try:
        # First, so that no engine loads codes as if they were weights.
        describe(folder, subscriber, staged.ref, staged.draft.goal.entries)
        ref = subscriber.commit(staged)
    finally:
        staged.discard()
    reporter.state("serving")
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
