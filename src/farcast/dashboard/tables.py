"""The parts of the live view and of `farcast status`, each as wide as the terminal lets it be.

A part that has too little room leaves out whole columns, the least telling first, and never cuts a
figure. Only names and the words of events are shortened.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
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

LEAST_NAME = 12
"""Characters that a replica's name keeps however narrow the terminal is: its ends, where hosts and
pods differ."""

MAX_NAME = 48

MAX_EVENT = 160
"""Characters of an event that are shown; the event log keeps all."""

SIDE_BY_SIDE = 140
"""Columns from which the policy and the replicas stand beside each other."""

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


class Fitted:
    """Drawn anew for the columns that there are."""

    def __init__(self, draw: Callable[[int], RenderableType]) -> None:
        self._draw = draw

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._draw(options.max_width)


def overview(
    steps: Sequence[StepRecord], snapshot: FleetSnapshot, *, killed: set[str]
) -> RenderableType:
    """Policy and replicas: beside each other on a wide terminal, else one below the other."""

    def draw(width: int) -> RenderableType:
        policy, replicas = policy_table(steps), replica_table(snapshot, killed=killed)
        grid = Table.grid(expand=True)
        if width >= SIDE_BY_SIDE:
            grid.add_column(width=width * 2 // 5)
            grid.add_column(ratio=1)
            grid.add_row(policy, replicas)
        else:
            grid.add_column()
            grid.add_row(policy)
            grid.add_row("")
            grid.add_row(replicas)
        return grid

    return Fitted(draw)


def progress_line(step: int, steps: int, elapsed: float, remaining: float | None) -> RenderableType:
    """A bar; the seconds so far, and about how many more where that can be told."""
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    more = "" if remaining is None else f", about {human_seconds(round(remaining))} left"
    grid.add_row(
        Text(f"step {step} of {steps}", style="bold"),
        ProgressBar(total=steps, completed=step, complete_style="cyan", finished_style="green"),
        Text(f"{human_seconds(elapsed)}{more}", style="dim"),
    )
    return grid


def policy_table(steps: Sequence[StepRecord]) -> RenderableType:
    """Reward, loss and what the versions cost, for the newest step."""
    trained = [record for record in steps if record.consumed]
    rewards = [record.reward_mean for record in trained]
    newest = trained[-1] if trained else steps[-1]
    sent = sum(record.bytes_sent for record in steps)
    full = sum(record.bytes_full for record in steps)
    changed = newest.changed / newest.elements if newest.elements else 0.0
    blocked = human_seconds(sum(record.blocked_seconds for record in steps))
    waited = human_seconds(sum(record.waited_seconds for record in steps))
    tokens = human_count(sum(record.tokens for record in steps))

    def draw(width: int) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column()
        grid.add_row("reward", _reward(rewards, max(8, min(64, width - 38))))
        grid.add_row("loss", f"{signed(newest.loss)}, {changed:.3%} of the weights changed")
        grid.add_row(
            "staleness", f"mean {newest.staleness_mean:.1f}, most {newest.staleness_max} versions"
        )
        grid.add_row("step", f"{human_seconds(newest.step_seconds)}, {tokens} tokens so far")
        grid.add_row("in all", f"{blocked} blocked by publishing, {waited} waiting")
        grid.add_row(
            "sent",
            f"{human_bytes(sent)}, full copies {human_bytes(full)} ({times(full, sent)} less)",
        )
        return grid

    return Fitted(draw)


def _reward(rewards: Sequence[float], width: int) -> Text:
    """The moving mean, and the way there with the range that its blocks stand for."""
    if not rewards:
        return Text("-")
    text = Text(f"{smooth(rewards, window=SMOOTHING)[-1]:.3f}", style="bold green")
    text.append(f"  {spark(rewards, width=width)}", style="green")
    text.append(f"  {min(rewards):.2f} to {max(rewards):.2f}", style="not bold dim")
    return text


class _Column(NamedTuple):
    heading: str
    right: bool
    cells: list[Text]

    @property
    def width(self) -> int:
        return max(len(self.heading), *(len(cell) for cell in self.cells))


_NAME = "replica"
_LEAST_TELLING_FIRST = ("pause", "saved", "trajs", "fetched", "tok/s")


def replica_table(snapshot: FleetSnapshot, *, killed: set[str]) -> RenderableType:
    """Each replica: what it serves, how far behind, how fast, how many trajectories it sent, what
    it fetched, how many times less than full copies that is, and how long the last commit paused
    its sampling."""
    names = sorted(snapshot.replicas)
    columns = _columns(snapshot, names, killed)

    def draw(width: int) -> RenderableType:
        held = dict(columns)
        wanted = min(max(len(_NAME), *map(len, names)), MAX_NAME) if names else 0

        def room() -> int:
            return width - sum(column.width + 1 for column in held.values()) - 1

        for heading in _LEAST_TELLING_FIRST:
            if room() < min(wanted, LEAST_NAME):
                del held[heading]
        gap = 2 if room() >= wanted + len(held) else 1
        return _laid_out(names, held, max(LEAST_NAME, min(wanted, room())), gap)

    return Fitted(draw)


def _columns(snapshot: FleetSnapshot, names: list[str], killed: set[str]) -> dict[str, _Column]:
    headings = ("state", "version", "tok/s", "trajs", "fetched", "saved", "pause")
    columns = {heading: _Column(heading, heading != "state", []) for heading in headings}
    for name in names:
        record = snapshot.replicas[name].record
        state = "killed" if name in killed else _state(snapshot, name)
        gone = name in killed or snapshot.life(name) in ("dead", "left")
        behind = 0 if gone else snapshot.staleness(name) or 0
        version = str(record.version) if record.version >= 0 else "-"
        cells = (
            Text(state, style=_STATE_STYLE[state.split()[0]]),
            Text(f"{version} (-{behind})" if behind else version),
            Text("-" if gone else human_count(record.tokens_per_second)),
            Text(human_count(record.trajectories)),
            Text(human_bytes(record.bytes_fetched)),
            Text(times(record.bytes_full, record.bytes_fetched)),
            Text(human_seconds(record.commit_seconds)),
        )
        for heading, cell in zip(headings, cells, strict=True):
            columns[heading].cells.append(cell)
    return columns


def _laid_out(names: list[str], columns: dict[str, _Column], name_width: int, gap: int) -> Table:
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="dim", pad_edge=False)
    table.add_column(_NAME, no_wrap=True)
    for column in columns.values():
        table.add_column(column.heading, justify="right" if column.right else "left", no_wrap=True)
    for row, name in enumerate(names):
        cells = [column.cells[row] for column in columns.values()]
        table.add_row(shortened(name, name_width), *cells)
    return table


def _state(snapshot: FleetSnapshot, name: str) -> str:
    """What a replica says of itself, or since when it says nothing."""
    if snapshot.silent(name):
        return f"{snapshot.life(name)} {human_age(snapshot.age(name))}"
    return snapshot.replicas[name].record.state


def events_table(events: Sequence[FleetEvent], *, now: float) -> Table:
    """What happened, when and at which step; long words go on below their own beginning."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", justify="right", no_wrap=True)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for event in events:
        ago = human_age(max(0.0, now - event.at))
        words = Text(shortened(str(event), MAX_EVENT), style=_EVENT_STYLE.get(event.kind, ""))
        grid.add_row(f"{ago} ago", f"step {event.step}", words)
    return grid
