"""The trainer's record, rewritten about once a second, also while the trainer waits or steps.

Workers take their backpressure from it. A thread of its own writes it, so that a long step does
not look like a lost trainer and a slow store costs the trainer nothing. While the store is away
the record is left out. Refuses to go on after any other error: `check` raises it to the trainer.
"""

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Literal

from msgspec.structs import replace

from farcast.errors import StoreUnavailableError
from farcast.fleet.records import TrainerRecord
from farcast.fleet.registry import Registry

BEAT_SECONDS = 1.0

LAST_WORD_TRIES = 30
"""Workers leave when they read "done": worth half a minute of a store that is away."""

TrainerState = Literal["starting", "training", "done", "stopped"]


class Heartbeat:
    """Use as a context manager; the last word is what `update` said last."""

    def __init__(
        self, registry: Registry, run_id: str, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._lock = threading.Lock()
        self._record = TrainerRecord(run_id=run_id, state="starting", version=0, step=0)
        self._error: Exception | None = None
        self._news = threading.Event()
        self._left = False
        self._thread = threading.Thread(target=self._run, name="farcast-heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.update(state="stopped")
        self._left = True
        self._news.set()
        self._thread.join()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def update(
        self,
        *,
        state: TrainerState | None = None,
        version: int | None = None,
        step: int | None = None,
        positions: Mapping[str, int] | None = None,
    ) -> None:
        """Say what is new; what is left out stays. Read positions go out at once, since workers
        may be waiting for room."""
        with self._lock:
            before = self._record
            self._record = replace(
                before,
                state=before.state if state is None else state,
                version=before.version if version is None else version,
                step=before.step if step is None else step,
                positions=before.positions if positions is None else dict(positions),
            )
            if self._record != before:
                self._news.set()

    def _run(self) -> None:
        last_words_tried = 0
        while True:
            self._news.wait(BEAT_SECONDS)
            self._news.clear()
            leaving = self._left
            with self._lock:
                record = replace(self._record, updated=self._clock())
            try:
                self._registry.write_trainer(record)
            except StoreUnavailableError:
                time.sleep(BEAT_SECONDS)  # `news` may be set all the time
                last_words_tried += leaving
                if last_words_tried < LAST_WORD_TRIES:
                    continue
            except Exception as error:  # noqa: BLE001 - a thread that ends unseen would hide it
                self._error = error
                return
            if leaving:
                return
