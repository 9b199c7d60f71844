"""The `farcast` command: what a person can ask for, and nothing that does not work yet.

Imports only what `--help` needs; each command loads its own heavy parts when it runs.
"""

import sys
from typing import Annotated, NoReturn

import typer

from farcast import __version__
from farcast.cli import boundary
from farcast.cli.advise import advise
from farcast.cli.bench import bench
from farcast.cli.demo import demo
from farcast.cli.fork import fork
from farcast.cli.gateway import gateway
from farcast.cli.gc import gc
from farcast.cli.inspect import inspect
from farcast.cli.keygen import keygen
from farcast.cli.plan import plan
from farcast.cli.record import record
from farcast.cli.relay import relay
from farcast.cli.replica import replica
from farcast.cli.status import status
from farcast.cli.study import study
from farcast.cli.train import train
from farcast.cli.up import up
from farcast.cli.verify import verify
from farcast.cli.worker import worker

app = typer.Typer(
    name="farcast",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"farcast {__version__}")
        raise typer.Exit


@app.callback()
def farcast(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
    debug: Annotated[
        bool, typer.Option(boundary.DEBUG_OPTION, help="Show tracebacks of errors.")
    ] = False,
) -> None:
    """Reinforcement learning of language models across datacenters.

    Start with `farcast demo`. It trains a small real model on this machine, with rollouts in
    separate processes behind the store, and verifies every version at the end.
    """


app.command(rich_help_panel="Run")(demo)
app.command(rich_help_panel="Run")(train)
app.command(rich_help_panel="Run")(worker)
app.command(rich_help_panel="Run")(up)
app.command(rich_help_panel="Run")(advise)
app.command(rich_help_panel="Run")(replica)
app.command(rich_help_panel="Run")(gateway)
app.command(rich_help_panel="Run")(relay)
app.command(rich_help_panel="Run")(fork)
app.command(rich_help_panel="Run")(gc)
app.command(rich_help_panel="Run")(keygen)
app.add_typer(record, rich_help_panel="Run")
app.command(rich_help_panel="Look")(status)
app.command(rich_help_panel="Look")(inspect)
app.command(rich_help_panel="Look")(plan)
app.command(rich_help_panel="Look")(verify)
app.command(rich_help_panel="Look")(study)
app.add_typer(bench, rich_help_panel="Look")


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run one command line (this process's own by default) and exit with its status."""
    line = sys.argv[1:] if arguments is None else arguments
    boundary.run(lambda args: app(args, prog_name="farcast"), line)
