"""vLLM's server as a process of ours: started with farcast's plug-in, waited for, ended.

It listens on loopback only: with the routes that farcast needs, whoever reaches it can change
weights. It is started in a process group of its own, so that its workers end with it.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from farcast.engines.http_client import HttpClient
from farcast.engines.vllm_engine import LAUNCH_ENVIRONMENT, launch_arguments
from farcast.errors import EngineError, ProcessFailedError

_MODULE = "vllm.entrypoints.openai.api_server"

ONE_THREAD: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}
"""For CPUs that other processes use too: threads bound to cores spin against them."""


class VllmProcess:
    """A running server. `python` belongs to an environment with vLLM and farcast."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self._process = process
        self._log = log
        self.address = f"http://127.0.0.1:{port}"

    @classmethod
    @contextlib.contextmanager
    def started(
        cls,
        python: Path,
        model: Path,
        port: int,
        *,
        log: Path,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        seconds: float = 600.0,
    ) -> Iterator["VllmProcess"]:
        """Start it and wait until it can serve; ended on leaving. `arguments` come last, so they
        win over those given here."""
        command = [str(python), "-m", _MODULE, "--model", str(model), "--host", "127.0.0.1"]
        command += ["--port", str(port), *launch_arguments(), *arguments]
        # Without usage reports: an engine beside a sidecar talks to nobody else.
        variables = {**os.environ, "VLLM_NO_USAGE_STATS": "1", **LAUNCH_ENVIRONMENT}
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                env={**variables, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        server = cls(process, port, log)
        try:
            server._wait(seconds)
            yield server
        finally:
            server.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self, seconds: float = 20.0) -> None:
        """End it and whatever it started. Safe to repeat."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._signal(signal.SIGKILL)  # workers that outlived it
        self._process.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _wait(self, seconds: float) -> None:
        client = HttpClient(self.address, timeout=5.0)
        until = time.monotonic() + seconds
        while time.monotonic() < until and self._process.poll() is None:
            with contextlib.suppress(EngineError):
                client.get("/health")
                return
            time.sleep(0.25)
        ended = self._process.poll()
        what = f"is not ready after {seconds:.0f} s" if ended is None else f"ended with {ended}"
        raise ProcessFailedError(
            f"vLLM {what}; see {self._log}, which ends with: {self._last_line()!r}.",
            exit_code=ended or 1,
        )

    def _last_line(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1][-300:] if lines else ""
