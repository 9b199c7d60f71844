"""Tables and figure of the staleness comparison, and their place in a page.

The page's own words stand outside two markers and are left alone; between them everything is
written anew.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from farcast.bench.staleness import CORRECTIONS, Outcome, Way
from farcast.errors import ConfigError

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"

WAYS: dict[Way, str] = {
    "spread": "Answers begun that many versions ago, ended under the newest",
    "lag": "Answers wholly written that many versions ago",
}


class StalenessReport(msgspec.Struct, frozen=True, kw_only=True):
    """Every outcome, and where it was measured."""

    steps: int
    seeds: int
    machine: str
    cpu_seconds: float
    outcomes: tuple[Outcome, ...]


def tables(report: StalenessReport) -> str:
    """Markdown: one table for each way to be late."""
    return "\n\n".join(_table(report.outcomes, way) for way in WAYS)


def write_page(report: StalenessReport, page: Path, figure: str) -> None:
    """Put tables, figure and how they came about between the page's markers."""
    try:
        text = page.read_text() if page.exists() else f"# Staleness\n\n{BEGIN}\n{END}\n"
        head, _, rest = text.partition(BEGIN)
        _, found, tail = rest.partition(END)
        if not found:
            raise ConfigError(f"{page} lacks the markers {BEGIN} and {END}; put both into it.")
        measured = (
            f"Reward of the final policy after {report.steps} steps: mean of {report.seeds} seeds, "
            f"lowest to highest behind it. {report.machine}, {report.cpu_seconds / 60:.0f} minutes "
            "of CPU time in all, by `farcast bench staleness`."
        )
        body = f"{measured}\n\n{tables(report)}\n\n![Final reward over staleness]({figure})"
        page.write_text(f"{head}{BEGIN}\n\n{body}\n\n{END}{tail}")
    except OSError as error:
        raise ConfigError(
            f"The page {page} cannot be written ({error.strerror}); name another one."
        ) from error


def rewards(outcomes: Sequence[Outcome], name: str, way: Way, staleness: int) -> list[float]:
    """The seeds' rewards of one cell."""
    wanted = (name, way, staleness)
    return [o.reward for o in outcomes if (o.correction, o.way, o.staleness) == wanted]


def _table(outcomes: Sequence[Outcome], way: Way) -> str:
    columns = sorted({o.staleness for o in outcomes if o.way == way})
    names = [n for n in CORRECTIONS if any((o.correction, o.way) == (n, way) for o in outcomes)]
    lines = [
        f"**{WAYS[way]}**",
        "",
        "| correction | " + " | ".join(f"{c} versions" for c in columns) + " | tokens used |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for name in names:
        cells = [_cell(rewards(outcomes, name, way, column)) for column in columns]
        used = [
            o.used
            for o in outcomes
            if (o.correction, o.way, o.staleness) == (name, way, columns[-1])
        ]
        lines.append(f"| {CORRECTIONS[name].title} | {' | '.join(cells)} | {fmean(used):.0%} |")
    return "\n".join([*lines, "", f"Tokens used: share in the loss at {columns[-1]} versions."])


def _cell(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else ""
