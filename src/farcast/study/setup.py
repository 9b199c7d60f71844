"""What every figure is made of, and what its rows have in common."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from farcast.config import RunConfig
from farcast.study.directions import OptimizerKind
from farcast.study.rows import Loop, Row
from farcast.study.settings import StageName, StudySettings
from farcast.study.streams import Progress, Stream


class Setup(NamedTuple):
    """What a figure is made of; `stream` records a stage's run if it is not there yet."""

    settings: StudySettings
    model: Path
    """The model's folder."""
    run: RunConfig
    stream: Callable[[StageName], Stream]
    progress: Progress


class Tag(NamedTuple):
    """What the rows of one run or replay have in common."""

    figure: str
    model: str
    stage: StageName
    optimizer: OptimizerKind
    lr: float
    loop: Loop = "replay"

    def row(self, step: int, format: str, **found: Any) -> Row:
        """A row of them."""
        return Row(
            figure=self.figure,
            model=self.model,
            stage=self.stage,
            loop=self.loop,
            optimizer=self.optimizer,
            lr=self.lr,
            format=format,
            step=step,
            **found,
        )
