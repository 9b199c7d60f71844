"""`farcast relay`: fetch each object once for a whole region."""

import re
from pathlib import Path
from typing import Annotated

import typer

from farcast.cli import options
from farcast.config import parse_link
from farcast.errors import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)(MB|GB|TB)")
_BYTES = {"MB": 1e6, "GB": 1e9, "TB": 1e12}


def relay(
    store: options.Store,
    folder: Annotated[
        Path, typer.Option("--folder", metavar="DIR", help="Keep objects here, and nothing else.")
    ],
    size: Annotated[
        str, typer.Option(metavar="SIZE", help="Keep up to so much, e.g. 500MB, 50GB, 2TB.")
    ] = "50GB",
    workers: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=256, help="Objects read from the store, and in memory, at once."
        ),
    ] = 4,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Listen here.")] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(metavar="PORT", min=0, max=65535, help="Listen here; 0 takes a free port."),
    ] = 8300,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Neighbours' bearer token, in a file.")
    ] = None,
    token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Or in this environment variable.")
    ] = None,
    max_requests: Annotated[
        int, typer.Option(metavar="N", min=1, help="More at once answer 503.")
    ] = 1024,
    drain_seconds: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0, help="When stopping, wait so long for those under way."
        ),
    ] = 120.0,
    link: options.Link = None,
    tied: options.Tied = False,
) -> None:
    """Fetch each object from the store once, and give it to every neighbour that asks.

    Objects are named by the digest of their bytes, and whoever reads one hashes it, so neighbours
    need not trust a relay: if it lies, breaks or ends, they read the store themselves. What is
    newest is always asked of the store, so a relay holds nobody back.

    ```
    farcast relay --store s3://bucket/run1 --folder /var/cache/farcast \\
        --token-file /etc/farcast/relay
    farcast worker --store s3://bucket/run1 --relay http://127.0.0.1:8300 \\
        --relay-token-file /etc/farcast/relay
    ```
    """
    from farcast.fleet.launcher import leave_with_parent
    from farcast.fleet.signals import StopRequest
    from farcast.gateway.extra import require_serving
    from farcast.gateway.tokens import read_token

    require_serving()
    from farcast.relay.relay_process import RelayOptions, serve_relay

    told = RelayOptions(
        store_url=store,
        folder=folder.expanduser().absolute(),
        token=read_token(token_file, token_env),
        size=_bytes(size),
        host=host,
        port=port,
        workers=workers,
        limit=max_requests,
        drain_seconds=drain_seconds,
        link=None if link is None else parse_link(link),
    )
    with StopRequest() as stop:
        if tied:
            leave_with_parent()
        serve_relay(told, stop)


def _bytes(text: str) -> int:
    found = _SIZE.fullmatch(text.replace(" ", ""))
    size = 0.0 if found is None else float(found[1]) * _BYTES[found[2]]
    if not 1e6 <= size <= 1e15:
        raise ConfigError(
            f"The size {text[:40]!r} is not understood; write one like 500MB or 50GB."
        )
    return int(size)
