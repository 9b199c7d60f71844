"""Rows of a figure as the table that a reader wants, in Markdown."""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from farcast.study.rows import FigureRecord, Row
from farcast.study.settings import STAGES

OPTIMIZER_TITLES = {
    "adamw": "AdamW",
    "muon": "Muon, RMS-matched",
    "muon_unscaled": "Muon, unscaled",
    "sgd": "SGD, momentum 0.9",
}


def percent(fraction: float | None) -> str:
    """Three digits, as a share of a hundred."""
    return "" if fraction is None else f"{100 * fraction:.3g} %"


def ratio(one: float | None, other: float | None) -> str:
    """One over the other, and nothing where either is missing or zero."""
    return f"{one / other:.3f}" if one and other else ""


def share(one: float | None, other: float | None) -> str:
    """One as a share of the other, and nothing where either is missing or zero."""
    return percent(one / other) if one and other else ""


def factor(row: Row) -> float | None:
    """How many times smaller the delta is than the served tensors."""
    return row.bytes_full / row.bytes if row.bytes and row.bytes_full else None


def times(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:,.0f}x" if number >= 100 else f"{number:.3g}x"


def size(count: float | None) -> str:
    """Bytes for a person."""
    if count is None:
        return ""
    return f"{count / 1e6:.3g} MB" if count >= 1e6 else f"{count / 1e3:.3g} kB"


def mean(numbers: Iterable[float | None]) -> float | None:
    """Of those that are there."""
    held = [number for number in numbers if number is not None]
    return fmean(held) if held else None


def steady(rows: Sequence[Row], warmup: int) -> list[Row]:
    """Those after warm-up, while the rate stands; all of them if none are."""
    return [row for row in rows if row.step > warmup] or list(rows)


def foretold(row: Row) -> float | None:
    """Predicted over changed; None where nothing was told or nothing changed."""
    if not row.predicted_fraction or not row.changed_fraction:
        return None
    return row.predicted_fraction / row.changed_fraction


