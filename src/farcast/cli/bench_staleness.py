"""`farcast bench staleness`: what corrections for old tokens are worth."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farcast.cli import options
from farcast.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from farcast.bench.staleness_report import StalenessReport


def staleness(
    json: options.Json = None,
    page: Annotated[
        Path | None,
        typer.Option(
            "--page", metavar="FILE", help="Write tables and figure into this Markdown page."
        ),
    ] = None,
    read: Annotated[
        Path | None,
        typer.Option("--read", metavar="FILE", help="Show an earlier --json; measure nothing."),
    ] = None,
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Optimizer steps of each run.")
    ] = 40,
    seeds: Annotated[int, typer.Option(metavar="N", min=1, help="Runs of each case.")] = 3,
    cache: options.Cache = None,
) -> None:
    """Compare corrections for the age of tokens, at 0 to 16 versions, on the letters task.

    A model of about 90,000 parameters learns from samples of its own older versions, in this
    process, with each correction. About a hundred short runs: some ten minutes on one core.

    ```
    farcast bench staleness --json staleness.json --page docs/staleness.md
    farcast bench staleness --seeds 1 --steps 10   # under a minute
    ```
    """
    from rich.console import Console
    from rich.markdown import Markdown

    from farcast.bench.staleness_report import tables, write_page

    options.check_writable(json)
    options.check_writable(page)
    console = Console()
    report = _measured(console, steps, seeds, cache) if read is None else _read(read)
    options.write_json(json, report)
    if page is not None:
        from farcast.bench.staleness_plot import plot_staleness

        figure = page.with_suffix(".png")
        plot_staleness(report, figure)
        write_page(report, page, figure.name)
    console.print(Markdown(tables(report)))


def _measured(console: "Console", steps: int, seeds: int, cache: Path | None) -> "StalenessReport":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from transformers.utils.logging import disable_progress_bar

    from farcast.bench.staleness import run_all
    from farcast.bench.staleness_report import StalenessReport
    from farcast.bench.suite import this_machine
    from farcast.train.models import default_cache

    disable_progress_bar()
    began = time.process_time()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        outcomes = run_all(
            cache or default_cache(), steps=steps, seeds=range(seeds), progress=progress
        )
    return StalenessReport(
        steps=steps,
        seeds=seeds,
        machine=this_machine().processor,
        cpu_seconds=time.process_time() - began,
        outcomes=tuple(outcomes),
    )


def _read(file: Path) -> "StalenessReport":
    import msgspec

    from farcast.bench.staleness_report import StalenessReport

    try:
        return msgspec.json.decode(file.read_bytes(), type=StalenessReport)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{file} is no result of `farcast bench staleness --json` ({error}); name one."
        ) from error
