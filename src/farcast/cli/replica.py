"""`farcast replica`: keep a folder at the newest version of a run."""

from pathlib import Path
from typing import Annotated

import typer

from farcast.cli import options
from farcast.config import parse_link


def replica(
    store: options.Store,
    dir: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Checkpoint folder (Hugging Face layout).")
    ],
    id: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="This replica's name. [default: host and process]"),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Go to the newest version and end.")] = False,
    link: options.Link = None,
    json: options.Json = None,
    tied: options.Tied = False,
) -> None:
    """Follow a run into a folder that any engine can load.

    Each version is fetched as a delta where that is cheaper, verified, and switched to as a
    whole: a crash at any moment leaves the version before or the version after.

    ```
    farcast replica --store s3://bucket/run1 --dir /models/policy
    farcast replica --store runs/demo/store --dir /tmp/policy --once
    ```
    """
    options.check_writable(json)
    settings = parse_link(link) if link is not None else None

    from farcast.fleet.launcher import leave_with_parent
    from farcast.fleet.replica_process import follow
    from farcast.fleet.reporting import default_id
    from farcast.fleet.signals import StopRequest

    with StopRequest() as stop:
        if tied:
            leave_with_parent()
        result = follow(store, dir, id or default_id(), once=once, link=settings, stop=stop)
    options.write_json(json, result)