def series(rows: Iterable[Row], key: Callable[[Row], object]) -> list[list[Row]]:
    """Rows of one key together, in the order of first sight."""
    found: dict[object, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return list(found.values())


def table(record: FigureRecord) -> str:
    """The figure's table."""
    return _TABLES[record.figure](record)


def _markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    made = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([f"| {' | '.join(header)} |", "|---" * len(header) + "|", *made])


def _law(record: FigureRecord) -> str:
    lines = []
    for rows in series(record.rows, lambda r: (r.optimizer, r.lr, r.masters)):
        kept = steady(rows, record.settings.warmup)
        told = [found for row in kept if (found := foretold(row)) is not None]
        lines.append(
            (
                OPTIMIZER_TITLES[rows[0].optimizer],
                f"{rows[0].lr:g}",
                rows[0].masters,
                percent(mean(row.changed_fraction for row in kept)),
                percent(mean(row.predicted_fraction for row in kept)),
                f"{fmean(told):.3f} ({min(told):.3f} to {max(told):.3f})" if told else "",
                ratio(
                    mean(row.actual_fraction for row in kept),
                    mean(row.changed_fraction for row in kept),
                ),
                times(mean(factor(row) for row in kept)),
            )
        )
    header = (
        "optimizer",
        "rate",
        "masters",
        "changed",
        "predicted",
        "predicted / changed (least to most of a step)",
        "the same, from the step itself",
        "delta smaller by",
    )
    return _markdown(header, lines)


def _where(record: FigureRecord) -> str:
    total = sum(row.weights for row in record.rows if row.group.startswith("kind="))
    lines = [
        (
            row.group.replace("=", " ").replace("exponent ", "2^"),
            percent(row.weights / total),
            percent(row.changed_fraction),
            percent(row.predicted_fraction),
            ratio(row.predicted_fraction, row.changed_fraction),
        )
        for row in sorted(record.rows, key=_part)
        if not row.group.startswith("exponent=") or row.weights >= total / 1000
    ]
    header = ("weights", "of the sample", "changed", "predicted", "predicted / changed")
    return _markdown(header, lines)


def _part(row: Row) -> tuple[int, float]:
    """Kinds, then layers, then exponents from the largest."""
    part, _, value = row.group.partition("=")
    if part == "kind":
        return 0, 0.0
    return (1, float(value)) if part == "layer" else (2, -float(value))


def _optimizers(record: FigureRecord) -> str:
    rates = sorted({row.lr for row in record.rows})
    lines = []
    for rows in series(record.rows, lambda r: r.optimizer):
        at = {row.lr: row for row in rows}
        cells = [
            f"{percent(at[lr].changed_fraction)}, {times(factor(at[lr]))}" if lr in at else ""
            for lr in rates
        ]
        lines.append((OPTIMIZER_TITLES[rows[0].optimizer], *cells))
    return _markdown(("optimizer", *(f"{lr:g}" for lr in rates)), lines)


def _formats(record: FigureRecord) -> str:
    rates = sorted({row.lr for row in record.rows})
    lines = []
    for rows in series(record.rows, lambda r: r.format):
        at = {row.lr: row for row in rows}
        first = rows[0]
        cells = [
            f"{percent(at[lr].changed_fraction)}, {times(factor(at[lr]))}" if lr in at else ""
            for lr in rates
        ]
        anchored = times((first.bytes_full or 0) / first.bytes_anchor) if first.bytes_anchor else ""
        lines.append((f"`{first.format}`", size(first.bytes_full), anchored, *cells))
    header = ("format", "full copy", "anchor", *(f"{lr:g}" for lr in rates))
    return _markdown(header, lines)


def _scales(record: FigureRecord) -> str:
    lines = []
    for rows in series(record.rows, lambda r: r.format):
        kept = steady(rows, record.settings.warmup)
        sizes = [row.bytes or 0 for row in kept]
        moved = [row.scales_changed or 0.0 for row in kept]
        lines.append(
            (
                f"`{rows[0].format}`",
                percent(mean(row.changed_fraction for row in kept)),
                ratio(
                    mean(row.actual_fraction for row in kept),
                    mean(row.changed_fraction for row in kept),
                ),
                f"{percent(fmean(moved))} ({percent(max(moved))})",
                f"{size(fmean(sizes))} ({size(max(sizes))})",
                times(mean(factor(row) for row in kept)),
            )
        )
    header = (
        "format",
        "codes changed",
        "law / changed",
        "scales moved, mean (most)",
        "delta, mean (most)",
        "smaller by",
    )
    return _markdown(header, lines)


def _lag(record: FigureRecord) -> str:
    lines = [
        (
            f"`{row.format}`",
            f"{row.lr:g}",
            str(row.lag),
            percent(row.changed_fraction),
            size(row.bytes),
            size(row.bytes_chain),
            share(row.bytes, row.bytes_chain),
            share(row.bytes, row.bytes_anchor),
        )
        for row in record.rows
    ]
    header = (
        "format",
        "rate",
        "versions",
        "changed",
        "one delta",
        "chain",
        "delta / chain",
        "delta / anchor",
    )
    return _markdown(header, lines)


def _stages(record: FigureRecord) -> str:
    lines = []
    for rows in series(record.rows, lambda r: (r.stage, r.format, r.loop == "closed")):
        first, last = rows[0], rows[-1]
        kept = [row for row in rows if row.predicted_fraction is not None][-4:]
        title = next(spec.title for name, spec in STAGES.items() if name == first.stage)
        lines.append(
            (
                f"{title}, {first.lr:g}",
                f"`{first.format}`" + (", whole model" if first.loop == "closed" else ""),
                percent(mean(row.changed_fraction for row in kept)),
                percent(mean(row.predicted_fraction for row in kept)),
                percent(mean(row.actual_fraction for row in kept)),
                times(mean(factor(row) for row in kept)),
                share(last.bytes, last.bytes_anchor),
            )
        )
    header = (
        "stage and rate",
        "format",
        "changed",
        "predicted",
        "law, from the step itself",
        "smaller by",
        "delta / anchor",
    )
    return _markdown(header, lines)


def _sticky(record: FigureRecord) -> str:
    lines = []
    plain: dict[str, tuple[float, float]] = {}
    closed = [row for row in record.rows if row.loop == "closed"]
    trained = {row.format: row for row in closed if row.step > 0}
    for rows in series((r for r in record.rows if r.loop == "replay"), lambda r: r.format):
        late = [row for row in rows if row.step > rows[-1].step * 3 // 4]
        changed = fmean(row.changed_fraction for row in late)
        sent = fmean(row.bytes or 0 for row in late)
        base = rows[0].format.partition("-round")[0]
        kept_changed, kept_sent = plain.setdefault(base, (changed, sent))
        lines.append(
            (
                f"`{rows[0].format}`",
                percent(changed),
                ratio(changed, kept_changed),
                size(sent),
                ratio(sent, kept_sent),
                *_cost(trained.get(rows[0].format)),
            )
        )
    for start in (row for row in closed if row.step == 0):
        lines.append(("before the run", "", "", "", "", *_cost(start)))
    header = ("format", "changed", "of plain", "delta", "of plain")
    return _markdown((*header, "apart from plain", "KL, nats a token", "reward"), lines)


def _cost(row: Row | None) -> tuple[str, str, str]:
    if row is None or row.kl is None or row.reward is None:
        return "", "", ""
    return percent(row.apart), f"{row.kl:.2e}", f"{row.reward:.3f}"


_TABLES: dict[str, Callable[[FigureRecord], str]] = {
    "law": _law,
    "where": _where,
    "optimizers": _optimizers,
    "formats": _formats,
    "scales": _scales,
    "lag": _lag,
    "stages": _stages,
    "sticky": _sticky,
}
