"""The figure of a run: reward, staleness, changed fraction and compression, per version.

Draws records and events into a PNG. Imports matplotlib, so only commands that draw load it.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from farcast.dashboard.figures import smooth
from farcast.fleet.events import EventKind, FleetEvent
from farcast.fleet.records import StepRecord

_INK = "#1f2933"
_FAINT = "#c8d0d9"
_BLUE = "#2463a6"
_ORANGE = "#d9730d"
_GREEN = "#2f855a"
_PURPLE = "#6b46c1"
_RED = "#c53030"
_EVENT_COLOURS: dict[EventKind, str] = {
    "killed": _RED,
    "failed": _RED,
    "joined": _GREEN,
    "restarted": _GREEN,
    "resumed": _ORANGE,
    "away": _ORANGE,
}

MOST_ROWS = 5
ROW_POINTS = 10
"""From one row of event names to the next."""

_MARGIN = 0.02

_SHARE_OF_A_LETTER = 0.0125
"""Of the width of a panel, at 8 points; measured on wide letters."""


def plot_run(
    steps: Sequence[StepRecord], events: Sequence[FleetEvent], path: Path, *, title: str
) -> None:
    """Write the four panels to `path`."""
    figure_of_run(steps, events, title=title).savefig(path)


def figure_of_run(
    steps: Sequence[StepRecord], events: Sequence[FleetEvent], *, title: str
) -> Figure:
    """The four panels."""
    figure = Figure(
        figsize=(11, 7), dpi=130, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=_INK)
    panels: list[tuple[str, Callable[[Axes, Sequence[StepRecord]], None]]] = [
        ("Reward of the trajectories trained on", _draw_reward),
        ("Staleness of their tokens, in versions", _draw_staleness),
        ("Weights changed from the version before", _draw_changed),
        ("How many times fewer bytes than full copies", _draw_compression),
    ]
    axes = figure.subplots(2, 2, sharex=True)
    newest = max((record.version for record in steps), default=1)
    labels = event_labels(events, newest)
    rows = max((label.row for label in labels), default=0)
    for place, (axis, (heading, draw)) in enumerate(zip(axes.flat, panels, strict=True)):
        _prepare(axis, heading, pad=16 + ROW_POINTS * rows if place < 2 else 16)
        draw(axis, steps)
        _mark_events(axis, events)
    for axis in axes[1]:
        axis.set_xlabel("version", color=_INK)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0, 0].set_xlim(-_MARGIN * newest, (1 + _MARGIN) * newest)
    _name_events(axes[0, 0], labels)
    return figure


def _prepare(axis: Axes, heading: str, *, pad: float) -> None:
    axis.set_title(heading, loc="left", fontsize=10.5, color=_INK, pad=pad)
    axis.grid(axis="y", color=_FAINT, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(_FAINT)
    axis.tick_params(colors=_INK, labelsize=9, color=_FAINT)


def _draw_reward(axis: Axes, steps: Sequence[StepRecord]) -> None:
    trained = [record for record in steps if record.consumed]
    versions = [record.version for record in trained]
    rewards = [record.reward_mean for record in trained]
    window = max(2, len(trained) // 10)
    axis.plot(versions, rewards, "o", markersize=3, color=_BLUE, alpha=0.35, label="one step")
    axis.plot(
        versions,
        smooth(rewards, window=window),
        color=_BLUE,
        linewidth=2,
        label=f"mean of {window} steps",
    )
    axis.margins(y=0.2)
    _legend(axis)


def _draw_staleness(axis: Axes, steps: Sequence[StepRecord]) -> None:
    trained = [record for record in steps if record.consumed]
    versions = [record.version for record in trained]
    most = [record.staleness_max for record in trained]
    axis.plot(versions, most, "o", markersize=3, color=_ORANGE, alpha=0.4, label="oldest token")
    axis.plot(
        versions,
        [record.staleness_mean for record in trained],
        color=_ORANGE,
        linewidth=2,
        label="mean",
    )
    axis.set_ylim(0, max([*most, 1]) * 1.4)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    _legend(axis)


def _draw_changed(axis: Axes, steps: Sequence[StepRecord]) -> None:
    deltas = [record for record in steps if record.version > 0 and record.elements]
    shares = [record.changed / record.elements for record in deltas]
    axis.plot([record.version for record in deltas], shares, color=_PURPLE, linewidth=2)
    axis.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axis.set_ylim(0, 1.1 * max([*shares, 1e-6]))  # a line along the frame would not be seen
    axis.yaxis.set_major_locator(MaxNLocator(nbins=5))


def _draw_compression(axis: Axes, steps: Sequence[StepRecord]) -> None:
    sent = [record for record in steps if record.bytes_sent and record.bytes_full]
    versions = [record.version for record in sent]
    single = [record.bytes_full / record.bytes_sent for record in sent]
    full, moved = accumulate(r.bytes_full for r in sent), accumulate(r.bytes_sent for r in sent)
    so_far = [whole / part for whole, part in zip(full, moved, strict=True)]
    axis.plot(versions, single, "o", markersize=3, color=_GREEN, alpha=0.45, label="one version")
    axis.plot(versions, so_far, color=_GREEN, linewidth=2, label="all so far, anchors included")
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.margins(y=0.15)
    _legend(axis)


def _legend(axis: Axes) -> None:
    """Where it covers the least."""
    axis.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize=8.5, loc="best")


def _marked(events: Sequence[FleetEvent]) -> list[FleetEvent]:
    return [event for event in events if event.kind in _EVENT_COLOURS]


def _mark_events(axis: Axes, events: Sequence[FleetEvent]) -> None:
    for event in _marked(events):
        axis.axvline(
            event.version, color=_EVENT_COLOURS[event.kind], linewidth=1, linestyle=(0, (4, 3))
        )


class EventLabel(NamedTuple):
    """Words above a line; `row` counts up from the frame, `at` is a share of the axis."""

    version: int
    kind: EventKind
    text: str
    row: int
    at: float


def event_labels(events: Sequence[FleetEvent], newest: int) -> list[EventLabel]:
    """Names for the lines, in rows so that none covers another. Those of one kind at one version
    share a name; what finds no room in `MOST_ROWS` rows keeps its line alone."""
    together: dict[tuple[int, EventKind], list[str]] = {}
    for event in _marked(events):
        together.setdefault((event.version, event.kind), []).append(event.who)
    ends = [-1.0] * MOST_ROWS
    labels = []
    for (version, kind), who in sorted(together.items()):
        names = dict.fromkeys(who)
        text = f"{', '.join(names) if len(names) < 4 else len(names)} {kind}"
        at = (max(0, version) / max(1, newest) + _MARGIN) / (1 + 2 * _MARGIN)
        half = len(text) * _SHARE_OF_A_LETTER / 2
        left = min(max(at - half, 0.0), 1 - 2 * half)
        row = next((row for row, end in enumerate(ends) if left > end), None)
        if row is not None:
            ends[row] = left + 2 * half + _SHARE_OF_A_LETTER
            labels.append(EventLabel(version, kind, text, row, left + half))
    return labels


def _name_events(axis: Axes, labels: Sequence[EventLabel]) -> None:
    for label in labels:
        axis.annotate(
            label.text,
            xy=(label.at, 1.0),
            xycoords="axes fraction",
            xytext=(0, 3 + ROW_POINTS * label.row),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=_EVENT_COLOURS[label.kind],
        )
