"""`farcast bench serve`: what the HTTP side costs a request."""

from typing import Annotated

import typer

from farcast.cli import options


def serve(
    json: options.Json = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="For each load of each round.")] = 3.0,
    rounds: Annotated[int, typer.Option(min=1, help="Medians are over these.")] = 5,
) -> None:
    """Latency that sidecar and gateway add, and requests a second through each on one core.

    The commands run as they are before an upstream that costs next to nothing; client and
    upstream have a core of their own.

    ```
    farcast bench serve --json serve.json
    ```
    """
    from rich.console import Console
    from rich.table import Table

    from farcast.gateway.extra import require_serving

    require_serving("httptools")
    from farcast.bench.serving_proxy import measure

    options.check_writable(json)
    console = Console()
    with console.status("starting") as shown:
        report = measure(seconds=seconds, rounds=rounds, progress=shown.update)
    options.write_json(json, report)
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
