"""Does this store belong to the run? Asked once by whoever opens it for trajectories."""

from farcast.errors import ObjectNotFoundError
from farcast.lineage.encoding import decode_run_record
from farcast.lineage.manifest import MAX_MANIFEST_BYTES, RUN_KEY
from farcast.store.base import Store


def check_run(store: Store, run_id: str) -> None:
    """Raise `RunMismatchError` when the store holds another run. A store without a run's record
    passes: trajectories need no publisher beside them."""
    try:
        data = store.get(RUN_KEY, max_bytes=MAX_MANIFEST_BYTES)
    except ObjectNotFoundError:
        return
    decode_run_record(data, run_id=run_id)
