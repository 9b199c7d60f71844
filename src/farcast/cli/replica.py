"""`farcast replica`: keep a folder, or a running engine, at the newest version of a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from farcast.cli import options
from farcast.errors import ConfigError

if TYPE_CHECKING:
    from farcast.fleet.connecting import Reach
    from farcast.gateway.sidecar_options import SidecarOptions

_ENGINE = "Before an engine"
_HTTP = "Listener"

Folder = Annotated[
    Path | None,
    typer.Option("--dir", metavar="DIR", help="Checkpoint folder (Hugging Face layout)."),
]
Id = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="This replica's name. [default: host and process]"),
]
Once = Annotated[bool, typer.Option("--once", help="Go to the newest version and end.")]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Take a folder that holds another model or other files."),
]
Engine = Annotated[
    Literal["vllm", "sglang", "http"] | None,
    typer.Option(
        "--engine",
        help="Stand before a running engine of this kind, instead of only keeping a folder.",
        rich_help_panel=_ENGINE,
    ),
]
EngineUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="The engine's own address: http://HOST:PORT or unix:PATH.",
        rich_help_panel=_ENGINE,
    ),
]
EngineTokenEnv = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Environment variable with the engine's own key, if it asks for one.",
        rich_help_panel=_ENGINE,
    ),
]
Model = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="The folder the engine was started with.", rich_help_panel=_ENGINE
    ),
]
ModeOption = Annotated[
    Literal["in_place", "drain"],
    typer.Option(
        "--mode",
        help="in_place: requests go on across a commit where the engine tells which version wrote "
        "which token; drain: none does.",
        rich_help_panel=_ENGINE,
    ),
]
CachesOption = Annotated[
    Literal["salt", "flush"],
    typer.Option(
        "--caches",
        help="Keep cached prefixes of versions apart by salting requests, or by flushing.",
        rich_help_panel=_ENGINE,
    ),
]
MaxRequests = Annotated[
    int,
    typer.Option(
        metavar="N", min=1, help="More than these at once answer 503.", rich_help_panel=_ENGINE
    ),
]
DrainSeconds = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0.1,
        help="A request that holds up a commit for longer is ended.",
        rich_help_panel=_ENGINE,
    ),
]
EngineSeconds = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=1,
        help="How long the engine may take to come up.",
        rich_help_panel=_ENGINE,
    ),
]
Scratch = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Room for the model once more. [default: under ~/.cache/farcast]",
        rich_help_panel=_ENGINE,
    ),
]
Host = Annotated[str, typer.Option(metavar="ADDRESS", help="Listen here.", rich_help_panel=_HTTP)]
Port = Annotated[
    int,
    typer.Option(
        metavar="PORT",
        min=0,
        max=65535,
        help="Listen here; 0 takes a free port.",
        rich_help_panel=_HTTP,
    ),
]
Advertise = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="The address that gateways are told. [default: where it listens]",
        rich_help_panel=_HTTP,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Clients' bearer token, in a file.", rich_help_panel=_HTTP),
]
TokenEnv = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Or in this environment variable.", rich_help_panel=_HTTP),
]


def replica(
    store: options.Store,
    dir: Folder = None,
    id: Id = None,
    once: Once = False,
    overwrite: Overwrite = False,
    link: options.Link = None,
    relay: options.Relay = None,
    relay_token_file: options.RelayTokenFile = None,
    relay_token_env: options.RelayTokenEnv = None,
    trusted_key: options.TrustedKeyFile = None,
    expired: options.Expired = "refuse",
    format: options.ServedFormat = None,
    json: options.Json = None,
    tied: options.Tied = False,
    engine: Engine = None,
    engine_url: EngineUrl = None,
    engine_token_env: EngineTokenEnv = None,
    model: Model = None,
    mode: ModeOption = "in_place",
    caches: CachesOption = "salt",
    max_requests: MaxRequests = 256,
    drain_seconds: DrainSeconds = 120.0,
    engine_seconds: EngineSeconds = 600.0,
    scratch: Scratch = None,
    host: Host = "127.0.0.1",
    port: Port = 8100,
    advertise: Advertise = None,
    token_file: TokenFile = None,
    token_env: TokenEnv = None,
) -> None:
    """Follow a run into a folder that any engine can load, or into a running engine.

    Each version is fetched as a delta where that is cheaper, verified, and switched to as a
    whole: a crash at any moment leaves the version before or the version after.

    ```
    farcast replica --store s3://bucket/run1 --dir /models/policy
    farcast replica --store runs/demo/store --dir /tmp/policy --once
    ```

    With `--engine` it stands before an engine as its only client, stages each version while the
    engine generates, and commits it in a short pause. It answers OpenAI's routes and the engine's
    own, never those that change weights; `/ready` says when the first version is live.

    ```
    farcast replica --store s3://bucket/run1 --engine vllm \\
        --engine-url unix:/run/vllm.sock --model /models/base --token-env TOKEN
    ```
    """
    options.check_writable(json)
    if (dir is None) == (engine is None):
        raise ConfigError("Say --dir DIR to keep a folder, or --engine KIND to serve an engine.")
    reach = options.ReachOptions(
        store, link, relay, relay_token_file, relay_token_env, trusted_key, expired, format
    ).read()
    if dir is not None:
        _follow(reach, dir, id, once=once, overwrite=overwrite, json=json, tied=tied)
        return
    if once or json is not None:
        raise ConfigError("--once and --json go with --dir; ask /ready or /metrics of an engine.")
    if engine is None or engine_url is None or model is None:
        raise ConfigError(f"--engine {engine} also needs --engine-url URL and --model DIR.")

    from farcast.fleet.reporting import default_id
    from farcast.gateway.sidecar_options import SidecarOptions
    from farcast.gateway.tokens import read_secret, read_token

    told = SidecarOptions(
        kind=engine,
        engine_url=engine_url,
        model=model,
        reach=reach,
        replica_id=id or default_id(),
        token=read_token(token_file, token_env),
        engine_token=None if engine_token_env is None else read_secret(engine_token_env),
        host=host,
        port=port,
        advertise=advertise,
        mode=mode,
        caches=caches,
        limit=max_requests,
        drain_seconds=drain_seconds,
        engine_seconds=engine_seconds,
        scratch=scratch,
    )
    _serve(told, tied=tied)


def _serve(told: "SidecarOptions", *, tied: bool) -> None:
    from farcast.fleet.launcher import leave_with_parent
    from farcast.fleet.signals import StopRequest
    from farcast.gateway.extra import require_serving

    require_serving()
    from farcast.gateway.sidecar_process import serve_replica

    with StopRequest() as stop:
        if tied:
            leave_with_parent()
        serve_replica(told, stop)


def _follow(
    reach: "Reach",
    folder: Path,
    id: str | None,
    *,
    once: bool,
    overwrite: bool,
    json: Path | None,
    tied: bool,
) -> None:
    from farcast.fleet.launcher import leave_with_parent
    from farcast.fleet.replica_process import follow
    from farcast.fleet.reporting import default_id
    from farcast.fleet.signals import StopRequest

    with StopRequest() as stop:
        if tied:
            leave_with_parent()
        name = id or default_id()
        result = follow(reach, folder, name, once=once, overwrite=overwrite, stop=stop)
    options.write_json(json, result)
