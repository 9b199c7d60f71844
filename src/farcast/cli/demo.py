"""`farcast demo`: the whole thing on one machine, watched and verified."""

import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farcast.cli import options
from farcast.config import parse_link
from farcast.errors import MissingDependencyError, StoppedAtOnceError
from farcast.fleet.layout import RunFolder, fresh, newest
from farcast.fleet.presets import DEFAULT_MODEL

if TYPE_CHECKING:
    from rich.console import Console

    from farcast.fleet.demo import DemoPlan, Outcome

DEFAULT_OUT = Path("runs/demo")
EXIT_INTERRUPTED = 130
STOPPING = (
    "stopping: replicas send what they sampled, the trainer ends its step and checkpoints; "
    "Ctrl-C again ends at once"
)


def demo(
    context: typer.Context,
    model: options.Model = DEFAULT_MODEL,
    steps: options.Steps = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=64, help="Replicas at the start. [default: 2]"),
    ] = None,
    link: options.Link = None,
    seed: options.Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help=f"Folder of this run. [default: {DEFAULT_OUT}, {DEFAULT_OUT}-2, ...]",
            rich_help_panel=options.PLACES,
        ),
    ] = None,
    store: options.NewStore = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the run in --out, or the newest; --steps and --workers may change.",
        ),
    ] = False,
    objective: options.Objective = None,
    optimizer: options.Optimizer = None,
    no_kill: Annotated[
        bool, typer.Option("--no-kill", help="Do not kill a replica midway.")
    ] = False,
    cache: options.Cache = None,
    json: options.Json = None,
) -> None:
    """Train a real model here, with rollouts in other processes behind the store.

    One trainer and two replicas share nothing but an object store. Midway one replica is killed
    and a third joins late. At the end every version is rebuilt from the store and compared with
    what the trainer and the replicas recorded. Ctrl-C stops in order; --resume goes on.

    ```
    farcast demo                             # SmolLM2-135M, about ten minutes
    farcast demo --model tiny --steps 8      # the same job in about a minute
    farcast demo --link 100mbit,80ms         # replicas behind an emulated link
    farcast demo --resume                    # after Ctrl-C
    ```
    """
    from rich.console import Console

    from farcast.fleet.demo import DemoSettings, new_plan, resumed_plan

    options.check_writable(json)
    if link is not None:
        parse_link(link)
    if resume:
        folder = newest(DEFAULT_OUT) if out is None else RunFolder(out)
        options.require_same(context, folder.read_config())
        plan = resumed_plan(folder, steps=steps, workers=workers, link=link, kill=not no_kill)
    else:
        folder = fresh(DEFAULT_OUT) if out is None else RunFolder(out)
        config = options.new_run(
            folder,
            model=model,
            store=store,
            steps=steps,
            seed=seed,
            objective=objective,
            optimizer=optimizer,
        )
        settings = DemoSettings(workers=workers or 2, link=link, kill=not no_kill)
        plan = new_plan(folder, config, settings)
    _run(plan._replace(cache=cache), Console(), json)


def _run(plan: "DemoPlan", console: "Console", json: Path | None) -> None:
    from farcast.cli.verify import EXIT_DIFFERENT, audit_with_progress
    from farcast.dashboard.plots import plot_run
    from farcast.dashboard.summary import show_summary
    from farcast.fleet.events import EventLog
    from farcast.fleet.registry import Registry
    from farcast.fleet.summary import summarise
    from farcast.store import PatientStore, open_store

    if find_spec("matplotlib") is None:  # before an hour of training, not after it
        raise MissingDependencyError(
            "The demo draws a plot with matplotlib; install farcast[demo]."
        )
    folder = plan.folder
    began = time.monotonic()
    if _supervise(plan, console) == "stopped":
        console.print(
            f"Stopped in order. Go on with: {options.program()} demo --resume --out {folder.shown}",
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(EXIT_INTERRUPTED)
    # The run is done: an outage now must not cost its summary.
    store = PatientStore(
        open_store(plan.config.store),
        plan.config.train.store_patience,
        wait=_sleep,
        tell=lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True),
    )
    try:
        report = audit_with_progress(store, console)
    except KeyboardInterrupt:
        raise StoppedAtOnceError(
            "Ended while verifying: the run itself is complete; look again with "
            f"`{options.program()} verify --store {plan.config.store}`."
        ) from None
    steps = list(Registry(store).steps(damaged=lambda *_: None))  # the report names them
    events = EventLog(folder.events).read()
    summary = summarise(
        plan.config,
        steps,
        events,
        report,
        link=plan.settings.link,
        seconds=time.monotonic() - began,
    )
    options.write_json(folder.summary, summary)
    options.write_json(json, summary)
    title = f"{summary.run_id} · {summary.model} · {summary.task}"
    plot_run(steps, events, folder.plot, title=title)
    show_summary(summary, console)
    _name_files(plan, console, json)
    if not summary.roots_match or summary.differences:
        raise typer.Exit(EXIT_DIFFERENT)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _supervise(plan: "DemoPlan", console: "Console") -> "Outcome":
    from farcast.dashboard.live import open_view
    from farcast.fleet.claim import claimed
    from farcast.fleet.demo import Supervisor
    from farcast.fleet.launcher import LocalLauncher
    from farcast.fleet.observe import FleetObserver
    from farcast.fleet.registry import Registry
    from farcast.fleet.signals import StopRequest
    from farcast.store import open_store

    config = plan.config
    observer = FleetObserver(Registry(open_store(config.store)))
    title = f"farcast demo · {config.model} · {config.task.name} · {plan.folder.shown}"
    lock = claimed(plan.folder.path / "demo.lock", "demo")
    view = open_view(console, title=title, steps=config.train.steps)
    with lock, StopRequest(asked=lambda: view.urgent(STOPPING)) as stop, view:
        return Supervisor(plan, LocalLauncher(), observer, view).run(stop)


def _name_files(plan: "DemoPlan", console: "Console", json: Path | None) -> None:
    folder = plan.folder
    lines = {
        "summary": folder.summary,
        "plot": folder.plot,
        "steps": folder.metrics,
        "logs": folder.log("trainer").parent,
        "json": json,
    }
    for name, path in lines.items():
        if path is not None:
            console.print(f"{name:>8}  {path}", highlight=False, soft_wrap=True)
    console.print(
        f"{'again':>8}  {options.program()} verify --store {plan.config.store}",
        highlight=False,
        soft_wrap=True,
    )
