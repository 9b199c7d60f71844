"""A replica with a worker, from nothing but the store's URL.

The run's record says which model and task; weights come as versions, verified before they
serve. The worker samples while the next version is staged, and the engine switches between two
tokens. It outlives the trainer's restarts and the store's absences, and leaves when the trainer
has taken its last step.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from farcast.config import STORE_PATIENCE, RunConfig, decode_config
from farcast.errors import ConfigError, StoreUnavailableError
from farcast.fleet.assets import fetch_assets
from farcast.fleet.connecting import Reach
from farcast.fleet.finding import run_in
from farcast.fleet.registry import Registry
from farcast.fleet.saying import say
from farcast.fleet.signals import StopRequest
from farcast.fleet.watching import TrainerWatch
from farcast.lineage import RUN_KEY, RunRecord
from farcast.store import CountingStore, PatientStore, Store
from farcast.store.archive import Archive
from farcast.types import NAME_PATTERN

WAIT_SECONDS = 1.0
HOLD_SECONDS = 0.25


def run_worker(
    reach: Reach,
    worker_id: str,
    *,
    folder: Path | None,
    from_step: int,
    stop: StopRequest,
    alive: Path | None = None,
) -> None:
    """Sample for the run that `reach` leads to until its trainer is done or `stop` is requested.

    `folder` keeps the model's small files (None: a temporary one). With `from_step` everything
    is made ready, and the replica joins once the trainer has taken that many steps. `alive` is
    touched whenever a round of sampling ends, and while the worker waits.
    """
    if NAME_PATTERN.fullmatch(worker_id) is None:
        raise ConfigError(
            f"{worker_id[:60]!r} is no worker's name; use 1 to 128 letters, digits, '.', '_' "
            "or '-', beginning with a letter or digit."
        )
    store = reach.open()
    # Until it follows the run it waits out what it will later sample through.
    patient = PatientStore(store, STORE_PATIENCE, wait=stop.wait, tell=say)
    record = _wait_for_run(patient, stop)
    if record is None:
        return
    if reach.trusted is not None:
        reach.trusted.check(record, RUN_KEY)
    config = decode_config(record.settings.encode(), RunConfig)

    with _assets(folder) as assets:
        from farcast.fleet.sampling import Sampler

        fetch_assets(Archive(patient, record.run_id), record.assets, assets)
        sampler = Sampler(
            store,
            config,
            worker_id,
            folder=assets,
            trusted=reach.trusted,
            on_expiry=reach.on_expiry,
            alive=alive,
        )
        if _wait_for_step(store, worker_id, from_step, stop):
            sampler.run(stop)


def _wait_for_step(store: CountingStore, name: str, step: int, stop: StopRequest) -> bool:
    """Whether it is time to join; False when the run ended or `stop` was requested before."""
    if not step:
        return not stop.requested
    say(f"ready, waiting for step {step}")
    with TrainerWatch(Registry(store), name) as trainer:
        while not stop.wait(HOLD_SECONDS):
            if trainer.done:
                return False
            if trainer.step >= step:
                return True
    return False


def _wait_for_run(store: Store, stop: StopRequest) -> RunRecord | None:
    """The run's record. A worker may be started before its trainer, and then waits for it."""
    told = False
    while not stop.requested:
        try:
            record = run_in(store)
        except StoreUnavailableError:
            if not stop.wait(0):
                raise
            return None
        if record is not None:
            return record
        if not told:
            say(f"waiting for a run in {store.url}")
            told = True
        stop.wait(WAIT_SECONDS)
    return None


@contextlib.contextmanager
def _assets(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="farcast-") as path:
        yield Path(path)
