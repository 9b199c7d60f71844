"""How long a version takes to far-away replicas, and what coming late costs.

A real S3 server stands on this side of an emulated line, replicas are processes on the other side.
The line's bandwidth is to this model what 10 Gbit/s is to one of 10^12 parameters, so that a small
model waits for its bytes as a large one does. For each change farcast and the format that most
peers share are published one after the other, over the same line to the same replicas:

    seconds    from the call that publishes to the last replica that has applied the version
    limit      bytes / bandwidth + 4 round trips + half a poll interval; each replica fetches by
               itself, so the bytes of all of them count, for every coding alike

Replicas hold the version before, their connections are open, and their kernels are loaded.

A full copy takes minutes to hours on such a line: a measured part of it is scaled by its bytes.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from farcast.bench.data import Change
from farcast.bench.suite import Machine, this_machine
from farcast.bench.wan_crowd import CrowdReport, simulate
from farcast.bench.wan_far import POLL_SECONDS, REPLICAS, Far, expect, far_side
from farcast.bench.wan_link import WanError, emulated
from farcast.bench.wan_replica import (
    Asking,
    Follow,
    Held,
    Join,
    Joined,
    Live,
    Roots,
    prefix_of,
)
from farcast.bench.wan_server import S3Server, seaweed
from farcast.bench.wan_versions import Drift, Tensors, cut, write_weights
from farcast.bench.wan_ways import (
    FARCAST,
    FULL,
    RUN,
    SHARED,
    publish_farcast,
    publish_full,
    publish_shared,
    warm_up,
)
from farcast.config import LinkConfig
from farcast.delta import entry_of, root_of
from farcast.publish import Publisher

LARGE_PARAMETERS, LARGE_BITS = 1e12, 10e9
"""The pair whose ratio the line keeps."""

RTT = 0.08
ROUND_TRIPS = 4
SQUASHES = (2, 4)
_SETTLE_POLLS = 1.5
"""Poll intervals between "asks" and publishing: by then replicas ask at moments of their own."""

Say = Callable[[str], None]


class Effort(NamedTuple):
    """How much is measured. Changes are published until `seconds` have passed, at most `hops`."""

    hops: int
    seconds: float
    full_bytes: int
    late_versions: int
    late_elements: int
    crowd: int
    crowd_versions: int


NORMAL = Effort(4, 90.0, 768 << 10, 200, 4_000_000, 1000, 4)
QUICK = Effort(1, 1.0, 128 << 10, 40, 2_000_000, 200, 2)


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """One version by one way. `bytes` are of one replica, the store's answers to polls included;
    `limit_seconds` counts those that it has to read, `replicas` times. `publish_seconds` of
    encoding and storing, and `apply_seconds` of the slowest replica, are part of `seconds`."""

    way: str
    hop: str
    seconds: float
    publish_seconds: float
    apply_seconds: float
    limit_seconds: float
    bytes: float
    requests: float
    measured_share: float = 1.0

    @property
    def over_limit(self) -> float:
        return self.seconds / self.limit_seconds


class Late(msgspec.Struct, frozen=True, kw_only=True):
    """One way of coming `versions` late. `upload` is what its trainer published, over the single
    deltas alone."""

    way: str
    squash: int | None
    upload: float
    versions: int
    seconds: float
    bytes: int
    requests: int
    objects: int


class WanReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured; `flat` in `wan_report` is what the JSON file holds."""

    data: str
    how: str
    link: LinkConfig
    parameters: int
    bytes_full: int
    replicas: int
    poll_seconds: float
    hops: list[Hop]
    late: list[Late]
    late_parameters: int
    crowd: CrowdReport
    failing_crowd: CrowdReport
    machine: Machine
    quick: bool


def rate_for(parameters: int) -> float:
    """Bytes per second that are to so many parameters what 10 Gbit/s is to 10^12."""
    return parameters / LARGE_PARAMETERS * LARGE_BITS / 8


