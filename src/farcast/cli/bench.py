"""`farcast bench`: codings of versions, measured on recorded training runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farcast.cli import options
from farcast.cli.bench_rl import rl
from farcast.cli.bench_serve import serve
from farcast.cli.bench_staleness import staleness
from farcast.cli.bench_wan import wan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console
    from rich.progress import Progress

    from farcast.bench.measure import Row

bench = typer.Typer(
    name="bench",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Measure farcast beside what one would use instead, on your own run too.

Each compares within one run, so that the ratios of different machines can be compared.

```
farcast bench record --store runs/demo/store --out recording
farcast bench codec --data recording --plot codec.png
```
""",
)

bench.command()(rl)
bench.command()(serve)
bench.command()(staleness)
bench.command()(wan)

Data = Annotated[
    Path,
    typer.Option(
        "--data",
        metavar="DIR",
        help="A folder that `farcast bench record` wrote.",
        show_default=False,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Also draw the result (PNG, PDF or SVG)."),
]


@bench.command()
def codec(
    data: Data,
    json: options.Json = None,
    plot: Plot = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One hop a run and fewer densities: about a minute.")
    ] = False,
) -> None:
    """Size and speed of farcast's delta and of others' codings, on recorded versions.

    Recorded hops, an anchor, fp8, int4 and mxfp4 versions derived from them, and changes of
    0.001 % to 100 % of the recorded weights. Every decoding is compared with its target. Where
    there is a GPU, the recorded hops are also coded there.

    ```
    farcast bench record --store runs/demo/store --out recording
    farcast bench codec --data recording --json codec.json --plot codec.png
    ```

    `pip install fireworks-delta-compression zstd` adds that package to the comparison. It
    unpickles its own output; nothing else in farcast uses it.
    """
    from rich.console import Console

    from farcast.bench.report import show
    from farcast.bench.squashing import measure_squashes
    from farcast.bench.suite import report_of, run_on_device, this_machine

    for path in (json, plot):
        options.check_writable(path)
    console = Console()
    machine = this_machine()
    rows = list(_with_progress(data, quick, console))
    device = run_on_device(data, quick=quick)
    squashes = list(measure_squashes(data))
    options.write_json(json, report_of(data, rows, device, squashes, machine, quick=quick))
    if plot is not None:
        from farcast.bench.plot import plot_rows

        plot_rows(rows, plot)
    show(rows, device, squashes, machine, console)


def _with_progress(data: Path, quick: bool, console: "Console") -> "Iterator[Row]":
    from farcast.bench.suite import run_suite

    with _bar(console) as bar:
        task = bar.add_task("reading", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield from run_suite(data, quick=quick, progress=progress)


@bench.command()
def record(
    store: options.Store,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A new or empty folder.")],
    first: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="VERSION",
            help="The oldest to record. [default: the oldest without a gap]",
        ),
    ] = None,
    last: Annotated[
        int | None,
        typer.Option(min=0, metavar="VERSION", help="The last one. [default: the newest]"),
    ] = None,
) -> None:
    """Write consecutive versions of a run into a folder that `farcast bench codec` reads.

    Each version is rebuilt from the store and verified to its root.

    ```
    farcast bench record --store runs/demo/store --out recording --first 1
    ```
    """
    from rich.console import Console

    from farcast.bench.record import record as write_recording
    from farcast.store import open_store

    console = Console()
    with _bar(console) as bar:
        task = bar.add_task("looking", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        hops = write_recording(open_store(store), out, first=first, last=last, progress=progress)
    changed, elements = (sum(h.changed for h in hops), sum(h.elements for h in hops))
    console.print(
        f"Recorded {len(hops)} hops of {hops[0].run}, versions {hops[0].base} to "
        f"{hops[-1].target}, in {out}: {changed / max(1, elements):.3%} of the words changed a hop."
    )


def _bar(console: "Console") -> "Progress":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, console=console, transient=True)
