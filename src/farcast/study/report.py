"""The report page: every figure that a folder holds, with its table, plot and rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from farcast.study.folder import PAGE
from farcast.study.plots import plot
from farcast.study.rows import FigureRecord
from farcast.study.settings import STAGES, StudySettings
from farcast.study.tables import table


class Heading(NamedTuple):
    """What a figure asks, and how its table reads."""

    title: str
    text: str


HEADINGS = {
    "law": Heading(
        "The law",
        "Weights whose bf16 bits a step changed, against mean of min(1, |step| / cell) told from "
        "the optimizer's state before the step. Means over the steps after warm-up; matrices of "
        "hidden layers. spread: masters lie anywhere in their cells, as in a run under way; "
        "fresh: in the middle, as a checkpoint loads them.",
    ),
    "where": Heading(
        "Where weights change",
        "The last of the law's steps by kind of tensor, layer and exponent; exponents of at least "
        "0.1 % of the weights. AdamW, bf16.",
    ),
    "optimizers": Heading(
        "Optimizers over learning rates",
        "Changed weights, and how many times smaller than the full copy the delta is. Gradients "
        "are those of the recorded run, whatever the rate.",
    ),
    "formats": Heading(
        "Formats over learning rates",
        "The same for every served format, with AdamW. anchor: how many times smaller a full copy "
        "is as farcast encodes it.",
    ),
    "scales": Heading(
        "Scales",
        "What moves when a scale moves, by policy; each version follows from the one before. "
        "Means over the steps after warm-up.",
    ),
    "lag": Heading(
        "Lag",
        "The run's last version against those before it: one delta, all deltas between together, "
        "an anchor.",
    ),
    "stages": Heading(
        "Stages",
        "Each stage's own run with AdamW at its usual rate: means of its last four steps. Whole "
        "model: all tensors of the run itself, the others are the followed matrices.",
    ),
    "sticky": Heading(
        "Sticky rounding",
        "A code is kept until its master is so many steps away; plain rounding is 0.5. Means over "
        "the last quarter of the run. KL from the plainly rounded policy, and reward, of the "
        "run's last version.",
    ),
}


def write_report(out: Path, records: Sequence[FigureRecord]) -> Path:
    """Plot each figure and write the page; returns the page's path."""
    for record in records:
        plot(record, out / f"{record.figure}.png")
    page = out / PAGE
    part = page.with_name(page.name + ".part")
    part.write_text(page_of(records), encoding="utf-8")
    part.replace(page)
    return page


def page_of(records: Sequence[FigureRecord]) -> str:
    """The whole page."""
    head = [f"# Study of {records[0].settings.model}", "", _made_under(records[0].settings)]
    return "\n".join([*head, *(section(record) for record in records)]) + "\n"


def section(record: FigureRecord) -> str:
    """One figure under its heading."""
    heading, name = HEADINGS[record.figure], record.figure
    return "\n".join(
        [
            "",
            f"## {heading.title}",
            "",
            f"{heading.text} [Rows]({name}.csv).",
            "",
            table(record),
            "",
            f"![{heading.title}]({name}.png)",
        ]
    )


def _made_under(settings: StudySettings) -> str:
    stages = "; ".join(f"{spec.title} at {spec.lr:g}" for spec in STAGES.values())
    return (
        f"{settings.layers} layers and {settings.embedding_rows} rows of the embedding were "
        f"followed, {settings.steps} steps of GRPO with {settings.groups} groups of "
        f"{settings.members} answers, {settings.warmup} of warm-up, seed {settings.seed}; "
        f"{settings.stage_steps} steps of the other stages, {settings.sequences} sequences of "
        f"{settings.length} tokens each. Stages and their rates: {stages}."
    )
