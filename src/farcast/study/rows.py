"""One measurement is one row, the same for every figure, as JSON and as CSV."""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from farcast.study.settings import StudySettings

Loop = Literal["closed", "replay"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did to the served tensors, or to a part of them. Fractions are of weights;
    scales are counted by themselves. None where it was not measured."""

    figure: str
    model: str
    stage: str
    loop: Loop
    """closed: the run trained so. replay: this optimizer and rate followed the gradients of the
    stage's run, whose weights were those of its own optimizer."""
    optimizer: str
    lr: float
    format: str
    """A recipe's name, policies included."""
    step: int
    lag: int = 1
    """Versions between the two that were compared."""
    masters: Literal["spread", "fresh"] = "spread"
    group: str = "all"
    """Which weights: all of the sample, or kind=, layer= or exponent= of them."""
    weights: int
    changed_fraction: float
    predicted_fraction: float | None = None
    """mean of min(1, |step| / cell), the step told from the optimizer's state before it."""
    actual_fraction: float | None = None
    """The same with the step that was then made."""
    scales_changed: float | None = None
    bytes: int | None = None
    """The delta, as `farcast.delta` encodes it."""
    bytes_full: int | None = None
    """The served tensors as they are."""
    bytes_anchor: int | None = None
    """The newer version whole, as `farcast.delta` encodes it."""
    bytes_chain: int | None = None
    """The deltas of all versions between, together."""
    apart: float | None = None
    """Weights whose bits are not those of plain rounding."""
    kl: float | None = None
    """Nats a token from the plainly rounded policy to this one, on answers of the former."""
    reward: float | None = None


class FigureRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A figure's rows, and what they were made under."""

    figure: str
    settings: StudySettings
    rows: tuple[Row, ...]


class StudyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What --json holds: the rows of all figures asked for, in order."""

    model: str
    settings: StudySettings
    rows: tuple[Row, ...]


FIELDS = Row.__struct_fields__


def write_csv(rows: Iterable[Row], path: Path) -> None:
    """Write whole or not at all; an empty cell is None."""
    part = path.with_name(path.name + ".part")
    with part.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(FIELDS)
        for row in rows:
            table.writerow(["" if v is None else v for v in msgspec.structs.astuple(row)])
    part.replace(path)
