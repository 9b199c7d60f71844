"""`farcast status` tells who is there, what they serve and how fast, and fits a terminal."""

import io
import json
import signal
import sys
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest
from rich.console import Console

from farcast.dashboard.figures import human_age, human_count, shortened
from farcast.dashboard.live import LiveView
from farcast.dashboard.status import status_view
from farcast.fleet.events import FleetEvent
from farcast.fleet.observe import FleetSnapshot
from farcast.fleet.records import ReplicaRecord, StepRecord, TrainerRecord
from farcast.fleet.registry import Registry, Sighting
from farcast.lineage import RunRecord
from farcast.store import open_store
from farcast.store.archive import Archive

SEEN = 1e6


def replica(name: str, state: str, version: int, age: float, **more: Any) -> Sighting:
    record = ReplicaRecord(replica_id=name, state=state, version=version, **more)  # type: ignore[arg-type]
    return Sighting(record, SEEN - age)


LARGE: dict[str, Any] = {
    "tokens_per_second": 1_234_567.0,
    "trajectories": 1_234_567,
    "bytes_fetched": 123_400_000_000,
    "bytes_relayed": 120_000_000_000,
    "bytes_full": 45_000_000_000_000,
    "commit_seconds": 0.85,
}
REPLICAS = [
    replica("tokyo-gpu-node-17.cluster.local-23412", "serving", 123_456, 0.5, **LARGE),
    replica("farcast-worker-7d9c9bd4bf-x2x7k", "staging", 123_333, 1.5, tokens_per_second=345),
    replica("r1", "serving", 123_456, 30.0),
    replica("r2", "serving", 100_000, 300.0, tokens_per_second=99),
    replica("r3", "joining", -1, 1.0),
    replica("r4", "stopped", 123_456, 4000.0),
]


def snapshot() -> FleetSnapshot:
    step = StepRecord(
        version=123_456,
        step=123_456,
        root="0" * 64,
        incarnation="a",
        consumed=("t1",),
        loss=None,
        step_seconds=4000,
        waited_seconds=100_000,
        bytes_sent=10**12,
        bytes_full=3 * 10**14,
        tokens=10**12,
    )
    trainer = TrainerRecord(run_id="r" * 70, state="training", version=123_456, step=123_456)
    replicas = {sighting.record.replica_id: sighting for sighting in REPLICAS}
    return FleetSnapshot(trainer, (step,), replicas, SEEN, trainer_written=SEEN - 1)


def shown(view: FleetSnapshot, *, width: int = 80, away: str = "") -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(status_view(view, away=away))
    return out.getvalue().splitlines()


def row(lines: list[str], start: str) -> list[str]:
    (found,) = [line for line in lines if line.startswith(start)]
    return found.split()


def test_it_fits_eighty_columns_and_cuts_no_figure() -> None:
    lines = shown(snapshot())
    assert max(map(len, lines)) <= 80
    assert row(lines, "tokyo")[1:] == [
        *("serving", "123456", "1.2M", "1.2M", "123.4", "GB", "365x", "850", "ms")
    ]
    assert row(lines, "farcas")[0].endswith("-x2x7k")
    assert row(lines, "farcas")[1:5] == ["staging", "123333", "(-123)", "345"]
    assert row(lines, "r1 ")[1:3] == ["silent", "30s"]
    assert row(lines, "r2 ")[1:5] == ["dead", "5m", "100000", "-"]  # no rate of the dead
    assert row(lines, "r3 ")[1:3] == ["joining", "-"]
    said = " ".join(line.strip() for line in lines)
    assert "3 alive, 1 dead, 1 left, 1 silent" in said
    assert "up to 123 versions behind" in said
    assert "97% from relays" in said
    assert "loss       not finite" in said


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_the_live_view_uses_the_room_there_is_and_cuts_no_figure(width: int) -> None:
    out = io.StringIO()
    view = LiveView(
        Console(file=out, width=width, color_system=None), title="farcast demo", steps=130_000
    )
    view.note("")
    view.show(snapshot())
    view.event(FleetEvent(at=0.0, kind="away", who="store", step=1, version=1, text="word " * 30))
    Console(file=out, width=width, color_system=None).print(view)
    lines = out.getvalue().splitlines()
    assert {len(line) for line in lines} == {width}
    said = " ".join(line.strip("│ ") for line in lines)
    for figure in (
        "step 123456 of 130000",
        "not finite",
        "1.0T tokens",
        "(300x less)",
        "silent 30s",
    ):
        assert figure in said, figure
    (head,) = [line for line in lines if "replica " in line and "version" in line]
    assert ("pause" in head) == (width >= 80)
    assert ("tok/s" in head) == (width >= 60)
    assert ("reward" in head) == (width >= 160)  # beside each other
    assert "-x2x7k" in said  # both ends of a name, however narrow


