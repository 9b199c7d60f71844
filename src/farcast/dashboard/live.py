"""The live view of a run, and its plain twin for pipes and logs.

Both take what the supervisor hands them (`note`, `event`, `show`) and only draw. Refuses to
look anything up: what is not in the snapshot is not shown.
"""

import time
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from farcast.dashboard.figures import human_bytes, human_seconds, signed
from farcast.dashboard.tables import (
    events_table,
    overview,
    policy_table,
    progress_line,
)
from farcast.fleet.events import FleetEvent
from farcast.fleet.observe import FleetSnapshot
from farcast.fleet.records import StepRecord
from farcast.fleet.signals import announce

HINT = "Ctrl-C stops in order"

EVENTS = 5
"""The newest that are shown."""


class LiveView:
    """A full-screen-width panel that redraws in place. Use as a context manager."""

    def __init__(self, console: Console, *, title: str, steps: int) -> None:
        self._title = title
        self._steps = steps
        self._note = "starting"
        self._urgent = ""
        self._from: tuple[int, float] | None = None
        """The step and the time when this sitting first saw one."""
        self._events: list[FleetEvent] = []
        self._snapshot: FleetSnapshot | None = None
        self._began = time.monotonic()
        self._live = Live(console=console, get_renderable=self.__rich__, refresh_per_second=4)

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

    def urgent(self, text: str) -> None:
        """What a person should see at once and until the end. Takes no lock, so that a signal's
        handler may call it; the next refresh shows it, which does not wait for the supervisor."""
        self._urgent = text

    def event(self, event: FleetEvent) -> None:
        self._events.append(event)

    def show(self, snapshot: FleetSnapshot) -> None:
        self._snapshot = snapshot
        if self._from is None and snapshot.steps:
            self._from = (snapshot.step, time.monotonic())

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = []
        snapshot = self._snapshot
        if self._urgent:
            parts.append(Text(self._urgent, style="bold yellow"))
        if self._note:
            parts.append(Text(f"{self._note} …", style="yellow"))
        if snapshot is not None and snapshot.steps:
            parts += [self._progress(snapshot.step), Text()]
        if snapshot is not None and snapshot.replicas and snapshot.steps:
            killed = {event.who for event in self._events if event.kind == "killed"}
            parts.append(overview(snapshot.steps, snapshot, killed=killed))
        elif snapshot is not None and snapshot.steps:
            parts.append(policy_table(snapshot.steps))
        if self._events:
            parts += [Text(), events_table(self._events[-EVENTS:], now=time.time())]
        return Panel(
            Group(*parts),
            title=self._title,
            title_align="left",
            subtitle=None if self._urgent else HINT,
            subtitle_align="right",
            border_style="blue",
        )

    def _progress(self, step: int) -> RenderableType:
        """The rest is told from the steps of this sitting: the first one also starts processes."""
        now, remaining = time.monotonic(), None
        if self._from is not None and step > self._from[0] and not self._urgent:
            each = (now - self._from[1]) / (step - self._from[0])
            remaining = each * (self._steps - step) or None
        return progress_line(step, self._steps, now - self._began, remaining)


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
        if text and text != self._note:
            self._line(text)
        self._note = text

    def urgent(self, text: str) -> None:
        announce(text)

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
