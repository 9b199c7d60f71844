"""Starts and ends the processes of a run.

`Launcher` is the seam: the demo's schedule or a `Crew` says what to start and when, a launcher says
how and where. `RayLauncher` (`farcast.fleet.ray_launcher`) spreads them over a Ray cluster;
`LocalLauncher` runs them on this machine, each in a process group of its own (so that Ctrl-C
reaches only the supervisor, which then stops them in order), each with its output in a log file,
and each tied to this process: its standard input is a pipe that closes when this process ends,
however it ends. Refuses to put anything but names, paths and numbers on a command line;
credentials travel in the inherited environment.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from farcast.errors import ConfigError
from farcast.fleet.saying import plain

TIED_OPTION = "--tied"
"""Given to children: leave when standard input closes."""

QUIET_CHILD: Mapping[str, str] = {
    # Two OpenMP pools on few cores spin against each other and run ten times slower.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


class ProcessSpec(NamedTuple):
    """`arguments` follow `farcast` on the command line; output is appended to `log`, if it runs
    on this machine."""

    name: str
    arguments: tuple[str, ...]
    log: Path
    environment: Mapping[str, str] = QUIET_CHILD


class Handle(NamedTuple):
    """One life of a process. `pid` tells it from another life under the same name, and is the
    system's number of it on this machine."""

    name: str
    pid: int


class Launcher(Protocol):
    """Used by one thread. A handle is good until `close`, also after its process has ended."""

    def start(self, spec: ProcessSpec) -> Handle: ...

    def list(self) -> Sequence[Handle]:
        """Those that were started and have not ended, the oldest first."""
        ...

    def poll(self, handle: Handle) -> int | None:
        """The exit status (negative: the signal that ended it), None while it runs."""
        ...

    def words(self, handle: Handle) -> str:
        """The last line that it said, "" if there is none to be had."""
        ...

    def kill(self, handle: Handle) -> None:
        """End it at once, as a lost machine would: it gets no chance to say so."""
        ...

    def ask(self, handle: Handle) -> None:
        """Ask it to leave, and do not wait."""
        ...

    def stop(self, handle: Handle, *, grace: float) -> int:
        """Ask it to leave unless it was asked, wait `grace` seconds, then kill it.

        Returns the exit status.
        """
        ...

    def restart(self, handle: Handle, *, grace: float) -> Handle:
        """Stop it, then start the same again: a new life under its name."""
        ...

    def close(self) -> None:
        """Kill whatever still runs."""
        ...


class LocalLauncher:
    """Processes of this machine: `python -m farcast ...`."""

    def __init__(self) -> None:
        self._running: dict[Handle, subprocess.Popen[bytes]] = {}
        self._specs: dict[Handle, ProcessSpec] = {}
        self._asked: set[Handle] = set()
        """A second signal would cut short the leaving that the first one began."""

    def start(self, spec: ProcessSpec) -> Handle:
        command = [sys.executable, "-m", "farcast", *spec.arguments, TIED_OPTION]
        try:
            with spec.log.open("ab") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **spec.environment},
                    process_group=0,
                )
        except OSError as error:
            raise ConfigError(
                f"The process {spec.name} could not be started ({error.strerror}); "
                f"check {spec.log.parent} and the limits of this account."
            ) from error
        handle = Handle(spec.name, process.pid)
        self._running[handle] = process
        self._specs[handle] = spec
        return handle

    def list(self) -> Sequence[Handle]:
        return [handle for handle, process in self._running.items() if process.poll() is None]

    def words(self, handle: Handle) -> str:
        return last_words(self._specs[handle].log)

    def poll(self, handle: Handle) -> int | None:
        process = self._running[handle]
        status = process.poll()
        if status is not None:
            _let_go(process)
        return status

    def kill(self, handle: Handle) -> None:
        kill_group(self._running[handle])
        _let_go(self._running[handle])

    def ask(self, handle: Handle) -> None:
        if handle not in self._asked and self.poll(handle) is None:
            self._asked.add(handle)
            self._running[handle].send_signal(signal.SIGTERM)

    def stop(self, handle: Handle, *, grace: float) -> int:
        process = self._running[handle]
        self.ask(handle)
        try:
            return process.wait(grace)
        except subprocess.TimeoutExpired:
            return kill_group(process)
        finally:
            _let_go(process)

    def restart(self, handle: Handle, *, grace: float) -> Handle:
        self.stop(handle, grace=grace)
        return self.start(self._specs[handle])

    def close(self) -> None:
        for process in self._running.values():
            kill_group(process)
            _let_go(process)
        self._running.clear()


def kill_group(process: "subprocess.Popen[Any]") -> int:
    """End a process that leads a group, with all that it started there, and return its status.
    One that has ended is left alone: its number may be another's by now."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _let_go(process: "subprocess.Popen[bytes]") -> None:
    """Close our end of the pipe of a process that has ended: a crew starts many in its life."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def leave_with_parent() -> None:
    """Ask this process to stop once standard input closes: its parent has ended.

    SIGTERM and not an exit, so that the process leaves the way it does when it is asked to.
    """

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="leave-with-parent", daemon=True).start()


def last_words(log: Path, *, limit: int = 8192) -> str:
    """The last line of a process's log that says something, "" when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - limit))
            tail = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    lines = [line.strip() for line in tail.replace("\r", "\n").splitlines()]
    return plain(next((line for line in reversed(lines) if line), ""))
