"""The live view of a run, and its plain twin for pipes and logs.

Both take what the supervisor hands them (`note`, `event`, `show`) and only draw. Refuses to
look anything up: what is not in the snapshot is not shown.
"""

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from farcast.dashboard.figures import (
    human_age,
    human_bytes,
    human_count,
    human_seconds,
    shortened,
    signed,
    smooth,
    spark,
    times,
)
from farcast.fleet.events import FleetEvent
from farcast.fleet.observe import FleetSnapshot
from farcast.fleet.records import StepRecord

SMOOTHING = 5
"""Steps in the moving mean of the reward: one group of prompts is a noisy sample."""

MAX_NAME = 22
"""Characters of a replica's name that are shown: its ends, where hosts and pods differ."""

MAX_EVENT = 160
"""Characters of an event that are shown; the event log keeps all."""

_STATE_STYLE = {
    "serving": "green",
    "staging": "cyan",
    "joining": "yellow",
    "waiting": "yellow",
    "draining": "yellow",
    "stopped": "dim",
    "failed": "red",
    "killed": "red",
    "silent": "yellow",
    "dead": "red",
}
_EVENT_STYLE = {
    "killed": "red",
    "failed": "red",
    "away": "red",
    "joined": "green",
    "restarted": "yellow",
    "back": "green",
}


class LiveView:
    """A full-screen-width panel that redraws in place. Use as a context manager."""

    def __init__(self, console: Console, *, title: str, steps: int) -> None:
        self._title = title
        self._steps = steps
        self._note = "starting"
        self._events: list[FleetEvent] = []
        self._snapshot: FleetSnapshot | None = None
        self._began = time.monotonic()
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=4)

    def __enter__(self) -> "LiveView":
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def note(self, text: str) -> None:
        self._note = text

    def event(self, event: FleetEvent) -> None:
        self._events.append(event)

    def show(self, snapshot: FleetSnapshot) -> None:
        self._snapshot = snapshot

    def _draw(self) -> RenderableType:
        elapsed = time.monotonic() - self._began
        parts: list[RenderableType] = []
        snapshot = self._snapshot
        if snapshot is None or not snapshot.steps:
            parts.append(Text(f"{self._note} …", style="yellow"))
        else:
            parts += [
                progress_line(snapshot.step, self._steps, elapsed),
                Text(),
                policy_table(snapshot.steps),
            ]
        if snapshot is not None and snapshot.replicas:
            killed = {event.who for event in self._events if event.kind == "killed"}
            parts += [Text(), replica_table(snapshot, killed=killed)]
        if self._events:
            parts += [Text(), events_text(self._events[-5:], now=time.time())]
        return Panel(Group(*parts), title=self._title, title_align="left", border_style="blue")


