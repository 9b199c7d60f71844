"""`farcast gateway`: one address for all replicas of a run."""

from pathlib import Path
from typing import Annotated

import typer

from farcast.cli import options


def gateway(
    store: options.Store,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Listen here.")] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(metavar="PORT", min=0, max=65535, help="Listen here; 0 takes a free port."),
    ] = 8200,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Clients' bearer token, in a file.")
    ] = None,
    token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Or in this environment variable.")
    ] = None,
    replica_token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The replicas' token. [default: the clients']"),
    ] = None,
    replica_token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Or in this environment variable.")
    ] = None,
    max_requests: Annotated[
        int, typer.Option(metavar="N", min=1, help="More at once answer 503.")
    ] = 4096,
    drain_seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0, help="When stopping, wait so long for those under way."
        ),
    ] = 120.0,
    tied: options.Tied = False,
) -> None:
    """Serve a run's replicas under one address.

    Replicas are found through their records in the store. A request goes to one that serves the
    version it asks for; a session (header `X-Farcast-Session`) stays on its replica; one that is
    full, behind or gone is passed over for the next.

    ```
    farcast gateway --store s3://bucket/run1 --token-file /etc/farcast/token
    curl -H "Authorization: Bearer $TOKEN" -H "Content-Type: application/json" \\
        -H "X-Farcast-Weight-Version: min=12" \\
        -d '{"model": "policy", "prompt": "2 + 2 =", "max_tokens": 8}' \\
        http://127.0.0.1:8200/v1/completions
    ```
    """
    from farcast.fleet.launcher import leave_with_parent
    from farcast.fleet.signals import StopRequest
    from farcast.gateway.extra import require_serving
    from farcast.gateway.tokens import read_token

    require_serving()
    from farcast.gateway.gateway_process import GatewayOptions, serve_gateway

    token = read_token(token_file, token_env)
    own = replica_token_file is None and replica_token_env is None
    told = GatewayOptions(
        store_url=store,
        token=token,
        replica_token=token
        if own
        else read_token(replica_token_file, replica_token_env, what="replica token"),
        host=host,
        port=port,
        limit=max_requests,
        drain_seconds=drain_seconds,
    )
    with StopRequest() as stop:
        if tied:
            leave_with_parent()
        serve_gateway(told, stop)