def measure(
    base: Tensors,
    changes: Iterator[Change],
    data: str,
    effort: Effort,
    *,
    namespaces: bool | None = None,
    quick: bool = False,
    say: Say = lambda _: None,
) -> WanReport:
    """Run it all. `changes` follow one another, the first from `base`."""
    machine = this_machine()
    parameters = sum(bits.data.nbytes for bits in base.values()) // 2
    link = LinkConfig(rate=rate_for(parameters), rtt=RTT)
    say("compiling kernels")
    warm_up(base)
    say(f"{effort.crowd} simulated replicas")
    crowd = simulate(replicas=effort.crowd, versions=effort.crowd_versions)
    failing = simulate(replicas=effort.crowd // 4, versions=effort.crowd_versions, failing=0.01)
    with tempfile.TemporaryDirectory(prefix="farcast-wan-") as scratch, contextlib.ExitStack() as s:
        folder = Path(scratch)
        wan = s.enter_context(emulated(link, namespaces=namespaces))
        say("starting the S3 server")
        server = s.enter_context(seaweed(folder, wan.host))
        endpoint = s.enter_context(wan.proxied(server.port))
        write_weights(folder / "base.safetensors", base)
        far = s.enter_context(far_side(wan, server.options(endpoint), folder))
        hops = _follow(server, far, base, changes, effort, link, say)
        late_base = cut(base, effort.late_elements)
        late = _come_late(server, far[0], late_base, folder, effort, say)
    return WanReport(
        data=data,
        how=wan.how,
        link=link,
        parameters=parameters,
        bytes_full=2 * parameters,
        replicas=REPLICAS,
        poll_seconds=POLL_SECONDS,
        hops=hops,
        late=late,
        late_parameters=sum(bits.data.nbytes for bits in late_base.values()) // 2,
        crowd=crowd,
        failing_crowd=failing,
        machine=machine,
        quick=quick,
    )


# --- publish -> live -----------------------------------------------------------------------------


def _follow(
    server: S3Server,
    far: Sequence[Far],
    base: Tensors,
    changes: Iterator[Change],
    effort: Effort,
    link: LinkConfig,
    say: Say,
) -> list[Hop]:
    shared, full = (server.open(prefix_of(way)) for way in (SHARED, FULL))
    hops: list[Hop] = []
    say("publishing the first version, which is whole")
    with Publisher(server.open(prefix_of(FARCAST)), RUN, anchor_every=2048) as publisher:
        publisher.publish(base, step=0)
        began, last = time.monotonic(), base
        for version, change in enumerate(changes, start=1):
            ways: dict[str, Callable[[], int]] = {
                FARCAST: lambda: publish_farcast(publisher, change, version),  # noqa: B023
                SHARED: lambda: publish_shared(shared, change, version),  # noqa: B023
            }
            for way in ways if version % 2 else reversed(ways):
                say(f"version {version}: {way}")
                hops.append(_hop(far, way, change.hop, version, link, ways[way]))
            last = change.target
            if version == effort.hops or time.monotonic() - began > effort.seconds:
                break
    _require_exact(far, last)
    say(f"the first {effort.full_bytes >> 10} KiB of a full copy")
    sizes: list[int] = []

    def copy() -> int:
        sizes[:] = publish_full(full, change, 1, effort.full_bytes)
        return sizes[0]

    part = _hop(far, FULL, change.hop, 1, link, copy)
    return [*hops, _scaled(part, sizes[0] / sizes[1], link)]


def _hop(
    far: Sequence[Far],
    way: str,
    hop: str,
    version: int,
    link: LinkConfig,
    publish: Callable[[], int],
) -> Hop:
    for replica in far:
        replica.order(Follow(way=way, version=version))
    for replica in far:
        expect(replica, Asking)
    time.sleep(_SETTLE_POLLS * POLL_SECONDS)
    began = time.monotonic()
    size = publish()
    published = time.monotonic()
    lives = [expect(replica, Live) for replica in far]
    return Hop(
        way=way,
        hop=hop,
        seconds=max(live.at for live in lives) - began,
        publish_seconds=published - began,
        apply_seconds=max(live.apply_seconds for live in lives),
        limit_seconds=_limit(len(far) * size, link),
        bytes=sum(live.bytes for live in lives) / len(far),
        requests=sum(live.requests - live.quiet for live in lives) / len(far),
    )


def _limit(size: int, link: LinkConfig) -> float:
    return size / link.rate + ROUND_TRIPS * link.rtt + POLL_SECONDS / 2


def _scaled(part: Hop, share: float, link: LinkConfig) -> Hop:
    """A whole copy from the measured part: what depends on bytes is taken as many times."""
    fixed = ROUND_TRIPS * link.rtt + POLL_SECONDS / 2
    return Hop(
        way=part.way,
        hop=part.hop,
        seconds=fixed + max(0.0, part.seconds - fixed) / share,
        publish_seconds=part.publish_seconds / share,
        apply_seconds=0.0,
        limit_seconds=fixed + (part.limit_seconds - fixed) / share,
        bytes=part.bytes / share,
        requests=part.requests,
        measured_share=share,
    )


def _require_exact(far: Sequence[Far], last: Tensors) -> None:
    """Every replica holds exactly the last version, by every way."""
    root = root_of({name: entry_of(bits) for name, bits in last.items()})
    for replica in far:
        replica.order(Roots())
        if set(expect(replica, Held).roots.values()) != {root}:
            raise WanError("A replica does not hold the bits that were published; report this.")


# --- coming late ---------------------------------------------------------------------------------


def _come_late(
    server: S3Server, far: Far, base: Tensors, folder: Path, effort: Effort, say: Say
) -> list[Late]:
    """A run of small versions, published with squashed deltas and without."""
    drift = Drift(base)
    path = folder / "late.safetensors"
    write_weights(path, drift.tensors)
    sent, root = _publish_late(server, drift, effort.late_versions, say)
    single = sent[None]
    late = []
    for way, squash, held in (
        *((f"squashed by {factor}", factor, str(path)) for factor in SQUASHES),
        ("chain of deltas", None, str(path)),
        ("anchor", SQUASHES[0], None),
    ):
        say(f"coming late: {way}")
        far.order(Join(prefix=_late_prefix(squash), base=held))
        joined = expect(far, Joined)
        if joined.root != root:
            raise WanError("Who came late holds other bits than were published; report this.")
        late.append(
            Late(
                way=way,
                squash=squash if held else None,
                upload=(sent[squash] if held else joined.bytes) / single,
                versions=effort.late_versions,
                seconds=joined.seconds,
                bytes=joined.bytes,
                requests=joined.requests,
                objects=joined.objects,
            )
        )
    return late


def _publish_late(
    server: S3Server, drift: Drift, versions: int, say: Say
) -> tuple[dict[int | None, int], str]:
    """Bytes of all deltas by squash factor, and the root of the last version. Where there are
    squashed deltas the last version is an anchor too, whose bytes are left out."""
    factors = (*SQUASHES, None)
    sent: dict[int | None, int] = dict.fromkeys(factors, 0)
    with contextlib.ExitStack() as stack:
        publishers = {
            factor: stack.enter_context(
                Publisher(
                    server.open(_late_prefix(factor)),
                    RUN,
                    anchor_every=versions if factor else 2048,
                    squash=factor,
                )
            )
            for factor in factors
        }
        for version in range(versions + 1):
            if version:
                drift.step()
            if version % 10 == 0:
                say(f"coming late: publishing version {version} of {versions}")
            tensors = drift.tensors
            for factor, publisher in publishers.items():
                publisher.publish(tensors, step=version)
                if publisher.last is not None and not publisher.last.anchor:
                    sent[factor] += publisher.last.bytes_sent
    return sent, root_of({name: entry_of(bits) for name, bits in tensors.items()})


def _late_prefix(factor: int | None) -> str:
    return f"late-{factor or 'chain'}"


def medians(hops: Sequence[Hop], way: str, of: Callable[[Hop], float]) -> float:
    return median(of(hop) for hop in hops if hop.way == way)
