"""A finished run in one table."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from farcast.dashboard.figures import human_bytes, human_seconds, times
from farcast.fleet.accounting import MAX_LISTED
from farcast.fleet.audit import AuditReport
from farcast.fleet.summary import Summary


def show_summary(summary: Summary, console: Console) -> None:
    """Print the table, and every difference if there is one."""
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for heading, text in _rows(summary):
        table.add_row(heading, text)
    show_verdict(summary.run_id, table, summary.differences, console)


def _rows(s: Summary) -> list[tuple[str, Text]]:
    return [
        ("steps", Text(f"{s.steps} in {human_seconds(s.seconds)}, {s.tokens_trained:,} tokens")),
        (
            "reward",
            Text.assemble(
                f"first fifth {s.reward_first:.3f} ± {s.reward_first_spread:.3f}, last fifth ",
                (f"{s.reward_last:.3f} ± {s.reward_last_spread:.3f}", "bold green"),
            ),
        ),
        (
            "versions",
            Text(
                f"{s.versions_verified} of {s.versions_published} rebuilt and verified, "
                f"{s.anchors_verified} anchors, {s.receipts_verified} replica receipts, "
                f"{s.spans_verified} claims in trajectories"
            ),
        ),
        (
            "trajectories",
            Text(
                trajectories_text(
                    s.trajectories_submitted,
                    s.trajectories_consumed,
                    s.trajectories_dropped,
                    s.trajectories_unread,
                )
            ),
        ),
        (
            "staleness",
            Text(f"mean {s.staleness_mean:.2f} versions, most {s.staleness_max}"),
        ),
        (
            "bytes sent",
            Text(
                f"{human_bytes(s.bytes_sent)} where full copies are {human_bytes(s.bytes_full)}: "
                f"{times(s.bytes_full, s.bytes_sent)} less with anchors, "
                f"{times(s.bytes_full_deltas, s.bytes_sent_deltas)} for deltas"
            ),
        ),
        ("changed", Text(f"{s.changed_fraction:.3%} of weights in a step")),
        (
            "trainer",
            Text(
                f"blocked {human_seconds(s.trainer_blocked_seconds)} by publishing, "
                f"waited {human_seconds(s.trainer_waited_seconds)} for trajectories"
            ),
        ),
        (
            "fleet",
            Text(f"{s.replicas_killed} killed, {s.replicas_joined} joined late")
            + Text(f", {s.replicas_restarted} restarted" if s.replicas_restarted else "")
            + Text(f", trainer resumed {s.trainer_resumed} times" if s.trainer_resumed else ""),
        ),
    ]


def show_report(report: AuditReport, console: Console) -> None:
    """Print what `farcast verify` found."""
    counted = report.account
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row(
        "versions",
        f"{report.versions_verified} of {report.versions_published} rebuilt to their roots, "
        f"{report.anchors_verified} of {len(report.anchor_versions)} anchors by themselves",
    )
    if report.versions_collected:
        table.add_row(
            "collected",
            f"{report.versions_collected} older versions, removed up to the anchor at "
            f"{report.versions_collected}; {report.claims_collected} claims about them have "
            "nothing left to be compared with",
        )
    table.add_row(
        "recorded",
        f"{report.steps_recorded} roots by the trainer, {report.receipts_verified} by replicas, "
        f"{report.spans_verified} spans in trajectories",
    )
    table.add_row(
        "trajectories",
        trajectories_text(counted.submitted, counted.consumed, counted.dropped, counted.unread),
    )
    if report.steps_void:
        table.add_row("lost", f"{report.steps_void} steps with a crash, repeated since")
    show_verdict(report.run_id, table, report.differences, console)


def show_verdict(title: str, table: Table, differences: Sequence[str], console: Console) -> None:
    """A table in a green frame, or in a red one with the differences below."""
    verdict = "NOT everything agrees" if differences else "everything agrees"
    style = "red" if differences else "green"
    console.print(
        Panel(
            table,
            title=f"{title}: {verdict}",
            title_align="left",
            border_style=style,
            expand=False,
        )
    )
    for line in differences[:MAX_LISTED]:
        console.print(Text(f"  {line}", style="red"), soft_wrap=True)
    if len(differences) > MAX_LISTED:
        console.print(Text(f"  and {len(differences) - MAX_LISTED} more", style="red"))


def trajectories_text(
    submitted: int, consumed: int, dropped: Mapping[str, int], unread: int
) -> str:
    """`320 submitted = 288 trained on + 32 left out (16 stale, 16 after the end)`"""
    parts = [f"{count} {reason}" for reason, count in dropped.items()]
    parts.append(f"{unread} after the end")
    return (
        f"{submitted} submitted = {consumed} trained on "
        f"+ {submitted - consumed} left out ({', '.join(parts)})"
    )
