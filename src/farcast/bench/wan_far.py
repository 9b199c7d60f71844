"""The replicas of `farcast bench wan`, seen from this side: processes that take orders."""

import contextlib
import queue
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from farcast.bench.wan_link import Wan, WanError, end
from farcast.bench.wan_replica import Asking, Event, Held, Joined, Live, Order, Setup
from farcast.bench.wan_server import BUCKET

REPLICAS = 4
POLL_SECONDS = 1.0
TIMEOUT_SECONDS = 1200.0

_E = TypeVar("_E", Asking, Live, Joined, Held)


class Far:
    """A replica on the other side. Its events are read by a thread, so that waiting is bounded."""

    def __init__(self, process: "subprocess.Popen[bytes]", setup: Setup) -> None:
        self._process = process
        self._events: queue.Queue[Event | None] = queue.Queue()
        self._write(msgspec.json.encode(setup))
        threading.Thread(target=self._listen, name="farcast-far", daemon=True).start()

    def order(self, order: Order) -> None:
        self._write(msgspec.json.encode(order))

    def event(self) -> Event:
        """The next one. Raises `WanError` when the replica has ended, or says nothing."""
        try:
            found = self._events.get(timeout=TIMEOUT_SECONDS)
        except queue.Empty:
            found = None
        if found is None:
            raise WanError("A replica of the measurement ended or hangs; its words are above.")
        return found

    def close(self) -> None:
        end(self._process)

    def _write(self, line: bytes) -> None:
        if self._process.stdin is None:
            raise WanError("The replica has no standard input; start it with one.")
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WanError("A replica of the measurement ended; its words are above.") from error

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._process.stdout or ():
                self._events.put(msgspec.json.decode(line, type=Event))
        self._events.put(None)


@contextlib.contextmanager
def far_side(wan: Wan, options: dict[str, object], folder: Path) -> Iterator[Sequence[Far]]:
    with contextlib.ExitStack() as stack:
        found = []
        for seed in range(REPLICAS):
            setup = Setup(
                bucket=BUCKET,
                options=options,
                base=str(folder / "base.safetensors"),
                version=0,
                poll_seconds=POLL_SECONDS,
                seed=seed,
            )
            far = Far(wan.start("farcast.bench.wan_replica"), setup)
            stack.callback(far.close)
            found.append(far)
        yield found


def expect(replica: Far, kind: type[_E]) -> _E:
    event = replica.event()
    if not isinstance(event, kind):
        raise WanError(f"A replica answered {type(event).__name__}, not {kind.__name__}.")
    return event
