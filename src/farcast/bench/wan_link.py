"""An emulated long line on one machine: a server on this side, processes on the other.

As root the other side is a network namespace behind a veth pair, and the kernel's token bucket
(`tc tbf`) bounds what crosses it each way; the round trip comes from a proxy beside the processes,
for kernels without netem. Without root, or where these tools are missing, the same proxy bounds
the bandwidth too. `Wan.how` says which. What was set up is removed in any case but SIGKILL; the
next run removes what a killed one left.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from farcast.bench.http_load import free_ports
from farcast.bench.wan_proxy import ProxySettings
from farcast.config import LinkConfig
from farcast.errors import FarcastError
from farcast.fleet.launcher import QUIET_CHILD

_PREFIX = "farcast-wan-"
_QUEUE_SECONDS = 0.3
"""What the bucket's queue holds at most: as a router with a queue of some round trips."""

_LEAST_QUEUE = 32 << 10
_BURST = 4 << 10
"""Bytes that may pass at once: two packets, so that small answers do not get a head start."""

_COMMAND_SECONDS = 20.0


@dataclass(frozen=True)
class Wan:
    """`host` is where a server has to listen. `inside` begins the command of a process on the
    other side. `how` is for people."""

    link: LinkConfig
    host: str
    inside: tuple[str, ...]
    how: str
    shaped: bool
    """The kernel bounds the bandwidth; otherwise the proxy does."""

    def start(
        self, module: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """`python -m module arguments` on the other side, talked to by its standard streams.
        Ends with this process."""
        return subprocess.Popen(
            [*self.inside, sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **QUIET_CHILD, **(environment or {})},
            start_new_session=True,
        )

    @contextlib.contextmanager
    def proxied(self, port: int) -> Iterator[str]:
        """URL under which the other side reaches the server at `host`:`port`."""
        (near,) = free_ports(1)
        settings = ProxySettings(
            port=near,
            host=self.host,
            to=port,
            delay=self.link.rtt / 2,
            rate=0.0 if self.shaped else self.link.rate,
        )
        process = self.start("farcast.bench.wan_proxy", msgspec.json.encode(settings).decode())
        try:
            if process.stdout is None or process.stdout.readline() != b"ready\n":
                raise WanError("The proxy of the emulated link did not start; run it again.")
            yield f"http://127.0.0.1:{near}"
        finally:
            end(process)


class WanError(FarcastError):
    """The emulated line, or a process on it, failed."""


@contextlib.contextmanager
def emulated(link: LinkConfig, *, namespaces: bool | None = None) -> Iterator[Wan]:
    """The line, for as long as the context lasts. `namespaces=None` uses them where it can;
    True raises `WanError` where it cannot."""
    if namespaces is not False:
        _remove_stale()
        try:
            with _namespace(link) as wan:
                yield wan
                return
        except _UnavailableError as error:
            if namespaces:
                raise WanError(f"No network namespace could be set up: {error}") from error
    how = "a proxy in user space bounds the bandwidth and adds the delay (no root)"
    yield Wan(link, "127.0.0.1", (), how, shaped=False)


class _UnavailableError(Exception):
    """This machine or user has no namespaces, veth or tbf."""


@contextlib.contextmanager
def _namespace(link: LinkConfig) -> Iterator[Wan]:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise _UnavailableError("it needs root, ip and tc")
    name, number = f"{_PREFIX}{os.getpid()}", os.getpid() % (1 << 14)
    near, far = f"fcn{os.getpid()}"[:15], f"fcf{os.getpid()}"[:15]
    # 198.18.0.0/15 is set aside for benchmarks (RFC 2544): nobody's network is hidden.
    network = f"198.18.{number >> 6}.{4 * (number & 63)}"
    base, last = network.rsplit(".", 1)
    here, there = f"{base}.{int(last) + 1}", f"{base}.{int(last) + 2}"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        _run("ip", "addr", "add", f"{here}/30", "dev", near)
        _run("ip", "link", "set", near, "up")
        _run("ip", "-n", name, "addr", "add", f"{there}/30", "dev", far)
        _run("ip", "-n", name, "link", "set", far, "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("tc", *_bucket(near, link.rate))
        _run("tc", "-n", name, *_bucket(far, link.rate))
        how = (
            "a network namespace behind a veth pair, tc tbf each way; a proxy adds the delay "
            "(one round trip a connection, half of one each way)"
        )
        yield Wan(link, here, ("ip", "netns", "exec", name), how, shaped=True)
    finally:
        for command in (("ip", "netns", "del", name), ("ip", "link", "del", near)):
            subprocess.run(command, stderr=subprocess.DEVNULL, timeout=_COMMAND_SECONDS)


def _bucket(device: str, rate: float) -> Sequence[str]:
    queue = max(_LEAST_QUEUE, int(_QUEUE_SECONDS * rate))
    speed = ("rate", f"{round(8 * rate)}bit", "burst", str(_burst(rate)), "limit", str(queue))
    return ("qdisc", "add", "dev", device, "root", "tbf", *speed)


def _burst(rate: float) -> int:
    """At high rates the bucket must hold what passes between two ticks of the kernel's timer."""
    return max(_BURST, int(rate / 250))


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", b"") or b""
        told = said.decode(errors="replace").strip() or type(error).__name__
        raise _UnavailableError(f"`{' '.join(command[:4])}` says: {told[:200]}") from error


def _remove_stale() -> None:
    """Namespaces of runs whose process is gone; their veth pairs go with them."""
    with contextlib.suppress(OSError):
        for path in Path("/var/run/netns").iterdir():
            pid = path.name.removeprefix(_PREFIX)
            if path.name.startswith(_PREFIX) and pid.isdigit() and not Path("/proc", pid).exists():
                subprocess.run(
                    ("ip", "netns", "del", path.name),
                    stderr=subprocess.DEVNULL,
                    timeout=_COMMAND_SECONDS,
                )


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process of the other side; nothing it holds is needed any more."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    process.kill()
    process.wait()
