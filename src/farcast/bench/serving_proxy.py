"""What the sidecar and the gateway add to a request, and how many pass in a second.

`farcast replica --engine http` and `farcast gateway` run as they are, each on one core; client
and upstream share the other (`farcast.bench.http_load`). Direct and proxied loads take turns, so
that what else the machine does hits both; medians over the rounds are reported.
"""

import asyncio
import contextlib
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import psutil
import uvloop

from farcast.bench.http_load import Load, load, start_upstream
from farcast.errors import ConfigError, ProcessFailedError
from farcast.fleet.launcher import QUIET_CHILD
from farcast.fleet.records import ReplicaRecord
from farcast.fleet.registry import Registry
from farcast.lineage import RunRecord
from farcast.publish import Publisher
from farcast.store import Store, open_store
from farcast.store.archive import Archive

CONNECTIONS = (1, 16, 64)
TOKEN_VARIABLE = "FARCAST_BENCH_TOKEN"
START_SECONDS = 60.0
RUN = "bench"

Progress = Callable[[str], None]


class Through(msgspec.Struct, frozen=True, kw_only=True):
    """One way to the upstream at one number of connections, medians over the rounds."""

    way: str
    connections: int
    requests_per_s: float
    ms_p50: float
    ms_p99: float
    cpu_us: float
    """Of the server, for each request: what one core could do if it had nothing else to do."""
    failed: int


class ProxyReport(msgspec.Struct, frozen=True, kw_only=True):
    """`added` is the median latency at one connection less that of the upstream asked directly;
    `requests_per_s` the lower of those at 16 and at 64 connections, one core for the server."""

    proxy_added_ms_p50: float
    proxy_requests_per_s: float
    gateway_added_ms_p50: float
    gateway_requests_per_s: float
    rows: list[Through]


class _Way(NamedTuple):
    """A server: its name, its port, its process (None: our own, the upstream)."""

    name: str
    port: int
    process: psutil.Process | None

    def cpu_seconds(self) -> float:
        if self.process is None:
            return 0.0
        times = self.process.cpu_times()
        return float(times.user + times.system)


class _Run(NamedTuple):
    load: Load
    cpu_us: float


def measure(*, seconds: float, rounds: int, progress: Progress = lambda _: None) -> ProxyReport:
    """Run it all; takes about `seconds` * `rounds` * 9, and half a minute to start."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("This needs two cores, one for the server and one for the load.")
    os.sched_setaffinity(0, {cores[0]})
    try:
        return uvloop.run(_measure(cores[1], seconds, rounds, progress))
    finally:
        os.sched_setaffinity(0, set(cores))


async def _measure(core: int, seconds: float, rounds: int, progress: Progress) -> ProxyReport:
    token = secrets.token_urlsafe()
    upstream, direct = await start_upstream()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="farcast-bench-")))
        store = _new_run(folder)
        environment = {**os.environ, **QUIET_CHILD, TOKEN_VARIABLE: token}

        async def start(way: str, name: str, *arguments: str) -> _Way:
            log = folder / f"{name}.log"
            told = [name, *arguments, "--port", "0", "--store", store.url]
            told += ["--token-env", TOKEN_VARIABLE]
            process = stack.enter_context(_process(log, core, told, environment))
            port = await _port_in(log, name)
            await _warm(port, token, log)
            return _Way(way, port, process)

        progress("starting")
        model = folder / "model"
        model.mkdir()
        url = f"http://127.0.0.1:{direct}"
        engine = ("--engine", "http", "--engine-url", url, "--model", str(model))
        proxy = await start("proxy", "replica", *engine)
        stack.enter_context(_announced(store, url))
        ways = (_Way("direct", direct, None), proxy, await start("gateway", "gateway"))
        found = await _rounds(ways, token, seconds, rounds, progress)
    upstream.close()
    return _report(found)


async def _rounds(
    ways: Sequence[_Way], token: str, seconds: float, rounds: int, progress: Progress
) -> dict[tuple[str, int], list[_Run]]:
    found: dict[tuple[str, int], list[_Run]] = {}
    for number in range(rounds):
        for connections in CONNECTIONS:
            for way in ways:
                progress(f"round {number + 1} of {rounds}: {way.name}, {connections} connections")
                before = way.cpu_seconds()
                one = await load(way.port, token=token, connections=connections, seconds=seconds)
                cpu = (way.cpu_seconds() - before) / max(1, one.requests)
                found.setdefault((way.name, connections), []).append(_Run(one, cpu * 1e6))
    return found


def _report(found: dict[tuple[str, int], list[_Run]]) -> ProxyReport:
    rows = [
        Through(
            way=way,
            connections=connections,
            requests_per_s=statistics.median(run.load.requests_per_s for run in runs),
            ms_p50=statistics.median(run.load.ms_p50 for run in runs),
            ms_p99=statistics.median(run.load.ms_p99 for run in runs),
            cpu_us=statistics.median(run.cpu_us for run in runs),
            failed=sum(run.load.failed for run in runs),
        )
        for (way, connections), runs in found.items()
    ]
    by = {(row.way, row.connections): row for row in rows}
    busiest = {way: min(by[way, n].requests_per_s for n in CONNECTIONS[1:]) for way, _ in by}
    direct = by["direct", 1].ms_p50
    return ProxyReport(
        proxy_added_ms_p50=by["proxy", 1].ms_p50 - direct,
        proxy_requests_per_s=busiest["proxy"],
        gateway_added_ms_p50=by["gateway", 1].ms_p50 - direct,
        gateway_requests_per_s=busiest["gateway"],
        rows=rows,
    )


# --- around it --------------------------------------------------------------------------------


def _new_run(folder: Path) -> Store:
    """A run with one small version."""
    store = open_store((folder / "store").as_uri())
    Archive(store, RUN).create_run(RunRecord(run_id=RUN, created="for a benchmark"))
    Publisher(store, RUN).publish({"w": np.zeros(16, np.float32)}, step=0)
    return store


@contextlib.contextmanager
def _announced(store: Store, url: str) -> Iterator[None]:
    """Two replicas that both are the upstream, alive as long as this lasts."""
    registry, over = Registry(store), threading.Event()

    def beat() -> None:
        while True:
            for name in ("upstream-0", "upstream-1"):
                registry.write_replica(
                    ReplicaRecord(
                        replica_id=name, state="serving", version=0, url=url, updated=time.time()
                    )
                )
            if over.wait(1.0):
                return

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def _process(
    log: Path, core: int, arguments: list[str], environment: dict[str, str]
) -> Iterator[psutil.Process]:
    """A farcast command that keeps to one core."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "farcast", *arguments],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        os.sched_setaffinity(process.pid, {core})  # before it has started a thread
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _port_in(log: Path, name: str) -> int:
    """The port that a command says it listens on."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        for line in log.read_text().splitlines():
            if " listens on http://127.0.0.1:" in line:
                return int(line.split(" listens on http://127.0.0.1:")[1].split()[0])
        await asyncio.sleep(0.05)
    raise ProcessFailedError(f"The {name} did not start; it said: {log.read_text()[-300:]!r}.")


async def _warm(port: int, token: str, log: Path) -> None:
    """Ask until it answers right, then a little more."""
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            if not (await load(port, token=token, connections=1, seconds=0.2)).failed:
                break
        except OSError:  # it has ended
            until = 0.0
        if time.monotonic() > until:
            raise ProcessFailedError(
                f"A server did not become ready; it said: {log.read_text()[-300:]!r}."
            )
        await asyncio.sleep(0.2)
    await load(port, token=token, connections=16, seconds=0.5)
