"""`farcast verify`: rebuild everything a store holds and compare it with what was recorded."""

from typing import TYPE_CHECKING

import typer

from farcast.cli import options

if TYPE_CHECKING:
    from rich.console import Console

    from farcast.fleet.audit import AuditReport
    from farcast.lineage import TrustedKey
    from farcast.store import Store

EXIT_DIFFERENT = 3


def verify(
    store: options.Store,
    trusted_key: options.TrustedKeyFile = None,
    json: options.Json = None,
) -> None:
    """Rebuild every version from the store and compare all roots; count every trajectory.

    Each version is rebuilt through its chain of deltas, and each anchor by itself. Roots must
    equal those in the manifests, those the trainer and the replicas recorded, and those inside
    trajectories. Every trajectory must have been used once, dropped once, or not read.

    ```
    farcast verify --store runs/demo/store
    farcast verify --store s3://bucket/run1 --json report.json
    ```

    Versions older than the oldest there is were removed by garbage collection: they are counted
    and are no failure. A version missing between others is one.

    Ends with status 3 if anything differs.
    """
    from rich.console import Console

    from farcast.dashboard.summary import show_report
    from farcast.store import open_store

    options.check_writable(json)
    console = Console()
    report = audit_with_progress(open_store(store), console, options.trusted_key(trusted_key))
    options.write_json(json, report)
    show_report(report, console)
    if report.differences:
        raise typer.Exit(EXIT_DIFFERENT)


def audit_with_progress(
    store: "Store", console: "Console", trusted: "TrustedKey | None" = None
) -> "AuditReport":
    """Run the audit under a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from farcast.fleet.audit import audit

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("verifying", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        return audit(store, trusted=trusted, progress=progress)
