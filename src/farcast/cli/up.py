"""`farcast up`: as many workers as a run wants, here or on a Ray cluster."""

import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from farcast.cli import options
from farcast.errors import ConfigError
from farcast.types import NAME_PATTERN

if TYPE_CHECKING:
    from farcast.fleet.launcher import Launcher

_RAY = "Ray"

_RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="ADDRESS",
        help="The cluster: auto, HOST:PORT or ray://HOST:PORT. [default: a new one, here]",
        rich_help_panel=_RAY,
    ),
]
_Cpus = Annotated[
    float,
    typer.Option(
        "--cpus",
        metavar="N",
        min=0,
        help="CPU cores that a worker takes of a node.",
        rich_help_panel=_RAY,
    ),
]
_Gpus = Annotated[
    float,
    typer.Option(
        "--gpus",
        metavar="N",
        min=0,
        help="GPUs that a worker takes of a node.",
        rich_help_panel=_RAY,
    ),
]


def up(
    store: options.Store,
    launcher: Annotated[
        Literal["local", "ray"], typer.Option(help="Processes of this machine, or of a cluster.")
    ] = "local",
    min: Annotated[int, typer.Option("--min", metavar="N", min=0, help="Never fewer workers.")] = 1,
    max: Annotated[
        int, typer.Option("--max", metavar="N", min=1, max=4096, help="Never more.")
    ] = 4,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Workers are NAME-1, NAME-2, ... [default: this host's name]"
        ),
    ] = None,
    link: options.Link = None,
    relay: options.Relay = None,
    relay_token_file: options.RelayTokenFile = None,
    relay_token_env: options.RelayTokenEnv = None,
    trusted_key: options.TrustedKeyFile = None,
    expired: options.Expired = "refuse",
    logs: Annotated[
        Path, typer.Option(metavar="DIR", help="What local workers say goes here.")
    ] = Path("runs/up"),
    ray_address: _RayAddress = None,
    cpus: _Cpus = 1.0,
    gpus: _Gpus = 0.0,
    json: options.Json = None,
) -> None:
    """Keep as many workers as a run wants: enough that its trainer never waits, and no more.

    It looks at the run's records, starts workers when the trainer waits, lets some go when they
    are held up by the backlog, starts crashed ones again and replaces those that hang. It ends
    when the trainer is done. Workers that others started count, so each region may have one.

    ```
    farcast up --store runs/demo/store --max 3
    farcast up --store s3://bucket/run1 --max 32 \\
        --launcher ray --ray-address auto --gpus 1
    ```
    """
    options.check_writable(json)
    told = options.ReachOptions(
        store, link, relay, relay_token_file, relay_token_env, trusted_key, expired
    )
    told.read()  # found wrong here, and not by each worker
    prefix = f"{_host() if name is None else name}-"
    if NAME_PATTERN.fullmatch(f"{prefix}4096") is None:
        raise ConfigError(
            f"{prefix[:60]!r} begins no worker's name; use up to 100 letters, digits, '.', '_' or "
            "'-', beginning with a letter or digit."
        )

    from farcast.fleet.saying import say
    from farcast.fleet.scaling import Limits
    from farcast.fleet.signals import StopRequest, announce
    from farcast.fleet.up_process import keep_up

    limits = Limits(least=min, most=max).check()
    logs = logs.expanduser().absolute()
    logs.mkdir(parents=True, exist_ok=True)
    with StopRequest(
        asked=lambda: announce(
            "stopping: workers send what they have sampled and leave (2 minutes at most); "
            "Ctrl-C again ends at once"
        )
    ) as stop:
        result = keep_up(
            _reachable(store),
            _launcher(launcher, ray_address, cpus, gpus),
            limits,
            prefix=prefix,
            logs=logs,
            more=told.arguments(),
            stop=stop,
            tell=say,
        )
    options.write_json(json, result)


def _reachable(store: str) -> str:
    """A folder by its whole path: workers run elsewhere, with another folder before their eyes."""
    from farcast.store import open_store

    return store if "://" in store else open_store(store).url


def _launcher(kind: str, address: str | None, cpus: float, gpus: float) -> "Launcher":
    if kind == "local":
        from farcast.fleet.launcher import LocalLauncher

        if address is not None:
            raise ConfigError("--ray-address goes with --launcher ray.")
        return LocalLauncher()
    from farcast.fleet.ray_launcher import NodeNeeds, RayLauncher

    return RayLauncher(address, needs=NodeNeeds(cpus=cpus, gpus=gpus))


def _host() -> str:
    """Two of one name would start workers of the same names."""
    plain = re.sub(r"[^A-Za-z0-9.-]+", "-", socket.gethostname()).strip("-.")
    return f"{plain[:64] or 'host'}-{os.getpid()}"
