"""`farcast bench rl`: the parts that decide what it says."""

from pathlib import Path
from typing import Any

import pytest

from farcast.bench.rl_delivery import MEMBERS, WORKERS, measure_delivery
from farcast.bench.rl_training import RunOutcome, summarise_training


def outcome(seed: int, *, linked: bool, **changes: Any) -> RunOutcome:
    said: dict[str, Any] = {
        "tokens": 1000,
        "seconds": 10.0,
        "step_seconds": 8.0,
        "blocked_seconds": 0.04,
        "last_wait_seconds": 0.3,
        "waited_seconds": 1.0,
        "bytes_sent": 1,
        "staleness_mean": 1.0,
        "curve": (0.0, 0.1 + seed / 100),
    }
    return RunOutcome(linked=linked, seed=seed, **{**said, **changes})


def test_runs_are_compared_seed_by_seed() -> None:
    runs = [outcome(s, linked=False) for s in range(3)]
    runs += [outcome(s, linked=True, seconds=10.0 + s, curve=(0.0, 0.1)) for s in range(3)]
    report = summarise_training(runs)
    assert report.tokens_per_s_linked_over_free == pytest.approx(10 / 11)
    assert report.trainer_blocked_fraction == pytest.approx(0.005)
    assert report.curve_gap == pytest.approx(-0.01)
    assert report.curves_agree, "0.01 is within the 0.02 between seeds"
    worse = [*runs[:3], *(outcome(s, linked=True, curve=(0.0, 0.05)) for s in range(3))]
    assert not summarise_training(worse).curves_agree


@pytest.mark.full
def test_killed_processes_lose_and_double_nothing(tmp_path: Path) -> None:
    report = measure_delivery(tmp_path, trajectories=WORKERS * MEMBERS * 60)
    assert report.acknowledged == report.consumed + report.stale == WORKERS * MEMBERS * 60
    assert (report.lost, report.duplicated) == (0, 0)
    assert report.stale == WORKERS * MEMBERS
    assert report.kills_of_workers > 0
