"""Whatever anybody writes into `fleet/`, those who look at the run get finite numbers and plain
text, or leave the record out."""

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from farcast.dashboard.status import status_view
from farcast.fleet.audit import audit
from farcast.fleet.events import FleetEvent
from farcast.fleet.launcher import last_words
from farcast.fleet.load import LoadMeter
from farcast.fleet.observe import MAX_NAMED, FleetObserver, FleetSnapshot
from farcast.fleet.registry import Registry
from farcast.fleet.saying import plain, say
from farcast.fleet.scaling import Limits, Scaler
from farcast.lineage import RunRecord
from farcast.store import MemoryStore
from farcast.store.archive import Archive

TRAINER = {"run_id": "run1", "state": "training", "version": 1, "step": 1}
REPLICA = {"replica_id": "r1", "state": "serving", "version": 1}
STEP = {
    "version": 1,
    "step": 1,
    "root": "a" * 64,
    "incarnation": "x",
    "consumed": ["a", "b"],
    "step_seconds": 1.0,
}
HUGE = 10**400
ESCAPE = "[/x]\x1b[2J"


class Onlookers:
    """`farcast status` and `farcast up`, as far as they only look."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.observer = FleetObserver(Registry(self.store))
        self.meter = LoadMeter(groups_per_step=4)
        self.scaler = Scaler(Limits(least=0, most=4, calm_seconds=0))

    def look(self, now: float, *, replica: dict[str, Any], step: dict[str, Any]) -> FleetSnapshot:
        for key, record in (
            ("trainer", TRAINER),
            ("replicas/r1", replica),
            ("steps/000000000001", step),
        ):
            self.store.put(f"fleet/{key}.json", json.dumps(record).encode())
        snapshot = self.observer.look()
        assert 0 <= self.scaler.decide(self.meter.measure(snapshot, now), now) <= 4
        shown = io.StringIO()
        Console(file=shown, width=150).print(status_view(snapshot))
        assert "\x1b" not in shown.getvalue()
        return snapshot


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, HUGE) for name in ("trajectories", "tokens", "unread", "commits", "bytes_full")),
        *((name, (1 << 63) - 1) for name in ("trajectories", "unread", "bytes_relayed", "tokens")),
        *(("tokens_per_second", value) for value in (1e308, -1e308, 1e300)),
        *((name, value) for name in ("waiting_seconds", "updated") for value in (1e308, -1.0)),
        *((name, ESCAPE) for name in ("root", "url")),
        ("url", "x" * 5000),
    ],
)
def test_a_replicas_record(field: str, value: object) -> None:
    onlookers = Onlookers()
    onlookers.look(0, replica=REPLICA, step=STEP)
    onlookers.look(10, replica={**REPLICA, field: value}, step=STEP)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, 1e308) for name in ("step_seconds", "waited_seconds", "blocked_seconds")),
        *((name, -1e308) for name in ("waited_seconds", "reward_mean", "loss")),
        ("waited_seconds", 1e12),
        ("tokens", HUGE),
        ("dropped", {ESCAPE: ["a"]}),
    ],
)
def test_a_steps_record(field: str, value: object) -> None:
    onlookers = Onlookers()
    for now in (0, 10):
        onlookers.look(now, replica=REPLICA, step={**STEP, field: value})


LINE = "x\nrun1  trainer done"
"""What would stand on a line of its own, as if `farcast status` had said it."""


@pytest.mark.parametrize("words", [ESCAPE, LINE, "r1\n", "\u202er1", "\x9b2J"])
@pytest.mark.parametrize(
    ("key", "record", "field"),
    [
        ("trainer", TRAINER, "run_id"),
        ("trainer", TRAINER, "state"),
        ("trainer", TRAINER, "unknown"),
        ("replicas/r1", REPLICA, "replica_id"),
        ("replicas/r1", REPLICA, "state"),
        ("replicas/r1", REPLICA, "root"),
        ("replicas/r1", REPLICA, "url"),
        ("replicas/r1", REPLICA, "unknown"),
        ("steps/000000000001", STEP, "incarnation"),
        ("steps/000000000001", STEP, "root"),
        ("steps/000000000001", STEP, "unknown"),
    ],
)
def test_words_that_a_terminal_would_obey_are_in_nothing_that_is_shown(
    caplog: pytest.LogCaptureFixture,
    key: str,
    record: dict[str, Any],
    field: str,
    words: str,
) -> None:
    store = MemoryStore()
    name, value = (words, 1) if field == "unknown" else (field, words)
    store.put(f"fleet/{key}.json", json.dumps({**record, name: value}).encode())
    with caplog.at_level(logging.WARNING):
        snapshot = FleetObserver(Registry(store)).look()
    (warning,) = caplog.messages
    assert warning.isprintable()
    assert (snapshot.trainer, snapshot.steps, snapshot.replicas) == (None, (), {})
    shown = io.StringIO()
    Console(file=shown, width=150).print(status_view(snapshot))
    assert "done" not in shown.getvalue()


def test_damaged_records_are_named_up_to_a_number(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    for number in range(5 * MAX_NAMED):
        store.put(f"fleet/replicas/r{number:03d}.json", b"{}")
    observer = FleetObserver(Registry(store))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert observer.look().replicas == {}
    assert len(caplog.messages) == MAX_NAMED + 1
    assert "More records" in caplog.messages[-1]


@pytest.mark.parametrize("words", [ESCAPE, LINE, "\ud800"])
def test_what_is_said_stays_on_its_line(
    words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    say(words)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.isprintable()
    event = FleetEvent(kind="failed", who="r1", step=1, version=1, at=0.0, text=words)
    assert str(event).isprintable()
    (tmp_path / "log").write_bytes(words.encode(errors="replace"))
    assert last_words(tmp_path / "log").isprintable()
    assert plain("Grüße, 模型 → r1") == "Grüße, 模型 → r1"


def test_what_verify_lists_is_plain() -> None:
    store = MemoryStore()
    Archive(store, "run1").create_run(RunRecord(run_id="run1", created="now"))
    store.put("versions/000000000000.json", json.dumps({ESCAPE: 1}).encode())
    store.put("fleet/steps/000000000001.json", json.dumps({**STEP, ESCAPE: 1}).encode())
    differences = audit(store).differences
    assert len(differences) >= 2
    assert all(line.isprintable() for line in differences)
