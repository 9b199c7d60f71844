"""The figure of `farcast bench wan`. Imports matplotlib, so only a command that draws loads it."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from farcast.bench.wan import WanReport, medians
from farcast.bench.wan_ways import WAYS

_INK = "#1f2933"
_FAINT = "#d5dbe2"
_BLUE, _OTHER, _LIMIT = "#2463a6", "#94a3b8", "#d9730d"


def plot_wan(report: WanReport, path: Path) -> None:
    """Write the figure; the file's suffix chooses PNG, PDF or SVG."""
    figure = Figure(figsize=(11, 3.6), dpi=130, layout=ConstrainedLayoutEngine(w_pad=0.12))
    left, right = figure.subplots(1, 2)
    _bars(
        left,
        f"Published to live on {report.replicas} replicas, seconds",
        list(WAYS),
        [medians(report.hops, way, lambda hop: hop.seconds) for way in WAYS],
        [medians(report.hops, way, lambda hop: hop.limit_seconds) for way in WAYS],
    )
    late = report.late
    _bars(
        right,
        f"Coming {late[0].versions} versions late, seconds",
        [way.way for way in late],
        [way.seconds for way in late],
    )
    figure.savefig(path)


def _bars(
    axis: Axes,
    heading: str,
    names: Sequence[str],
    values: Sequence[float],
    limits: Sequence[float] = (),
) -> None:
    axis.set_title(heading, loc="left", fontsize=11, fontweight="bold", color=_INK, pad=10)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.grid(axis="x", color=_FAINT, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(_FAINT)
    axis.tick_params(colors=_INK, labelsize=9, color=_FAINT)
    places = range(len(names))
    axis.barh(places, values, color=[_BLUE, *[_OTHER] * (len(names) - 1)], height=0.6)
    axis.set_yticks(places, names)
    axis.invert_yaxis()
    axis.set_xlim(min(values) / 3, max(values) * 4)
    for place, value in zip(places, values, strict=True):
        axis.text(value * 1.08, place, f"{value:,.1f}", va="center", fontsize=9, color=_INK)
    if limits:
        lines = [(place - 0.3, place + 0.3) for place in places]
        for at, (low, high) in zip(limits, lines, strict=True):
            axis.plot((at, at), (low, high), color=_LIMIT, linewidth=2)
        axis.plot([], [], color=_LIMIT, linewidth=2, label="what the line allows")
        axis.legend(frameon=False, fontsize=8.5, loc="upper right")
