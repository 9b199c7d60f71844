"""Options that several commands share, each with one meaning everywhere."""

import re
import secrets
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

import msgspec
import typer

from farcast.config import ObjectiveName, OptimizerName, RunConfig, parse_link
from farcast.errors import ConfigError
from farcast.fleet.layout import RunFolder
from farcast.fleet.presets import PRESETS, run_config

if TYPE_CHECKING:
    from farcast.fleet.connecting import Reach
    from farcast.lineage import TrustedKey

LEARNING, PLACES, LINE, TRUST = "Learning", "Places", "Line to the store", "Signatures"
"""Groups in which `--help` shows what several commands share."""

Store = Annotated[
    str,
    typer.Option(
        "--store",
        metavar="URL",
        help="The run's store: a path, file://, s3://bucket/prefix, gs://, az://.",
        show_default=False,
    ),
]
Json = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Also write the result to FILE as JSON."),
]
Link = Annotated[
    str | None,
    typer.Option(
        "--link",
        metavar="RATE,RTT",
        help="Put the replica behind an emulated link, e.g. 100mbit,80ms.",
        rich_help_panel=LINE,
    ),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="DIR",
        help="Where prepared models are kept. [default: ~/.cache/farcast]",
        rich_help_panel=PLACES,
    ),
]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="MODEL",
        help=f"{', '.join(PRESETS)}, or a local Hugging Face folder.",
        rich_help_panel=LEARNING,
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        "--steps",
        metavar="N",
        min=1,
        help="Optimizer steps. [default: the model's preset]",
        rich_help_panel=LEARNING,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed",
        metavar="N",
        min=0,
        help="Seed of tasks and sampling.",
        rich_help_panel=LEARNING,
    ),
]
NewStore = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="Where trainer and replicas meet, unused yet. [default: a folder in --out]",
        rich_help_panel=PLACES,
    ),
]
Objective = Annotated[
    ObjectiveName | None,
    typer.Option(
        "--objective",
        metavar="NAME",
        help="How the loss corrects for a token's age: "
        f"{', '.join(get_args(ObjectiveName))}. [default: the preset's, dapo]",
        show_default=False,
        rich_help_panel=LEARNING,
    ),
]
Optimizer = Annotated[
    OptimizerName | None,
    typer.Option(
        "--optimizer",
        metavar="NAME",
        help="adamw, or muon, which trains the matrices of hidden layers, at AdamW's scale. "
        "[default: the preset's, adamw]",
        show_default=False,
        rich_help_panel=LEARNING,
    ),
]
TrustedKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--trusted-key",
        metavar="FILE",
        help="Take only what this public key signed (see farcast keygen).",
        rich_help_panel=TRUST,
    ),
]
Expired = Annotated[
    Literal["refuse", "warn"],
    typer.Option(
        "--expired",
        help="With --trusted-key, when nothing signed says that the newest version is recent: "
        "refuse newer ones, or warn.",
        rich_help_panel=TRUST,
    ),
]
ServedFormat = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="NAME",
        help="Which of the run's served formats to take, such as fp8_block or int4_g32. "
        "[default: its first]",
    ),
]
Relay = Annotated[
    str | None,
    typer.Option(
        "--relay",
        metavar="URL",
        help="Read objects from this relay (see farcast relay), and from the store if it fails.",
        rich_help_panel=LINE,
    ),
]
RelayTokenFile = Annotated[
    Path | None,
    typer.Option(
        "--relay-token-file",
        metavar="FILE",
        help="The relay's token, in a file.",
        rich_help_panel=LINE,
    ),
]
RelayTokenEnv = Annotated[
    str | None,
    typer.Option(
        "--relay-token-env",
        metavar="NAME",
        help="Or in this environment variable.",
        rich_help_panel=LINE,
    ),
]
SigningKeyFile = Annotated[
    Path | None,
    typer.Option(
        "--signing-key",
        metavar="FILE",
        help="Sign every version with this secret key (see farcast keygen).",
        rich_help_panel=TRUST,
    ),
]
Tied = Annotated[bool, typer.Option("--tied", hidden=True)]
"""The process was started by a launcher: leave when standard input closes."""


def check_writable(path: Path | None) -> None:
    """Find out before the work, not after it, that the result cannot be written."""
    if path is None:
        return
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise ConfigError(
            f"The file {path} cannot be written ({error.strerror}); name another one."
        ) from error


