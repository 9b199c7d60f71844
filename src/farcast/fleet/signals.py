"""Leaving when asked: the first SIGINT or SIGTERM is a request, the second insists."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from farcast.errors import StoppedAtOnceError


class StopRequest:
    """While entered, turns SIGINT and SIGTERM into a flag that loops look at.

    `asked` is called at the first, within the signal's handler: it says at once that the request
    was understood, which the loop may take a while to see. A second signal calls `insist`; without
    one it raises `KeyboardInterrupt`, so that a hung step can be left too. Enter it from the main
    thread only, which is where Python delivers signals.
    """

    def __init__(
        self,
        *,
        asked: Callable[[], None] | None = None,
        insist: Callable[[], NoReturn] | None = None,
    ) -> None:
        self._event = threading.Event()
        self._asked = asked
        self._insist = insist
        self._insisted = False
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    @property
    def insisted(self) -> bool:
        """There was a second signal: nothing that takes time is begun any more."""
        return self._insisted

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
            self._insisted = True
            if self._insist is not None:
                self._insist()
            raise KeyboardInterrupt
        self._event.set()
        if self._asked is not None:
            self._asked()


def announce(text: str) -> None:
    """A line on stderr from within a signal's handler, where `print` may be in the middle of
    another line and would refuse. On a terminal it stands below the `^C` that was echoed. It does
    not begin as an error does: supervisors look for those in logs."""
    start = "\n" if os.isatty(sys.stderr.fileno()) else ""
    os.write(sys.stderr.fileno(), f"{start}{text}\n".encode())


def end_at_once(text: str) -> NoReturn:
    """Say what is left and end this process without unwinding, which could wait for a store. What
    it was writing is as after a crash."""
    announce(text)
    os._exit(StoppedAtOnceError.exit_code)
