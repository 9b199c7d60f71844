"""`farcast bench serve`: what the HTTP side costs a request."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from farcast.cli import options
from farcast.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from farcast.bench.serving_proxy import ProxyReport


def serve(
    json: options.Json = None,
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="For each load of each round.")
    ] = 3.0,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Medians are over these.")] = 5,
    vllm: Annotated[
        Path | None,
        typer.Option(
            metavar="PYTHON",
            help="Measure vLLM too: the python of an environment that has it (`make vllm-env`).",
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The model for vLLM, a Hugging Face folder.")
    ] = None,
    versions: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="So many go live under load; every answer is checked."
        ),
    ] = 200,
) -> None:
    """What serving through farcast costs: a request, and an engine that changes its weights.

    Sidecar and gateway run as they are before an upstream that costs next to nothing, one core
    for them and one for the load. With `--vllm` the real engine is measured: the pause of a
    commit beside a reload, tokens a second while a version is staged, and whether every answer
    among many commits was written by the versions it names.

    ```
    farcast bench serve --json serve.json
    farcast bench serve --json serve.json --model models/smollm2 \\
        --vllm .venv-vllm/bin/python
    ```
    """
    from rich.console import Console

    from farcast.gateway.extra import require_serving

    if (vllm is None) != (model is None):
        raise ConfigError("Name both --vllm PYTHON and --model DIR, or neither.")
    require_serving("httptools")
    from farcast.bench.serving_proxy import measure

    options.check_writable(json)
    console = Console()
    with console.status("starting") as shown:
        report = measure(seconds=seconds, rounds=rounds, progress=shown.update)
        found = msgspec.to_builtins(report)
        if vllm is not None and model is not None:
            found = {**_with_engine(vllm, model, versions, shown.update), **found}
    options.write_json(json, found)
    _show(report, found, console)


def _with_engine(
    python: Path, model: Path, versions: int, say: "Callable[[str], None]"
) -> "dict[str, Any]":
    from farcast.bench.http_load import free_ports
    from farcast.bench.serving_engine import measure_engine
    from farcast.bench.serving_spans import check_spans
    from farcast.train.models import default_cache, prepare_model

    folder = prepare_model(str(model), default_cache())
    first, second, third = free_ports(3)
    engine = measure_engine(python, folder, first, say=say)
    spans = check_spans(python, folder, (second, third), versions=versions, say=say)
    return {**engine, **msgspec.to_builtins(spans)}


def _show(report: "ProxyReport", found: "dict[str, Any]", console: "Console") -> None:
    from rich.table import Table

    table = Table("way", "connections", "requests/s", "p50 ms", "p99 ms", "CPU us", "failed")
    for row in report.rows:
        table.add_row(
            row.way,
            str(row.connections),
            f"{row.requests_per_s:,.0f}",
            f"{row.ms_p50:.3f}",
            f"{row.ms_p99:.3f}",
            f"{row.cpu_us:.0f}",
            str(row.failed),
        )
    console.print(table)
    for name, added, rate in (
        ("sidecar", report.proxy_added_ms_p50, report.proxy_requests_per_s),
        ("gateway", report.gateway_added_ms_p50, report.gateway_requests_per_s),
    ):
        console.print(f"{name}: {added:.2f} ms added at 1 connection, {rate:,.0f} requests/s")
    if "pause_seconds" in found:
        console.print(
            f"commit: a pause of {found['pause_seconds'] * 1e3:.0f} ms, "
            f"{found['pause_over_reload']:.1%} of a reload; "
            f"{found['staging_over_idle']:.0%} of the tokens a second while staging"
        )
        console.print(
            f"{found['versions_checked']} versions, {found['answers']} answers, "
            f"{found['answers_crossed']} with a commit inside: {found['span_mismatches']} wrong, "
            f"{found['requests_lost']} lost"
        )
