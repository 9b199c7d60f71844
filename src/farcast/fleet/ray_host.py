"""What runs on a node of a Ray cluster: one process of the run, and somebody to ask about it.

Ray starts the host somewhere, and starts it anew somewhere else when its node is lost; a new host
starts its process again. The process is tied to the host, as to any launcher: it leaves when the
host ends.
"""

import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from farcast.fleet.launcher import TIED_OPTION, kill_group

WORDS = 64
"""Lines that are kept; Ray keeps all of a host's output in its own logs."""


class ProcessHost:
    """Starts its process when it is made. Methods may be called side by side."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._asked = False
        self._words: collections.deque[str] = collections.deque(maxlen=WORDS)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "farcast", *arguments, TIED_OPTION],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            process_group=0,
            text=True,
            errors="replace",
        )
        self._listening = threading.Thread(target=self._listen, name="farcast-host", daemon=True)
        self._listening.start()

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        status = self._process.poll()
        if status is not None:
            self._listening.join(5)  # its last words are on their way
        return status

    def pid(self) -> int:
        return self._process.pid

    def node(self) -> str:
        import ray

        node: str = ray.get_runtime_context().get_node_id()
        return node

    def words(self) -> str:
        return next((line for line in reversed(self._words) if line), "")

    def ask(self) -> None:
        """A second signal would cut short the leaving that the first one began."""
        if not self._asked and self._process.poll() is None:
            self._asked = True
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> int:
        return kill_group(self._process)

    def wait(self, seconds: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.poll()

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            print(line, end="", flush=True)
            self._words.append(line.rstrip().rpartition("\r")[2].strip())
