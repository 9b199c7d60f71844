"""Whatever anybody writes into `fleet/`, those who look at the run get finite numbers and plain
text, or leave the record out."""

import io
import json
from typing import Any

import pytest
from rich.console import Console

from farcast.dashboard.status import status_view
from farcast.fleet.load import LoadMeter
from farcast.fleet.observe import FleetObserver, FleetSnapshot
from farcast.fleet.registry import Registry
from farcast.fleet.scaling import Limits, Scaler
from farcast.store import MemoryStore

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
