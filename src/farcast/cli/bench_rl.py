"""`farcast bench rl`: trajectories home, and what the link costs a run."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from farcast.cli import options


def rl(
    json: options.Json = None,
    trajectories: Annotated[
        int, typer.Option(metavar="N", min=64, help="How many are sent by workers that are killed.")
    ] = 10_000,
    link: Annotated[
        str, typer.Option("--link", metavar="RATE,RTT", help="The emulated link of both sides.")
    ] = "100mbit,80ms",
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL", help="What samples the trajectories whose bytes are counted."
        ),
    ] = "smollm2",
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of each of those.")] = 256,
    steps: Annotated[
        int, typer.Option(metavar="N", min=4, help="Optimizer steps of each training run.")
    ] = 32,
    seeds: Annotated[
        int, typer.Option(metavar="N", min=2, help="Training runs with and without link.")
    ] = 3,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of kills and tasks.")] = 0,
    cache: options.Cache = None,
) -> None:
    """Does each trajectory count once, what does it cost, and does the distance cost anything?

    Workers and trainer as processes that are killed at random over a failing store; bytes per
    token against usual codings; and a tiny model trained with and without an emulated link, on
    both sides. Wants a machine to itself: what else runs there shows in the last two.

    ```
    farcast bench rl --json rl.json
    farcast bench rl --trajectories 1000 --model tiny --steps 6 --seeds 2
    ```
    """
    from rich.console import Console
    from rich.table import Table
    from transformers.utils.logging import disable_progress_bar

    from farcast.bench import rl_report
    from farcast.bench.rl_delivery import measure_delivery
    from farcast.bench.rl_training import measure_training
    from farcast.bench.rl_wire import measure_wire
    from farcast.bench.suite import this_machine
    from farcast.config import parse_link
    from farcast.train.models import default_cache

    options.check_writable(json)
    emulated, console, machine = parse_link(link), Console(), this_machine()
    disable_progress_bar()
    with (
        tempfile.TemporaryDirectory(prefix="farcast-rl-") as scratch,
        console.status("starting") as shown,
    ):
        folders = [Path(scratch) / name for name in ("delivery", "training")]
        for folder in folders:
            folder.mkdir()
        delivery = measure_delivery(
            folders[0], trajectories=trajectories, seed=seed, say=shown.update
        )
        kept = cache or default_cache()
        wire = measure_wire(model, kept, tokens=tokens, repeats=20, say=shown.update)
        training = measure_training(
            folders[1],
            kept,
            emulated,
            steps=steps,
            seeds=range(seed, seed + seeds),
            say=shown.update,
        )
    options.write_json(json, rl_report.flat(machine, delivery, wire, training, link))
    table = Table("", "measured", "compare")
    for line in rl_report.lines(delivery, wire, training):
        table.add_row(*line)
    console.print(table)
