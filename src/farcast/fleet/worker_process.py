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

from farcast.config import LinkConfig, RunConfig, decode_config
from farcast.errors import ConfigError
from farcast.fleet.finding import run_in
from farcast.fleet.registry import Registry
from farcast.fleet.replica_process import connect
from farcast.fleet.reporting import ReplicaReporter
from farcast.fleet.signals import StopRequest
from farcast.lineage import RunRecord
from farcast.store import CountingStore
from farcast.types import NAME_PATTERN

WAIT_SECONDS = 1.0


def run_worker(
    store_url: str,
    worker_id: str,
    *,
    link: LinkConfig | None,
    cache: Path | None,
    stop: StopRequest,
) -> None:
    """Sample for the run in `store_url` until its trainer is done or `stop` is requested."""
    if NAME_PATTERN.fullmatch(worker_id) is None:
        raise ConfigError(
            f"{worker_id[:60]!r} is no worker's name; use 1 to 128 letters, digits, '.', '_' "
            "or '-', beginning with a letter or digit."
        )
    store = connect(store_url, link)
    record = _wait_for_run(store, stop)
    if record is None:
        return
    config = decode_config(record.settings.encode(), RunConfig)

    def fetched() -> int:
        return store.traffic.bytes_down

    with (
        ReplicaReporter(Registry(store), worker_id, bytes_fetched=fetched) as reporter,
        _folder(cache) as folder,
    ):
        from farcast.fleet.sampling import sample

        sample(store, record, config, worker_id, folder=folder, reporter=reporter, stop=stop)


def _wait_for_run(store: CountingStore, stop: StopRequest) -> RunRecord | None:
    """The run's record. A worker may be started before its trainer, and then waits for it."""
    told = False
    while not stop.requested:
        record = run_in(store)
        if record is not None:
            return record
        if not told:
            print(f"waiting for a run in {store.url}", flush=True)
            told = True
        stop.wait(WAIT_SECONDS)
    return None


@contextlib.contextmanager
def _folder(cache: Path | None) -> Iterator[Path]:
    if cache is not None:
        yield cache
        return
    with tempfile.TemporaryDirectory(prefix="farcast-") as path:
        yield Path(path)
