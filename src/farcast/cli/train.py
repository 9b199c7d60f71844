"""`farcast train`: the trainer of a run, for a cluster of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from farcast.cli import options
from farcast.config import RunConfig, decode_config
from farcast.errors import ConfigError
from farcast.fleet.layout import RunFolder
from farcast.fleet.presets import DEFAULT_MODEL
from farcast.fleet.ranks import join, place

if TYPE_CHECKING:
    from farcast.fleet.signals import StopRequest


def train(
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A RunConfig as JSON; replaces those of Learning, Places and Signatures.",
        ),
    ] = None,
    model: options.Model = DEFAULT_MODEL,
    store: options.NewStore = None,
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Folder for checkpoints and metrics.",
            rich_help_panel=options.PLACES,
        ),
    ] = Path("runs/train"),
    steps: options.Steps = None,
    seed: options.Seed = 0,
    objective: options.Objective = None,
    optimizer: options.Optimizer = None,
    signing_key: options.SigningKeyFile = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")
    ] = False,
    cache: options.Cache = None,
    tied: options.Tied = False,
) -> None:
    """Run the trainer: it publishes a version for every step and reads what workers send.

    ```
    farcast train --model tiny --store /data/run1 --out runs/one
    farcast worker --store /data/run1 --id w1  # elsewhere, many
    farcast train --out runs/one --resume      # after a stop or a crash
    torchrun --nproc-per-node 4 -m farcast train --out runs/four  # sharded
    ```
    """

    def settings() -> RunConfig:
        folder = RunFolder(out)
        if config is not None:
            return _read(config)
        if resume:
            return folder.read_config()
        new = options.new_run(
            folder,
            model=model,
            store=store,
            steps=steps,
            seed=seed,
            objective=objective,
            optimizer=optimizer,
            signing_key=signing_key,
        )
        folder.create(new)
        return new

    if place().ranks > 1:
        _run_rank(settings, resume=resume, cache=cache)
        return
    run = settings()

    from farcast.fleet.launcher import leave_with_parent
    from farcast.fleet.trainer_process import run_trainer

    with _stop_request(run) as stop:
        if tied:
            leave_with_parent()
        run_trainer(run, resume=resume, stop=stop, cache=cache)


def _run_rank(settings: Callable[[], RunConfig], *, resume: bool, cache: Path | None) -> None:
    """One of the ranks that torchrun started."""
    from farcast.fleet.follower_process import run_follower
    from farcast.fleet.signals import StopRequest
    from farcast.fleet.trainer_process import run_trainer

    run, lines = join(settings)
    leads = lines.team.rank == 0  # Ctrl-C reaches all ranks; one answers
    with _stop_request(run) if leads else StopRequest() as stop:
        if leads:
            run_trainer(run, resume=resume, stop=stop, cache=cache, lines=lines)
        else:
            run_follower(run, lines, stop=stop, cache=cache)


def _stop_request(run: RunConfig) -> "StopRequest":
    """One that says what is waited for, and at the second signal where the run goes on."""
    from farcast.fleet.signals import StopRequest, announce, end_at_once
    from farcast.train.checkpoint import Checkpoints

    folder = RunFolder(Path(run.out))

    def insist() -> NoReturn:
        step = Checkpoints(folder.checkpoint, run.run_id).newest_step
        end_at_once(
            "ended at once, before the first checkpoint; --resume begins at the first step"
            if step is None
            else f"ended at once; the newest checkpoint is of step {step}, go on from it with "
            f"{options.program()} train --out {folder.shown} --resume"
        )

    return StopRequest(
        asked=lambda: announce(
            "stopping: the step under way ends and a checkpoint is written; "
            "Ctrl-C again ends at once"
        ),
        insist=insist,
    )


def _read(file: Path) -> RunConfig:
    """The configuration in a file of the user's."""
    try:
        return decode_config(file.read_bytes(), RunConfig)
    except FileNotFoundError:
        raise ConfigError(f"There is no file {file}; name a RunConfig file.") from None
