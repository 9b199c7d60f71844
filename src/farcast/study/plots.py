"""A figure's plot. Imports matplotlib, so only a command that draws loads it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from farcast.study.rows import FigureRecord, Row
from farcast.study.settings import STAGES
from farcast.study.tables import OPTIMIZER_TITLES, factor, mean, percent, series, steady

_INK = "#1f2933"
_FAINT = "#d5dbe2"
_COLOURS = (
    "#2463a6",
    "#d9730d",
    "#2f855a",
    "#6b46c1",
    "#b83280",
    "#8a6d3b",
    "#0e8a9a",
    "#c53030",
    "#5f6b7a",
    "#94a3b8",
)
_DASHED = (0, (4, 2))
_WINDOW = 8


def plot(record: FigureRecord, path: Path) -> None:
    """Write the figure's plot whole; the file's suffix chooses PNG, PDF or SVG. Panels stand two in
    a row: three would be too small to read where a page shows them 900 pixels wide."""
    panels, draw = _PLOTS[record.figure]
    rows = (panels + 1) // 2
    figure = Figure(
        figsize=(11.5, 4.6 * rows), dpi=130, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    )
    axes = list(figure.subplots(rows, 2, squeeze=False).flat)
    for unused in axes[panels:]:
        unused.remove()
    draw(axes[:panels], record)
    part = path.with_name(path.name + ".part")
    figure.savefig(part, format=path.suffix.removeprefix("."))
    part.replace(path)


def _prepare(axis: Axes, heading: str, x: str, y: str = "") -> None:
    axis.set_title(heading, loc="left", fontsize=10.5, fontweight="bold", color=_INK, pad=10)
    axis.grid(color=_FAINT, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(_FAINT)
    axis.tick_params(colors=_INK, labelsize=9, color=_FAINT)
    axis.set_xlabel(x, color=_INK)
    axis.set_ylabel(y, color=_INK)


def _percents(axis: Axes, *, log: bool) -> None:
    if log:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator())
        axis.yaxis.set_minor_locator(NullLocator())
    else:
        axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))


def _log(axis: Axes) -> None:
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _powers(axis: Axes) -> None:
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator())
    axis.xaxis.set_minor_locator(NullLocator())


def _legend(axis: Axes, **where: object) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=8, **where)


def _legend_beside(axes: list[Axes]) -> None:
    """One for all panels, right of the last."""
    handles, labels = axes[0].get_legend_handles_labels()
    where = {"loc": "upper left", "bbox_to_anchor": (1, 1)}
    axes[-1].legend(handles, labels, frameon=False, fontsize=8, **where)


def _line(axis: Axes, rows: Sequence[Row], *, x: Callable[[Row], float], **style: object) -> None:
    """Changed as dots on a line, predicted dashed."""
    axis.plot([x(r) for r in rows], [r.changed_fraction for r in rows], **style)  # type: ignore[arg-type]
    told = [r for r in rows if r.predicted_fraction is not None]
    axis.plot(
        [x(r) for r in told],
        [r.predicted_fraction or 0.0 for r in told],
        linestyle=_DASHED,
        linewidth=1.1,
        color=style["color"],
    )


def _law(axes: list[Axes], record: FigureRecord) -> None:
    cases = (("adamw", "spread"), ("muon", "spread"), ("adamw", "fresh"))
    headings = ("AdamW", "Muon, RMS-matched", "AdamW, masters fresh from a checkpoint")
    top = max(max(r.changed_fraction, r.predicted_fraction or 0) for r in record.rows if r.step > 1)
    for axis, case, heading in zip(axes, cases, headings, strict=True):
        _prepare(axis, heading, "step", "weights changed (dashed: predicted)")
        rows = [r for r in record.rows if (r.optimizer, r.masters) == case]
        for colour, line in zip(_COLOURS, series(rows, lambda r: r.lr), strict=False):
            label = f"rate {line[0].lr:g}"
            style = {"color": colour, "marker": "o", "markersize": 3, "linewidth": 1.4}
            _line(axis, line, x=lambda r: r.step, label=label, **style)
        _percents(axis, log=False)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylim(0, 1.2 * top)
        _legend(axis, loc="upper left")


def _where(axes: list[Axes], record: FigureRecord) -> None:
    kinds, layers, exponents = (
        [r for r in record.rows if r.group.startswith(f"{part}=")]
        for part in ("kind", "layer", "exponent")
    )
    _prepare(axes[0], "By kind of tensor", "", "weights changed (hollow: predicted)")
    names = [row.group.partition("=")[2] for row in kinds]
    axes[0].bar(names, [row.changed_fraction for row in kinds], color=_COLOURS[0], width=0.6)
    told = [row.predicted_fraction or 0.0 for row in kinds]
    axes[0].bar(names, told, fill=False, edgecolor=_INK, width=0.72, linewidth=1)
    _percents(axes[0], log=False)
    style = {"color": _COLOURS[0], "marker": "o", "markersize": 4, "linewidth": 1.4}
    _prepare(axes[1], "By layer", "layer", "weights changed (dashed: predicted)")
    by_layer = sorted(layers, key=_number)
    _line(axes[1], by_layer, x=_number, **style)
    axes[1].margins(y=0.15)
    axes[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    _percents(axes[1], log=False)
    _prepare(
        axes[2], "By exponent of the weight", "exponent", "weights changed (dashed: predicted)"
    )
    total = sum(row.weights for row in exponents)
    shown = [r for r in exponents if r.weights >= 100 and r.changed_fraction > 0]
    _line(axes[2], shown, x=_number, **style)
    axes[2].bar(
        [_number(r) for r in shown],
        [r.weights / total for r in shown],
        color=_FAINT,
        width=0.8,
        zorder=0,
        label="share of the weights",
    )
    _percents(axes[2], log=True)
    _legend(axes[2], loc="upper right")


def _number(row: Row) -> float:
    return float(row.group.partition("=")[2])


def _over_rates(
    axes: list[Axes], record: FigureRecord, key: Callable[[Row], str], titles: Callable[[str], str]
) -> None:
    _prepare(
        axes[0],
        "Weights changed by a step",
        "learning rate",
        "weights changed (dashed: predicted)",
    )
    _prepare(axes[1], "Full copy / delta", "learning rate", "times smaller")
    for colour, rows in zip(_COLOURS, series(record.rows, key), strict=False):
        style = {"color": colour, "marker": "o", "markersize": 3.5, "linewidth": 1.4}
        shown = [r for r in rows if r.changed_fraction]
        _line(axes[0], shown, x=lambda r: r.lr, label=titles(key(rows[0])), **style)
        found = [(r.lr, times) for r in rows if (times := factor(r)) is not None]
        xs, ys = [x for x, _ in found], [y for _, y in found]
        axes[1].plot(xs, ys, **style)  # type: ignore[arg-type]
    _percents(axes[0], log=True)
    _log(axes[1])
    axes[1].axhline(1, color=_INK, linewidth=0.8, linestyle=_DASHED)
    for axis in axes:
        _powers(axis)
    _legend_beside(axes)


def _optimizers(axes: list[Axes], record: FigureRecord) -> None:
    _over_rates(axes, record, lambda r: r.optimizer, lambda name: OPTIMIZER_TITLES[name])


def _formats(axes: list[Axes], record: FigureRecord) -> None:
    _over_rates(axes, record, lambda r: r.format, lambda name: name)


def _scales(axes: list[Axes], record: FigureRecord) -> None:
    _prepare(axes[0], "Delta, step by step", "step", "bytes for a weight")
    _prepare(axes[1], "Full copy / delta (with the scales that moved in a step)", "times smaller")
    lines = series(record.rows, lambda r: r.format)
    for at, rows in enumerate(lines):
        style = _policy_style(rows[0].format)
        xs = [r.step for r in rows]
        axes[0].plot(xs, [(r.bytes or 0) / r.weights for r in rows], **style)  # type: ignore[arg-type]
        kept = steady(rows, record.settings.warmup)
        smaller = mean(factor(r) for r in kept) or 0.0
        axes[1].barh(len(lines) - at, smaller, color=style["color"], height=0.7)
        moved = _moved(mean(r.scales_changed for r in kept))
        axes[1].text(smaller, len(lines) - at, f" {moved}", va="center", fontsize=8, color=_INK)
    axes[1].set_yticks(range(len(lines), 0, -1), [rows[0].format for rows in lines], fontsize=8)
    axes[1].grid(visible=False, axis="y")
    axes[1].margins(x=0.15)
    _log(axes[0])
    axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    for stroke, label in (
        ("-", "exact scales"),
        (_DASHED, "powers of two"),
        (":", "sticky scales"),
    ):
        axes[0].plot([], [], color=_INK, linestyle=stroke, label=label)
    _legend_beside(axes)


def _moved(share: float | None) -> str:
    """Beside a bar five digits of next to nothing would only be noise; the table has them."""
    return "< 0.01 %" if share is not None and 0 < share < 1e-4 else percent(share)


def _policy_style(name: str) -> dict[str, object]:
    """A colour for each format, a stroke for its policy."""
    base = name.partition("-")[0].removesuffix("_pow2")
    order = ("fp8_block", "fp8_channel", "int8", "int4_g32", "nvfp4", "mxfp4")
    colour = _COLOURS[order.index(base)] if base in order else _INK
    stroke = _DASHED if "_pow2" in name or base == "mxfp4" else ":" if "-" in name else "-"
    return {"color": colour, "linestyle": stroke, "linewidth": 1.5}


def _lag(axes: list[Axes], record: FigureRecord) -> None:
    formats = list(dict.fromkeys(row.format for row in record.rows))
    for axis, name in zip(axes, formats, strict=False):
        _prepare(axis, name, "versions behind", "bytes, of an anchor's")
        rows = [row for row in record.rows if row.format == name]
        for colour, line in zip(_COLOURS, series(rows, lambda r: r.lr), strict=False):
            xs = [r.lag for r in line]
            style = {"color": colour, "marker": "o", "markersize": 3.5, "linewidth": 1.4}
            one = [(r.bytes or 0) / (r.bytes_anchor or 1) for r in line]
            chain = [(r.bytes_chain or 0) / (r.bytes_anchor or 1) for r in line]
            axis.plot(xs, one, label=f"one delta, rate {line[0].lr:g}", **style)  # type: ignore[arg-type]
            axis.plot(
                xs,
                chain,
                color=colour,
                linestyle=_DASHED,
                linewidth=1.1,
                label=f"chain, rate {line[0].lr:g}",
            )
        axis.axhline(1, color=_INK, linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        _percents(axis, log=True)
    _legend(axes[0], loc="upper left", bbox_to_anchor=(0, 0.94))


def _stages(axes: list[Axes], record: FigureRecord) -> None:
    rows = [r for r in record.rows if r.loop == "replay" and r.predicted_fraction is not None]
    formats = list(dict.fromkeys(row.format for row in rows))
    stages = [name for name in STAGES if any(row.stage == name for row in rows)]
    width = 0.8 / max(len(formats), 1)
    _prepare(axes[0], "Weights changed by a step (hollow: predicted)", "")
    _prepare(axes[1], "Full copy / delta", "")
    for place, (colour, name) in enumerate(zip(_COLOURS, formats, strict=False)):
        found = [[r for r in rows if (r.stage, r.format) == (s, name)] for s in stages]
        at = [i + (place - (len(formats) - 1) / 2) * width for i in range(len(stages))]
        changed = [mean(r.changed_fraction for r in part) or 0.0 for part in found]
        told = [mean(r.predicted_fraction for r in part) or 0.0 for part in found]
        axes[0].bar(at, changed, width=0.85 * width, color=colour, label=name)
        axes[0].bar(at, told, width=width, fill=False, edgecolor=_INK, linewidth=0.8)
        axes[1].bar(
            at, [mean(factor(r) for r in part) or 0.0 for part in found], 0.85 * width, color=colour
        )
    _percents(axes[0], log=True)
    _log(axes[1])
    axes[1].axhline(1, color=_INK, linewidth=0.8, linestyle=_DASHED)
    names = [
        fill(STAGES[s].title, 12, break_on_hyphens=False) + f"\n{STAGES[s].lr:g}" for s in stages
    ]
    for axis in axes:
        axis.set_xticks(range(len(stages)), names, fontsize=7)
    _legend_beside(axes)


def _sticky(axes: list[Axes], record: FigureRecord) -> None:
    """Means of as many steps, since 4-bit formats change few codes at a time."""
    _prepare(axes[0], f"Weights changed by a step, mean of {_WINDOW}", "step")
    _prepare(axes[1], "Delta, of plain rounding's", "step")
    lines = series((r for r in record.rows if r.loop == "replay"), lambda r: r.format)
    plain = {rows[0].format: rows for rows in lines if "-" not in rows[0].format}
    for colour, rows in zip(_COLOURS, lines, strict=False):
        name = rows[0].format
        style = {"color": colour, "linewidth": 1.4, "label": name}
        steps = [row.step for row in rows][_WINDOW - 1 :]
        axes[0].plot(steps, _moving([r.changed_fraction for r in rows]), **style)  # type: ignore[arg-type]
        base = plain[name.partition("-")[0]]
        if base is not rows:
            pairs = zip(
                *(_moving([r.bytes or 0 for r in line]) for line in (rows, base)), strict=True
            )
            axes[1].plot(steps, [own / full for own, full in pairs], **style)  # type: ignore[arg-type]
    _percents(axes[0], log=True)
    _percents(axes[1], log=False)
    _legend_beside(axes)


def _moving(numbers: Sequence[float]) -> list[float]:
    """Means of `_WINDOW` in a row."""
    return [sum(numbers[at : at + _WINDOW]) / _WINDOW for at in range(len(numbers) - _WINDOW + 1)]


_PLOTS: dict[str, tuple[int, Callable[[list[Axes], FigureRecord], None]]] = {
    "law": (3, _law),
    "where": (3, _where),
    "optimizers": (2, _optimizers),
    "formats": (2, _formats),
    "scales": (2, _scales),
    "lag": (3, _lag),
    "stages": (2, _stages),
    "sticky": (2, _sticky),
}
