"""What `farcast bench codec` measures, in order: real hops, an anchor, quantised versions of the
same hops, and changes of chosen density. Yields rows as they are measured."""

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from farcast import __version__
from farcast.bench.bounds import bounds_of
from farcast.bench.codings import Coding, Farcast, FarcastAlone
from farcast.bench.data import Change, Recording
from farcast.bench.derived import QUANTISERS, derive
from farcast.bench.fireworks import fireworks
from farcast.bench.measure import FIELDS, Effort, Row, measure
from farcast.bench.on_device import DeviceReport, measure_device
from farcast.bench.peers import peers
from farcast.bench.squashing import SquashRow
from farcast.bench.synthetic import has_bf16, synthetic

DENSITIES = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.3, 1.0)
QUICK_DENSITIES = (1e-5, 1e-3, 0.1)
QUICK = Effort(repetitions=5, least=1, seconds=0.25)

Progress = Callable[[str, int, int], None]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it was measured; `load` is the average of runnable processes when it began."""

    processor: str
    cores: int
    load: float
    system: str
    python: str
    numpy: str
    farcast: str

    @property
    def is_busy(self) -> bool:
        return self.load > 0.5 * self.cores


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the JSON file holds."""

    recording: str
    quick: bool
    machine: Machine
    fields: dict[str, str]
    rows: list[Row]
    device: DeviceReport
    squashes: list[SquashRow]


@dataclass(frozen=True)
class Case:
    """One change to measure, made only when its turn comes."""

    label: str
    make: Callable[[], Change]
    recorded: bool = False
    """Also measured with packages of others, and on two cores in a quick run."""


def run_suite(
    folder: Path, *, quick: bool = False, progress: Progress = lambda *_: None
) -> Iterator[Row]:
    """Measure every case with every coding. Cases without a change are left out."""
    recording = Recording(folder)
    total = sum(1 for _ in _cases(recording, quick))
    effort = QUICK if quick else Effort()
    for done, case in enumerate(_cases(recording, quick)):
        progress(case.label, done, total)
        change = case.make()
        bounds = bounds_of(change)
        if not bounds.changed:
            continue
        for coding in codings_for(change, packages=case.recorded):
            progress(f"{case.label}: {coding.name}", done, total)
            two_cores = not quick or (case.recorded and coding.origin == "own")
            yield measure(coding, change, bounds, effort, two_cores=two_cores)
    progress("done", total, total)


def run_on_device(folder: Path, *, quick: bool = False) -> DeviceReport:
    """Every recorded hop of `run_suite` on a GPU, if there is one."""
    return measure_device(case.make() for case in _recorded(Recording(folder), quick))


def codings_for(change: Change, *, packages: bool) -> list[Coding]:
    """farcast twice (with its digests, and without), then the others."""
    every = [FarcastAlone(change), Farcast(change), *peers()]
    if packages and not change.is_anchor:
        every += fireworks()
    return [coding for coding in every if coding.anchors or not change.is_anchor]


def this_machine() -> Machine:
    return Machine(
        processor=_processor(),
        cores=os.cpu_count() or 1,
        load=os.getloadavg()[0],
        system=platform.platform(),
        python=platform.python_version(),
        numpy=np.__version__,
        farcast=__version__,
    )


def report_of(
    folder: Path,
    rows: list[Row],
    device: DeviceReport,
    squashes: list[SquashRow],
    machine: Machine,
    *,
    quick: bool,
) -> Report:
    return Report(
        recording=folder.name,
        quick=quick,
        machine=machine,
        fields=FIELDS,
        rows=rows,
        device=device,
        squashes=squashes,
    )


def _cases(recording: Recording, quick: bool) -> Iterator[Case]:
    yield from _recorded(recording, quick)
    yield Case("anchor", lambda: _anchor(recording))
    yield from _derived(recording, quick)
    densities = QUICK_DENSITIES if quick else DENSITIES
    for density in densities if has_bf16(recording.base()) else ():
        yield Case(
            f"synthetic {100 * density:g} %",
            lambda density=density: synthetic(recording.base(), density),  # type: ignore[misc]
        )


def _recorded(recording: Recording, quick: bool) -> Iterator[Case]:
    """Every hop of every run, or the last of each."""
    for run in recording.runs:
        hops = [hop for hop in recording.hops if hop.run == run]
        for index, hop in enumerate(hops):
            if not quick or index == len(hops) - 1:
                yield _hop_case(recording, run, index, f"{run} {hop.base}-{hop.target}")


def _hop_case(recording: Recording, run: str, index: int, label: str) -> Case:
    return Case(label, lambda: _change_at(recording, run, index), recorded=True)


def _derived(recording: Recording, quick: bool) -> Iterator[Case]:
    """Of the last run its first hop (the longest, if a run was recorded from its start), and its
    last."""
    run = recording.runs[-1]
    last = sum(hop.run == run for hop in recording.hops) - 1
    for index in dict.fromkeys((0,) if quick else (0, last)):
        for kind in QUANTISERS:
            yield _derived_case(recording, run, index, kind)


def _derived_case(recording: Recording, run: str, index: int, kind: str) -> Case:
    return Case(f"{run} as {kind}", lambda: derive(_change_at(recording, run, index), kind))


def _anchor(recording: Recording) -> Change:
    base = recording.base()
    return Change(data="anchor", hop="whole", base={}, target=base)


def _change_at(recording: Recording, run: str, index: int) -> Change:
    for at, change in enumerate(recording.walk(run)):
        if at == index:
            return change
    raise LookupError(f"{run} has no hop number {index}")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
