"""`farcast status`: a run as its own records show it, from anywhere that reaches the store."""

import contextlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farcast.cli import options
from farcast.errors import StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console, RenderableType

    from farcast.fleet.observe import FleetSnapshot


LOOK_SECONDS = 1.0


def status(
    store: options.Store,
    json: options.Json = None,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every second.")] = False,
) -> None:
    """Show the trainer and every replica of a run.

    A replica that has not rewritten its record for ten seconds is *silent*, for a minute *dead*,
    both by the store's own clock. `version 41 (-2)` is two versions behind the trainer.

    ```
    farcast status --store runs/demo/store
    farcast status --store s3://bucket/run1 --watch
    ```
    """
    from rich.console import Console

    from farcast.dashboard.status import status_view
    from farcast.fleet.finding import open_archive
    from farcast.fleet.observe import FleetObserver
    from farcast.fleet.registry import Registry
    from farcast.fleet.signals import StopRequest
    from farcast.store import open_store

    options.check_writable(json)
    found = open_store(store)
    open_archive(found)  # a wrong URL is a mistake, not an empty fleet
    observer = FleetObserver(Registry(found))
    snapshot = observer.look()
    console = Console()
    if not watch:
        console.print(status_view(snapshot))
        options.write_json(json, _result(snapshot))
        return
    with StopRequest() as stop, _shown(console) as show:
        away = ""
        while True:
            show(status_view(snapshot, away=away))
            options.write_json(json, _result(snapshot))
            if stop.wait(LOOK_SECONDS):
                return
            try:
                snapshot, away = observer.look(), ""
            except StoreUnavailableError as error:  # the last picture stays
                away = str(error)


@contextlib.contextmanager
def _shown(console: "Console") -> "Iterator[Callable[[RenderableType], None]]":
    """In place on a terminal; one picture below the other into a pipe or a file."""
    from rich.live import Live

    if not console.is_terminal:
        yield lambda view: console.print(view, "")
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda view: live.update(view, refresh=True)


def _result(snapshot: "FleetSnapshot") -> dict[str, Any]:
    trainer_age = None
    if snapshot.trainer_written is not None:
        trainer_age = max(0.0, snapshot.seen - snapshot.trainer_written)
    return {
        "trainer": snapshot.trainer,
        "trainer_life": snapshot.trainer_life,
        "trainer_age_seconds": trainer_age,
        "newest_step": snapshot.steps[-1] if snapshot.steps else None,
        "newest_version": snapshot.version,
        "tokens_per_second": snapshot.tokens_per_second,
        "dead": [n for n in sorted(snapshot.replicas) if snapshot.life(n) == "dead"],
        "replicas": {
            name: {
                "record": sighting.record,
                "life": snapshot.life(name),
                "age_seconds": snapshot.age(name),
                "staleness": snapshot.staleness(name),
                "silent": snapshot.silent(name),
            }
            for name, sighting in sorted(snapshot.replicas.items())
        },
    }
