"""`farcast study`: where served weights change sparsely, measured on any model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farcast.cli import options
from farcast.fleet.presets import DEFAULT_MODEL

if TYPE_CHECKING:
    from rich.console import Console

    from farcast.study.streams import Progress

_QUICK_MODEL = "tiny"


def study(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help=f"smollm2, tiny, or a local Hugging Face folder. [default: {DEFAULT_MODEL}, "
            f"with --quick {_QUICK_MODEL}]",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Fewer steps and rates: minutes for a small model."),
    ] = False,
    figure: Annotated[
        list[str] | None,
        typer.Option(
            "--figure",
            metavar="NAME",
            help="Only this one: law, where, optimizers, formats, scales, lag, stages or sticky. "
            "May be given several times. [default: all]",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="DIR", help="Rows, plots, report page, and recorded gradients."
        ),
    ] = Path("farcast-study"),
    json: options.Json = None,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, help="Of sampling, texts and masters.")
    ] = 0,
    cache: options.Cache = None,
) -> None:
    """Measure how many served weights each step changes, and what its delta weighs.

    Records the gradients of short real runs (GRPO, fine-tuning, pretraining) once, and follows them
    under AdamW, Muon and SGD, over learning rates, in every served format, with the real codec.
    What the folder holds already under the same settings is not made again, so an interrupted study
    goes on where it was. The gradients of a full study of smollm2 take about 10 GB there.

    ```
    farcast study --quick --json study.json      # a tiny model, every figure
    farcast study --figure law --figure formats  # SmolLM2-135M
    farcast study --model ~/models/mine --out mine
    ```
    """
    from rich.console import Console
    from rich.markdown import Markdown

    from farcast.fleet.claim import claimed
    from farcast.fleet.presets import run_config
    from farcast.study.figures import known_figures
    from farcast.study.folder import MARK, check_folder
    from farcast.study.report import write_report
    from farcast.study.settings import settings_for
    from farcast.study.suite import OWN_FILES, Study
    from farcast.study.tables import table
    from farcast.train.models import default_cache, prepare_model

    name = model or (_QUICK_MODEL if quick else DEFAULT_MODEL)
    names = known_figures(figure)
    run = run_config(name, run_id="study", store="memory://", out=out, seed=seed)
    settings = settings_for(name, quick=quick, seed=seed)
    options.check_writable(json)
    check_folder(out, OWN_FILES)
    console = Console()
    with claimed(out / MARK, "study"):
        folder = prepare_model(name, cache or default_cache(), console.print)
        with _progress(console) as progress:
            made = Study(out, folder, run, settings, progress)
            records = made.figures(names)
        page = write_report(out, made.held())
    options.write_json(json, made.report(records))
    for record in records:
        console.print(Markdown(f"## {record.figure}\n\n{table(record)}"))
    console.print(f"Tables, plots and rows of every figure: {page}")


@contextmanager
def _progress(console: "Console") -> "Iterator[Progress]":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield progress
