"""Makes figures one by one; what is in the folder already, under the same settings, stays.

.farcast-study     says that a study wrote this folder (see `folder`)
streams/STAGE/     recorded gradients (see `streams`): may be deleted once all figures are made
FIGURE.csv         its rows
FIGURE.json        the same with the settings they were made under
FIGURE.png         its plot
report.md          tables and plots of all figures that are there

Refuses a folder that something else wrote.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from farcast.config import RunConfig
from farcast.study.figures import FIGURES
from farcast.study.folder import PAGE, take_folder
from farcast.study.rows import FigureRecord, StudyReport, write_csv
from farcast.study.settings import StageName, StudySettings
from farcast.study.setup import Setup
from farcast.study.streams import Progress, Stream, open_stream

OWN_FILES = (PAGE, *(f"{name}.{kind}" for name in FIGURES for kind in ("csv", "json", "png")))


class Study:
    """One model's figures in one folder."""

    def __init__(
        self,
        out: Path,
        model: Path,
        run: RunConfig,
        settings: StudySettings,
        progress: Progress = lambda *_: None,
    ) -> None:
        self._out, self._model, self._run = out, model, run
        self._settings, self._progress = settings, progress
        self._streams: dict[StageName, Stream] = {}
        take_folder(out, OWN_FILES)

    def figure(self, name: str) -> tuple[FigureRecord, bool]:
        """The figure's rows, and whether they were made now."""
        held = self._held(name)
        if held is not None:
            return held, False
        setup = Setup(self._settings, self._model, self._run, self._stream, self._progress)
        record = FigureRecord(
            figure=name, settings=self._settings, rows=tuple(FIGURES[name](setup))
        )
        write_csv(record.rows, self._out / f"{name}.csv")
        part = self._out / f"{name}.json.part"
        part.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
        part.replace(self._out / f"{name}.json")
        return record, True

    def figures(self, names: Sequence[str]) -> list[FigureRecord]:
        """Those of `names`, each from the folder or made now."""
        return [self.figure(name)[0] for name in names]

    def report(self, records: Sequence[FigureRecord]) -> StudyReport:
        rows = tuple(row for record in records for row in record.rows)
        return StudyReport(model=self._settings.model, settings=self._settings, rows=rows)

    def held(self) -> list[FigureRecord]:
        """Every figure that the folder has under these settings."""
        return [found for name in FIGURES if (found := self._held(name)) is not None]

    def _held(self, name: str) -> FigureRecord | None:
        try:
            data = (self._out / f"{name}.json").read_bytes()
            record = msgspec.json.decode(data, type=FigureRecord)
        except (OSError, msgspec.DecodeError):
            return None  # not made yet, or by another version: it is made anew
        return record if record.settings == self._settings else None

    def _stream(self, stage: StageName) -> Stream:
        if stage not in self._streams:
            folder = self._out / "streams" / stage
            self._streams[stage] = open_stream(
                stage, folder, self._model, self._run, self._settings, self._progress
            )
        return self._streams[stage]
