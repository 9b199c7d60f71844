"""Leaving when asked: the first SIGINT or SIGTERM is a request, the second insists."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """While entered, turns SIGINT and SIGTERM into a flag that loops look at.

    A second signal raises `KeyboardInterrupt`, so that a hung step can be left too. Enter it
    from the main thread only, which is where Python delivers signals.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Sleep, but not past a request. Returns whether there is one."""
        return self._event.wait(seconds)

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._event.is_set():
            raise KeyboardInterrupt
        self._event.set()
