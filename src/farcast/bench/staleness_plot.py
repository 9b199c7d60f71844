"""The figure of the staleness comparison. Imports matplotlib, so only a command that draws
loads it."""

from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from farcast.bench.staleness import CORRECTIONS, Way
from farcast.bench.staleness_report import WAYS, StalenessReport, rewards

_INK = "#1f2933"
_FAINT = "#d5dbe2"
_COLOURS = ("#5f6b7a", "#2463a6", "#d9730d", "#2f855a", "#6b46c1")


def plot_staleness(report: StalenessReport, path: Path) -> None:
    """Write the figure; the file's suffix chooses PNG, PDF or SVG."""
    figure = Figure(figsize=(11, 4.6), dpi=130, layout=ConstrainedLayoutEngine(w_pad=0.12))
    axes = figure.subplots(1, len(WAYS), sharey=True)
    for axis, (way, heading) in zip(axes, WAYS.items(), strict=True):
        _draw(axis, report, way, heading)
    axes[0].set_ylabel("reward of the final policy", color=_INK)
    axes[0].legend(frameon=False, fontsize=8.5, loc="lower left")
    figure.savefig(path)


def _draw(axis: Axes, report: StalenessReport, way: Way, heading: str) -> None:
    axis.set_title(heading, loc="left", fontsize=10, fontweight="bold", color=_INK, pad=10)
    axis.grid(axis="y", color=_FAINT, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(_FAINT)
    axis.tick_params(colors=_INK, labelsize=9, color=_FAINT)
    axis.set_xlabel("versions", color=_INK)
    axis.set_ylim(bottom=0)
    ages = sorted({o.staleness for o in report.outcomes if o.way == way})
    axis.set_xticks(ages)
    for colour, (name, correction) in zip(_COLOURS, CORRECTIONS.items(), strict=True):
        columns = [(age, rewards(report.outcomes, name, way, age)) for age in ages]
        columns = [(age, values) for age, values in columns if values]
        if not columns:
            continue
        xs = [age for age, _ in columns]
        axis.fill_between(
            xs,
            [min(values) for _, values in columns],
            [max(values) for _, values in columns],
            color=colour,
            alpha=0.12,
            linewidth=0,
        )
        means = [fmean(values) for _, values in columns]
        axis.plot(xs, means, color=colour, marker="o", markersize=4, label=correction.title)
