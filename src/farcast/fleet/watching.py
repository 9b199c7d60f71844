"""What a worker knows of the trainer: whether the run goes on, and how far it has read."""

import threading
from types import TracebackType

from farcast.errors import FormatError, StoreUnavailableError
from farcast.fleet.registry import Registry

LOOK_SECONDS = 0.3
"""A worker with a full backlog waits this long at most for news that there is room again."""


class TrainerWatch:
    """Reads the trainer's record from a thread of its own. Use as a context manager.

    Refuses to guess: while the store is away or the record is damaged, what was known last stays
    known.
    """

    def __init__(self, registry: Registry, worker_id: str) -> None:
        self._registry = registry
        self._worker_id = worker_id
        self._position: int | None = None
        self._done = False
        self._step = 0
        self._error: Exception | None = None
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="farcast-watch", daemon=True)

    def __enter__(self) -> "TrainerWatch":
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left.set()
        self._thread.join()

    @property
    def done(self) -> bool:
        """The trainer took its last step. Raises what stopped the watching, if something did."""
        if self._error is not None:
            raise self._error
        return self._done

    @property
    def step(self) -> int:
        """Optimizer steps that the trainer has taken, as last heard."""
        return self._step

    def position(self) -> int | None:
        """The next sequence number of this worker that the trainer will read, as last heard."""
        return self._position

    def _run(self) -> None:
        while not self._left.wait(LOOK_SECONDS):
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - a thread that ends unseen would hide it
                self._error = error
                return

    def _look(self) -> None:
        try:
            trainer = self._registry.trainer()
        except (StoreUnavailableError, FormatError):  # the trainer's next beat writes it anew
            return
        if trainer is not None:
            self._position = trainer.positions.get(self._worker_id, 0)
            self._done = trainer.state == "done"
            self._step = trainer.step
