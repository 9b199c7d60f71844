"""`farcast advise`: how many replicas a run wants, for an autoscaler to ask."""

from pathlib import Path
from typing import Annotated

import typer

from farcast.cli import options


def advise(
    store: options.Store,
    min: Annotated[
        int, typer.Option("--min", metavar="N", min=0, help="Never fewer replicas.")
    ] = 1,
    max: Annotated[
        int, typer.Option("--max", metavar="N", min=1, max=4096, help="Never more.")
    ] = 8,
    prefix: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Replicas whose names begin otherwise are others': they count as there.",
        ),
    ] = "",
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Listen here.")] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(metavar="PORT", min=0, max=65535, help="Listen here; 0 takes a free port."),
    ] = 8400,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The autoscaler's bearer token, in a file.")
    ] = None,
    token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Or in this environment variable.")
    ] = None,
    tied: options.Tied = False,
) -> None:
    """Say how many replicas a run wants: the policy of `farcast up` for somebody else's launcher.

    `GET /wanted` answers with `{"wanted": 5, ...}`, which an autoscaler such as KEDA brings about;
    `/metrics` has it and the figures behind it for Prometheus. Once the trainer is done it is 0.

    ```
    farcast advise --store s3://bucket/run1 --max 32 --token-env TOKEN
    curl -H "Authorization: Bearer $TOKEN" http://127.0.0.1:8400/wanted
    ```
    """
    from farcast.fleet.launcher import leave_with_parent
    from farcast.fleet.scaling import Limits
    from farcast.fleet.signals import StopRequest
    from farcast.gateway.extra import require_serving
    from farcast.gateway.tokens import read_token

    require_serving()
    from farcast.gateway.advice_process import AdviceOptions, serve_advice

    told = AdviceOptions(
        store_url=store,
        token=read_token(token_file, token_env),
        limits=Limits(least=min, most=max).check(),
        prefix=prefix,
        host=host,
        port=port,
    )
    with StopRequest() as stop:
        if tied:
            leave_with_parent()
        serve_advice(told, stop)
