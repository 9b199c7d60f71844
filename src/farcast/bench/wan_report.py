"""What `farcast bench wan` found: one flat record for machines, tables for a person."""

from collections.abc import Iterator
from statistics import median

import msgspec
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from farcast.bench.wan import LARGE_BITS, Hop, WanReport, medians
from farcast.bench.wan_ways import FARCAST, FULL, SHARED, WAYS

SPEEDUP_BOUND = 2.5
LIMIT_BOUND = 1.3
CATCHUP_BOUND = 0.25
REQUESTS_BOUND = 4
POLLS_BOUND = 3


def flat(report: WanReport) -> dict[str, object]:
    """The named figures on one level; single measurements and the machine below."""
    squashed, *_, chain, anchor = report.late
    return {
        "seconds_farcast": medians(report.hops, FARCAST, _seconds),
        "seconds_shared_format": medians(report.hops, SHARED, _seconds),
        "seconds_full": medians(report.hops, FULL, _seconds),
        "seconds_full_measured_share": medians(report.hops, FULL, lambda hop: hop.measured_share),
        "speedup_over_shared_format": speedup(report),
        "over_physical_limit": medians(report.hops, FARCAST, lambda hop: hop.over_limit),
        "catchup_versions": squashed.versions,
        "catchup_squash": squashed.squash,
        "catchup_upload_over_chain": squashed.upload,
        "catchup_bytes_over_chain": squashed.bytes / chain.bytes,
        "catchup_seconds_over_chain": squashed.seconds / chain.seconds,
        "catchup_bytes_over_anchor": squashed.bytes / anchor.bytes,
        "catchup_seconds_over_anchor": squashed.seconds / anchor.seconds,
        "catchup_objects": squashed.objects,
        "requests_per_replica_per_version": report.crowd.requests_per_replica_per_version,
        "polls_to_converge": max(
            report.crowd.polls_to_converge, report.failing_crowd.polls_to_converge
        ),
        "first_tries_peak": report.crowd.first_tries_peak,
        "bandwidth_mbit_s": 8e-6 * report.link.rate,
        "rtt_ms": 1e3 * report.link.rtt,
        "bytes_counted": "once for each replica: no relay",
        **msgspec.to_builtins(report),
    }


def speedup(report: WanReport) -> float:
    """Median over changes of the shared format's time over farcast's, each on the same change."""
    times = {way: [h.seconds for h in report.hops if h.way == way] for way in (FARCAST, SHARED)}
    return median(b / a for a, b in zip(times[FARCAST], times[SHARED], strict=True))


def show(report: WanReport, console: Console) -> None:
    console.print(Group(*_parts(report)))


def _parts(report: WanReport) -> Iterator[Text | Table]:
    yield Text(_line(report), style="dim")
    yield _hops(report)
    yield _late(report)
    yield Text("\n".join(_verdicts(report)))
    if report.machine.is_busy:
        yield Text("The machine was busy with other work: times are too long.", style="yellow")


def _line(report: WanReport) -> str:
    return (
        f"{report.data}: {report.parameters / 1e6:.1f} M parameters. The line: "
        f"{8e-6 * report.link.rate:.3f} Mbit/s, which is to this model what "
        f"{LARGE_BITS / 1e9:.0f} Gbit/s is to 10^12 parameters; round trip "
        f"{1e3 * report.link.rtt:.0f} ms. {report.how[0].upper()}{report.how[1:]}. "
        f"S3 server: SeaweedFS. {report.replicas} replicas share the line and fetch each for "
        f"itself, so bytes count {report.replicas} times, for every way alike; a poll every "
        f"{report.poll_seconds:g} s."
    )


def _hops(report: WanReport) -> Table:
    table = Table("published -> live on all", "s", "min .. max", "limit s", "/limit", "bytes each")
    for heading in ("publish s", "apply s"):
        table.add_column(heading)
    for way in WAYS:
        own = [hop for hop in report.hops if hop.way == way]
        times = [hop.seconds for hop in own]
        share = own[0].measured_share
        table.add_row(
            way if share == 1 else f"{way} (from {share:.2%} of it)",
            f"{median(times):,.2f}",
            f"{min(times):,.2f} .. {max(times):,.2f}",
            f"{median(hop.limit_seconds for hop in own):,.2f}",
            f"{median(hop.over_limit for hop in own):.2f}",
            f"{median(hop.bytes for hop in own):,.0f}",
            f"{median(hop.publish_seconds for hop in own):.2f}" if share == 1 else "",
            f"{median(hop.apply_seconds for hop in own):.2f}" if share == 1 else "",
        )
    return table


def _late(report: WanReport) -> Table:
    versions, size = report.late[0].versions, report.late_parameters / 1e6
    columns = ("s", "bytes", "objects", "requests", "uploaded")
    table = Table(f"{versions} versions late ({size:.1f} M)", *columns)
    for late in report.late:
        table.add_row(
            late.way,
            f"{late.seconds:,.2f}",
            f"{late.bytes:,}",
            str(late.objects),
            str(late.requests),
            f"{late.upload:.1f}x",
        )
    return table


def _verdicts(report: WanReport) -> Iterator[str]:
    found = flat(report)

    def at_least(name: str, bound: float) -> str:
        return _verdict(name, float(str(found[name])), ">=", bound)

    def at_most(name: str, bound: float) -> str:
        return _verdict(name, float(str(found[name])), "<=", bound)

    yield at_least("speedup_over_shared_format", SPEEDUP_BOUND)
    yield at_most("over_physical_limit", LIMIT_BOUND)
    yield at_most("catchup_bytes_over_chain", CATCHUP_BOUND)
    yield at_most("catchup_seconds_over_chain", CATCHUP_BOUND)
    yield at_most("requests_per_replica_per_version", REQUESTS_BOUND)
    yield at_most("polls_to_converge", POLLS_BOUND)
    yield (
        f"{report.crowd.replicas} simulated replicas that started together: at most "
        f"{report.crowd.first_tries_peak:.0%} first ask for a version in the same tenth of a poll "
        "interval"
    )


def _verdict(name: str, value: float, relation: str, bound: float) -> str:
    reached = value >= bound if relation == ">=" else value <= bound
    words = name.replace("_", " ")
    return f"{words}: {value:.2f} (wanted {relation} {bound:g}){'' if reached else ', missed'}"


def _seconds(hop: Hop) -> float:
    return hop.seconds
