"""`farcast worker`: a replica that samples, anywhere the store can be reached from."""

from pathlib import Path
from typing import Annotated

import typer

from farcast.cli import options


def worker(
    store: options.Store,
    id: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="This worker's name in the run. [default: host and pid]"),
    ] = None,
    link: options.Link = None,
    relay: options.Relay = None,
    relay_token_file: options.RelayTokenFile = None,
    relay_token_env: options.RelayTokenEnv = None,
    trusted_key: options.TrustedKeyFile = None,
    expired: options.Expired = "refuse",
    assets: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the model's small files go. [default: temporary]"),
    ] = None,
    alive: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Touch this file whenever a round of sampling ends, for a liveness probe.",
        ),
    ] = None,
    from_step: Annotated[
        int, typer.Option(min=0, metavar="STEP", help="Be ready, but join only at this step.")
    ] = 0,
    tied: options.Tied = False,
) -> None:
    """Run a replica with a worker: it follows the versions and sends trajectories home.

    All it needs is the store's URL. It takes the newest version, samples the run's task, and
    moves to each new version between two tokens. It leaves when the trainer is done.

    ```
    farcast worker --store s3://bucket/run1 --id tokyo-1
    farcast worker --store runs/demo/store --link 100mbit,80ms
    ```
    """
    reach = options.ReachOptions(
        store, link, relay, relay_token_file, relay_token_env, trusted_key, expired
    ).read()

    from farcast.fleet.launcher import leave_with_parent
    from farcast.fleet.reporting import default_id
    from farcast.fleet.signals import StopRequest, announce, end_at_once
    from farcast.fleet.worker_process import run_worker

    with StopRequest(
        asked=lambda: announce("stopping: what was sampled is sent; Ctrl-C again ends at once"),
        insist=lambda: end_at_once(
            "ended at once: what was acknowledged counts, the rest is sampled again"
        ),
    ) as stop:
        if tied:
            leave_with_parent()
        run_worker(
            reach, id or default_id(), folder=assets, from_step=from_step, stop=stop, alive=alive
        )
