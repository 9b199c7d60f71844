"""A run, its store, engines and replicas as real processes, for tests of the HTTP side."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fake_engine import expected, weights_key
from farcast import Publisher, open_store
from farcast.lineage import RunRecord
from farcast.store.archive import Archive
from farcast.types import VersionRef
from servers import free_ports

TOKEN = "a-token-of-tests-0123456789"
RUN = "run1"
FAKE = Path(__file__).with_name("fake_engine.py")


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    port: int,
    method: str,
    path: str,
    body: Any = None,
    *,
    token: str | None = TOKEN,
    headers: Mapping[str, str] | None = None,
    timeout: float = 30,
) -> Answer:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    sent = {"Content-Type": "application/json", **(headers or {})}
    if token is not None:
        sent["Authorization"] = f"Bearer {token}"
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request(method, path, data, sent)
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        try:
            data = response.read()
        except http.client.IncompleteRead as error:  # hung up without the mark of the end
            data, found["incomplete"] = error.partial, "yes"
        return Answer(response.status, found, data)
    finally:
        connection.close()


def wait_for(what: Callable[[], Any], seconds: float = 20) -> Any:
    """The first true result."""
    until = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            result = what()
            if result:
                return result
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.02)


class Run:
    """A run with a publisher; the keys of its versions are what the fake engine computes with."""

    def __init__(self, folder: Path) -> None:
        self.url = (folder / "store").as_uri()
        self.store = open_store(self.url)
        self.archive = Archive(self.store, RUN)
        self.archive.create_run(RunRecord(run_id=RUN, created="now"))
        self.publisher = Publisher(self.store, RUN)
        self.refs: list[VersionRef] = []
        self.keys: dict[int, int] = {}
        self._random = np.random.default_rng(1)
        self._weights = {
            name: self._random.normal(size=400).astype(np.float32) for name in ("a", "b", "c")
        }

    def publish(self) -> VersionRef:
        for values in self._weights.values():
            values[self._random.integers(0, 64)] += 1
        ref = self.publisher.publish(self._weights, step=len(self.refs))
        tensors = self.archive.rebuild(ref.version)
        self.keys[ref.version] = weights_key(
            {name: bits.data.tobytes() for name, bits in tensors.items()}
        )
        self.refs.append(ref)
        return ref

    def expected(self, prompt: str, version: int, count: int) -> list[int]:
        return expected(prompt.encode(), [self.keys[version]] * count)


class Program:
    """A child process with its output in a file."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self.log = log
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "FARCAST_TEST_TOKEN": TOKEN,
        }
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                arguments, stdout=out, stderr=subprocess.STDOUT, env=environment
            )

    def output(self) -> str:
        return self.log.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = Run(folder)
        self.programs: list[Program] = []

    def start(self, name: str, *arguments: str) -> Program:
        program = Program([sys.executable, *arguments], self.folder / f"{name}.log")
        self.programs.append(program)
        return program

    def engine(self, port: int, *options: str, name: str = "engine") -> Program:
        program = self.start(name, str(FAKE), str(port), str(self.engine_log(name)), *options)
        wait_for(lambda: ask(port, "GET", "/health").status == 200)
        return program

    def engine_log(self, name: str = "engine") -> Path:
        return self.folder / f"{name}.jsonl"

    def jobs(self, name: str = "engine") -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.engine_log(name).read_text().splitlines()]

    def replica(self, engine_port: int, port: int, *options: str, name: str = "r0") -> Program:
        model = self.folder / f"model-{name}"
        model.mkdir(exist_ok=True)
        return self.start(
            name,
            *("-m", "farcast", "replica", "--store", self.run.url, "--id", name),
            *("--engine", "http", "--engine-url", f"http://127.0.0.1:{engine_port}"),
            *("--model", str(model), "--port", str(port)),
            *("--token-env", "FARCAST_TEST_TOKEN", *options),
        )

    def close(self) -> None:
        for program in self.programs:
            program.kill()


@contextlib.contextmanager
def world(folder: Path) -> Iterator[World]:
    made = World(folder)
    try:
        yield made
    finally:
        made.close()


def ready(port: int, version: int | None = None, seconds: float = 20) -> dict[str, Any]:
    """Wait until a replica serves `version`, or any."""

    def look() -> Any:
        answer = ask(port, "GET", "/ready", token=None)
        said = answer.json
        return said if answer.status == 200 and version in (None, said["version"]) else None

    return wait_for(look, seconds)


def two_ports() -> tuple[int, int]:
    first, second = free_ports(2)
    return first, second
