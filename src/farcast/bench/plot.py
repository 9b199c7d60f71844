"""The figure of a benchmark: bits per changed element over density, and speeds beside memcpy.

Imports matplotlib, so only a command that draws loads it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, NullLocator

from farcast.bench.measure import Row

_INK = "#1f2933"
_FAINT = "#d5dbe2"
_BLUE = "#2463a6"
_OTHERS = ("#d9730d", "#2f855a", "#6b46c1", "#b83280", "#8a6d3b", "#5f6b7a", "#94a3b8")
_OWN = "farcast, digests apart"

_MOST_SHARE = 2.2
"""Writing a few words in place beats copying all of them many times over; that bar is cut."""


def plot_rows(rows: Sequence[Row], path: Path) -> None:
    """Write the figure; the file's suffix chooses PNG, PDF or SVG."""
    figure = Figure(figsize=(13, 7), dpi=130, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_bits(left, rows)
    _draw_speeds(right, rows)
    figure.savefig(path)


def _prepare(axis: Axes, heading: str, grid: Literal["both", "x"]) -> None:
    axis.set_title(heading, loc="left", fontsize=11.5, fontweight="bold", color=_INK, pad=12)
    axis.grid(axis=grid, color=_FAINT, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(_FAINT)
    axis.tick_params(colors=_INK, labelsize=9, color=_FAINT)


def _colours(rows: Sequence[Row]) -> dict[str, str]:
    others = dict.fromkeys(row.coding for row in rows if row.origin != "own")
    return {_OWN: _BLUE} | {name: _OTHERS[i % len(_OTHERS)] for i, name in enumerate(others)}


def _draw_bits(axis: Axes, rows: Sequence[Row]) -> None:
    """Lines over the synthetic densities; recorded hops as dots of the same colour."""
    _prepare(axis, "Bits per changed element", "both")
    for name, colour in _colours(rows).items():
        line = sorted((r for r in rows if (r.coding, r.data) == (name, "synthetic")), key=_density)
        real = [row for row in rows if row.coding == name and is_recorded(row)]
        own, label = name == _OWN, "farcast" if name == _OWN else name
        if line:
            axis.plot(
                *_points(line),
                color=colour,
                linewidth=2.8 if own else 1.4,
                zorder=4 if own else 3,
                label=label,
            )
        if real:
            axis.plot(
                *_points(real),
                "o",
                markersize=5.5,
                color=colour,
                markeredgecolor="white",
                markeredgewidth=0.7,
                zorder=5,
                label=None if line else label,
            )
    _draw_bounds(axis, rows)
    _scale_bits(axis)


def _points(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [100 * row.density for row in rows], [row.bits_per_changed for row in rows]


def _draw_bounds(axis: Axes, rows: Sequence[Row]) -> None:
    line = sorted((r for r in rows if (r.coding, r.data) == (_OWN, "synthetic")), key=_density)
    density = [100 * row.density for row in line]
    axis.plot(
        density,
        [row.bound_independent_bits for row in line],
        color=_INK,
        linewidth=1,
        linestyle=(0, (1, 2)),
        label="bound, independent positions",
    )
    axis.plot(
        density,
        [row.bound_bits for row in line],
        color=_INK,
        linewidth=1.2,
        linestyle=(0, (5, 2)),
        zorder=6,
        label="bound, positions given the old exponent",
    )


def _scale_bits(axis: Axes) -> None:
    axis.set_xscale("log")
    axis.set_xlabel("changed elements (lines: synthetic steps, dots: recorded hops)", color=_INK)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.legend(frameon=False, fontsize=8, ncols=2, loc="upper left", bbox_to_anchor=(-0.02, -0.12))


def _draw_speeds(axis: Axes, rows: Sequence[Row]) -> None:
    """Encode and decode as shares of memcpy, on the last recorded hop."""
    recorded = [row for row in rows if is_recorded(row)]
    if not recorded:
        return
    last = recorded[-1]
    shown = [row for row in recorded if (row.data, row.hop) == (last.data, last.hop)][::-1]
    _prepare(axis, f"Speed on one core, {last.data} {last.hop}", "x")
    limit = min(_MOST_SHARE, 1.4 * max(1.0, *(row.decode_of_memcpy for row in shown)))
    axis.set_xlim(0, limit)
    axis.axvline(1, color=_INK, linewidth=1, linestyle=(0, (5, 2)), zorder=1)
    colours = {**_colours(rows), "farcast": "#7fa8d6"}
    for at, row in enumerate(shown):
        colour = colours[row.coding]
        _bar(axis, at + 0.2, row.encode_of_memcpy, colour, 1.0, f"encode {row.encode_gb_s:.2f}")
        _bar(axis, at - 0.2, row.decode_of_memcpy, colour, 0.5, f"decode {row.decode_gb_s:.2f}")
    axis.set_yticks(range(len(shown)), [_broken(row.coding) for row in shown], fontsize=8.5)
    axis.set_xlabel(
        f"share of a memcpy of the served bytes (dashed, {last.memcpy_gb_s:.1f} GB/s)", color=_INK
    )


def _bar(axis: Axes, at: float, share: float, colour: str, alpha: float, words: str) -> None:
    """One bar with its speed; what leaves the axis is marked as cut."""
    limit = axis.get_xlim()[1]
    axis.barh(at, share, height=0.36, color=colour, alpha=alpha, zorder=2)
    cut = share > 0.72 * limit
    axis.text(
        0.98 * limit if cut else share + 0.01 * limit,
        at,
        f"{words} GB/s" + (" →" if share > limit else ""),
        ha="right" if cut else "left",
        va="center",
        fontsize=7.5,
        color=_INK,
        zorder=4,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6},
    )


def is_recorded(row: Row) -> bool:
    return row.data not in ("synthetic", "anchor") and " as " not in row.data


def _density(row: Row) -> float:
    return row.density


def _broken(name: str) -> str:
    """A long name on two lines, its bracket on the second."""
    return name.replace(" (", "\n(")
