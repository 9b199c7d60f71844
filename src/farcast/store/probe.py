"""Does this store keep the one promise that every commit rests on? Asked by writing.

Some servers accept a conditional create and overwrite all the same; with those, two
publishers would both believe that they wrote version N. Nothing but trying tells.
"""

import contextlib
import secrets
import threading
from collections.abc import Callable

from farcast.errors import FarcastError, ObjectExistsError, StoreError, StoreUnsupportedError
from farcast.store.base import Store

PROBE_PREFIX = "probe/"

RACERS = 4
ROUNDS = 3
"""A server that looks before it writes loses a race only sometimes; three tries find most."""


def probe_conditional_put(store: Store) -> None:
    """Prove that a second create loses and that a race of creates has one winner.

    Writes a few bytes below `probe/` and removes them. Raises `StoreUnsupportedError` when the
    store overwrites what a conditional create must leave alone; other store errors pass through.
    """
    run = secrets.token_hex(8)
    keys = [f"{PROBE_PREFIX}{run}-{number}" for number in range(ROUNDS + 1)]
    try:
        if _create(store, keys[0], b"first") and _create(store, keys[0], b"second"):
            raise _unsupported(store, "a second create of one key succeeded")
        if store.get(keys[0], max_bytes=64) != b"first":
            raise _unsupported(store, "a refused create changed the object")
        for key in keys[1:]:
            _race(store, key)
    finally:
        with contextlib.suppress(StoreError):  # a few bytes left behind harm nobody
            for key in keys:
                store.delete(key)


def _race(store: Store, key: str) -> None:
    barrier = threading.Barrier(RACERS)
    winners: list[bytes] = []
    failures: list[FarcastError] = []

    def run(own: bytes) -> None:
        barrier.wait()
        try:
            if _create(store, key, own):
                winners.append(own)
        except FarcastError as error:
            failures.append(error)

    _together(run)
    if failures:
        raise failures[0]
    if len(winners) > 1:
        raise _unsupported(store, f"{len(winners)} of {RACERS} racing creates of one key won")
    # No winner at all is one whose reply was lost and whose retry met its own object.
    if winners and store.get(key, max_bytes=64) != winners[0]:
        raise _unsupported(store, "the object is not the winner's")


def _together(run: Callable[[bytes], None]) -> None:
    threads = [
        threading.Thread(target=run, args=(f"racer {number}".encode(),)) for number in range(RACERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _create(store: Store, key: str, data: bytes) -> bool:
    try:
        store.put(key, data, if_absent=True)
    except ObjectExistsError:
        return False
    return True


def _unsupported(store: Store, seen: str) -> StoreUnsupportedError:
    return StoreUnsupportedError(
        f"{store.url} does not honour conditional creates ({seen}), so two publishers could "
        "overwrite each other; use a store that does (AWS S3, GCS, Azure, SeaweedFS, MinIO, a "
        "local folder), or upgrade the server."
    )
