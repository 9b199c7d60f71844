"""`farcast status`: a run as its own records show it, from anywhere that reaches the store."""

import time
from typing import Annotated, Any

import typer

from farcast.cli import options


def status(
    store: options.Store,
    json: options.Json = None,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every second.")] = False,
) -> None:
    """Show the trainer and every replica of a run.

    ```
    farcast status --store runs/demo/store
    farcast status --store s3://bucket/run1 --watch
    ```
    """
    from rich.console import Console
    from rich.live import Live

    from farcast.dashboard.status import status_view
    from farcast.fleet.observe import FleetObserver
    from farcast.fleet.registry import Registry
    from farcast.store import open_store

    options.check_writable(json)
    observer = FleetObserver(Registry(open_store(store)))
    snapshot = observer.look()
    console = Console()
    if watch and console.is_terminal:
        with Live(console=console, refresh_per_second=2) as live:
            while True:
                live.update(status_view(observer.look()))
                time.sleep(1)
    console.print(status_view(snapshot))
    result: dict[str, Any] = {
        "trainer": snapshot.trainer,
        "newest_step": snapshot.steps[-1] if snapshot.steps else None,
        "replicas": {
            name: {
                "record": sighting.record,
                "staleness": snapshot.staleness(name),
                "silent": snapshot.silent(name),
            }
            for name, sighting in sorted(snapshot.replicas.items())
        },
    }
    options.write_json(json, result)