@pytest.mark.parametrize("width", range(48, 110, 3))
def test_no_figure_of_a_replica_is_cut_at_any_width(width: int) -> None:
    one = replica(
        "r1", "serving", 4, 2e3, trajectories=160, bytes_fetched=4_700_000, commit_seconds=0.202
    )
    view = snapshot()._replace(replicas={"r1": one})
    lines = shown(view, width=width)
    (head,) = [line for line in lines if line.startswith("replica ")]
    (told,) = [line for line in lines if line.startswith("r1 ")]
    assert "…" not in head + told
    for heading, figure in (("pause", "202 ms"), ("fetched", "4.7 MB"), ("state", "dead 33m")):
        assert (heading in head) == (figure in told)


def test_what_a_signal_said_stands_above_all_else() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, color_system=None)
    view = LiveView(console, title="farcast demo", steps=9)
    view.note("waiting for trainer")
    view.urgent("stopping; Ctrl-C again ends at once")
    console.print(view)
    lines = [line.strip("│ ") for line in out.getvalue().splitlines()]
    assert lines[1:3] == ["stopping; Ctrl-C again ends at once", "waiting for trainer …"]
    assert "stops in order" not in out.getvalue()


def test_an_empty_run_and_an_absent_store_are_said() -> None:
    lines = shown(FleetSnapshot(None, (), {}, 0.0), away="The store is away; wait.")
    assert lines == [
        "No trainer has started on this store yet.",
        "The store is away; wait.",
        "No replica has joined yet.",
    ]


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (human_count(9999), "9999"),
        (human_count(12_345), "12.3k"),
        (human_count(2.5e13), "25.0T"),
        (human_age(59.4), "59s"),
        (human_age(7200), "2h"),
        (human_age(3e5), "3d"),
        (shortened("abcdefghij", 10), "abcdefghij"),
        (shortened("abcdefghijk", 10), "abcd…ghijk"),
    ],
)
def test_figures_as_people_read_them(made: str, text: str) -> None:
    assert made == text


def test_watching_shows_what_is_new_and_ends_when_asked(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    store = open_store(url)
    Archive(store, "run").create_run(RunRecord(run_id="run", created="now"))
    registry, result = Registry(store), tmp_path / "out.json"
    arguments = ["status", "--store", url, "--watch", "--json", str(result)]
    with Popen([sys.executable, "-m", "farcast", *arguments], stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("No trainer has started")
        registry.write_trainer(TrainerRecord(run_id="run", state="training", version=3, step=3))
        registry.put_step(StepRecord(version=3, step=3, root="0" * 64, incarnation="a"))
        registry.write_replica(ReplicaRecord(replica_id="r1", state="serving", version=2))
        while not process.stdout.readline().startswith("r1 "):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    told = json.loads(result.read_text())
    assert told["trainer_life"] == "alive"
    assert (told["newest_version"], told["replicas"]["r1"]["staleness"]) == (3, 1)
    assert told["replicas"]["r1"]["life"] == "alive"
    assert told["tokens_per_second"] == 0