class PlainView:
    """One line per step and per event: for a pipe, a log file or a terminal without cursor."""

    def __init__(self, console: Console, *, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._note = ""
        self._shown = -1

    def __enter__(self) -> "PlainView":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def note(self, text: str) -> None:
        if text != self._note:
            self._note = text
            self._line(text)

    def event(self, event: FleetEvent) -> None:
        self._line(f"-- {event}")

    def show(self, snapshot: FleetSnapshot) -> None:
        for record in snapshot.steps:
            if record.version > self._shown:
                self._shown = record.version
                self._line(step_line(record, self._steps))

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def open_view(console: Console, *, title: str, steps: int) -> LiveView | PlainView:
    """The live view where the terminal can show it, else the plain one."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveView(console, title=title, steps=steps)
    return PlainView(console, steps=steps)


def step_line(record: StepRecord, steps: int) -> str:
    """A step in one line of text."""
    sent = f"sent {human_bytes(record.bytes_sent)} of {human_bytes(record.bytes_full)}"
    if not record.consumed:
        return f"step {record.step:>4}/{steps}  version {record.version:>4}  {sent}"
    changed = record.changed / record.elements if record.elements else 0.0
    return (
        f"step {record.step:>4}/{steps}  version {record.version:>4}  "
        f"reward {record.reward_mean:6.3f}  loss {signed(record.loss)}  "
        f"stale {record.staleness_mean:.1f}/{record.staleness_max}  "
        f"changed {changed:7.3%}  {sent}  "
        f"took {human_seconds(record.step_seconds)}  "
        f"blocked {human_seconds(record.blocked_seconds)}"
    )


def progress_line(step: int, steps: int, elapsed: float) -> RenderableType:
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    grid.add_row(
        Text(f"step {step} of {steps}", style="bold"),
        ProgressBar(total=steps, completed=step),
        Text(human_seconds(elapsed), style="dim"),
    )
    return grid


def policy_table(steps: Sequence[StepRecord]) -> Table:
    """Reward, loss and what the versions cost, for the newest step."""
    trained = [record for record in steps if record.consumed]
    rewards = [record.reward_mean for record in trained]
    newest = trained[-1] if trained else steps[-1]
    sent = sum(record.bytes_sent for record in steps)
    full = sum(record.bytes_full for record in steps)
    changed = newest.changed / newest.elements if newest.elements else 0.0
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    reward = f"{smooth(rewards, window=SMOOTHING)[-1]:.3f}  {spark(rewards)}" if rewards else "-"
    grid.add_row("reward", Text(reward, style="bold green"))
    grid.add_row("loss", f"{signed(newest.loss)}, {changed:.3%} of the weights changed")
    grid.add_row(
        "staleness", f"mean {newest.staleness_mean:.1f}, most {newest.staleness_max} versions"
    )
    grid.add_row(
        "step",
        f"{human_seconds(newest.step_seconds)}, in all "
        f"{human_seconds(sum(r.blocked_seconds for r in steps))} blocked by publishing, "
        f"{human_seconds(sum(r.waited_seconds for r in steps))} waiting",
    )
    grid.add_row(
        "sent",
        f"{human_bytes(sent)}, full copies {human_bytes(full)} ({times(full, sent)} less), "
        f"{human_count(sum(r.tokens for r in steps))} tokens trained",
    )
    return grid


def replica_table(snapshot: FleetSnapshot, *, killed: set[str]) -> Table:
    """Each replica: what it serves, how far behind, how fast, what it moved. In 80 columns."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("replica", overflow="ellipsis")  # the one that gives way
    table.add_column("state", no_wrap=True)
    for heading in ("version", "tok/s", "sent", "fetched", "less", "pause"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, (record, _) in sorted(snapshot.replicas.items()):
        state = "killed" if name in killed else _state(snapshot, name)
        gone = name in killed or snapshot.life(name) in ("dead", "left")
        behind = 0 if gone else snapshot.staleness(name) or 0
        version = str(record.version) if record.version >= 0 else "-"
        table.add_row(
            shortened(name, MAX_NAME),
            Text(state, style=_STATE_STYLE[state.split()[0]]),
            f"{version} (-{behind})" if behind else version,
            "-" if gone else human_count(record.tokens_per_second),
            human_count(record.trajectories),
            human_bytes(record.bytes_fetched),
            times(record.bytes_full, record.bytes_fetched),
            human_seconds(record.commit_seconds),
        )
    return table


def _state(snapshot: FleetSnapshot, name: str) -> str:
    """What a replica says of itself, or since when it says nothing."""
    if snapshot.silent(name):
        return f"{snapshot.life(name)} {human_age(snapshot.age(name))}"
    return snapshot.replicas[name].record.state


def events_text(events: Sequence[FleetEvent], *, now: float) -> Text:
    text = Text()
    for event in events:
        ago = human_seconds(max(0.0, round(now - event.at)))
        text.append(f"{ago:>8} ago  step {event.step:>3}  ", style="dim")
        text.append(f"{str(event)[:MAX_EVENT]}\n", style=_EVENT_STYLE.get(event.kind, ""))
    text.rstrip()
    return text