def new_run(
    folder: RunFolder,
    *,
    model: str,
    store: str | None,
    steps: int | None,
    seed: int,
    objective: ObjectiveName | None = None,
    optimizer: OptimizerName | None = None,
    signing_key: Path | None = None,
) -> RunConfig:
    """The configuration of a run that starts in `folder`; its store is there unless one is named,
    and a named one must be free."""
    from farcast.fleet.finding import require_unused
    from farcast.store import open_store

    config = run_config(
        model,
        run_id=f"{name_of(folder.path)}-{secrets.token_hex(3)}",
        store=store or folder.store.as_uri(),
        out=folder.path,
        steps=steps,
        seed=seed,
        objective=objective,
        optimizer=optimizer,
        signing_key=signing_key,
    )
    if store is not None:
        require_unused(open_store(store))
    return config


def require_same(context: typer.Context, config: RunConfig) -> None:
    """Refuse options of this command that contradict the run it goes on with."""
    held: dict[str, object] = {
        "model": config.model,
        "seed": config.train.seed,
        "store": config.store,
        "objective": config.train.objective,
        "optimizer": config.train.optimizer,
        "signing_key": None if config.signing_key is None else Path(config.signing_key),
    }
    for name, value in held.items():
        told = context.params.get(name)
        source = context.get_parameter_source(name)
        typed = source is not None and source.name == "COMMANDLINE"
        if typed and told is not None and told != value:
            raise ConfigError(
                f"The run was started with --{name} {value}, not {told}; leave the option out, or "
                "start a new run."
            )


class ReachOptions(NamedTuple):
    """What a command line says of how a replica reaches its run."""

    store: str
    link: str | None
    relay: str | None
    relay_token_file: Path | None
    relay_token_env: str | None
    trusted_key: Path | None
    expired: Literal["refuse", "warn"] = "refuse"
    served_format: str | None = None

    def read(self) -> "Reach":
        """Raises `ConfigError` for what cannot be meant, before anything is begun."""
        from farcast.fleet.connecting import Reach
        from farcast.formats import parse_recipe
        from farcast.gateway.tokens import read_token
        from farcast.store.relayed import RelayAddress

        if self.served_format is not None:
            parse_recipe(self.served_format)
        relay = None
        if self.relay is not None:
            token = read_token(self.relay_token_file, self.relay_token_env, what="relay token")
            relay = RelayAddress(url=self.relay, authorization=token.header())
        elif self.relay_token_file is not None or self.relay_token_env is not None:
            raise ConfigError("A relay's token goes with --relay URL.")
        return Reach(
            store_url=self.store,
            link=None if self.link is None else parse_link(self.link),
            relay=relay,
            trusted=trusted_key(self.trusted_key),
            on_expiry=self.expired,
            served_format=self.served_format,
        )

    def arguments(self) -> tuple[str, ...]:
        """The same for a process that is started elsewhere; a token is named and not shown."""
        told = {
            "--link": self.link,
            "--relay": self.relay,
            "--relay-token-file": _whole(self.relay_token_file),
            "--relay-token-env": self.relay_token_env,
            "--trusted-key": _whole(self.trusted_key),
            "--format": self.served_format,
            "--expired": None if self.trusted_key is None else self.expired,
        }
        return tuple(word for name, value in told.items() if value for word in (name, value))


def _whole(path: Path | None) -> str | None:
    return None if path is None else str(path.expanduser().absolute())


def trusted_key(file: Path | None) -> "TrustedKey | None":
    """The pinned key, if one is."""
    if file is None:
        return None
    from farcast.fleet.keys import read_trusted

    return read_trusted(file)


def program() -> str:
    """How to call this program again from the same shell, which need not have it on its path."""
    if shutil.which("farcast") is not None:
        return "farcast"
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m farcast"
    here = Path.cwd()
    shown = called.relative_to(here) if called.is_relative_to(here) else called
    return shlex.quote(str(shown))


def write_json(path: Path | None, result: msgspec.Struct | Mapping[str, Any]) -> None:
    """Write a result as indented JSON, whole or not at all."""
    if path is None:
        return
    text = msgspec.json.format(msgspec.json.encode(result), indent=2)
    if path.exists() and not path.is_file():  # a pipe or a device has no place for a part file
        path.write_bytes(text + b"\n")
        return
    part = path.with_name(path.name + ".part")
    part.write_bytes(text + b"\n")
    part.replace(path)


def name_of(path: Path) -> str:
    """A run's name from a folder's: what a store key cannot hold becomes a dash."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", path.name).lstrip("._-")
    return plain[:64] or "run"
