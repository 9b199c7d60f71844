"""The main job with the tiny model: killed, joined late, stopped, crashed, resumed, tampered with.

Real processes that share nothing but a folder store. One finished run serves all tests that only
look at one.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.timeout(900)  # whole runs, several processes on few cores

STEPS = 8
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def start(*arguments: str, where: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "farcast", *arguments],
        cwd=where,
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,
    )


def finish(process: subprocess.Popen[str], *, seconds: float = 400) -> tuple[int, str]:
    """Wait for it: (status, everything it said). Leaves nothing behind."""
    try:
        said, _ = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return process.returncode, said


def farcast(*arguments: str, where: Path) -> tuple[int, str]:
    return finish(start(*arguments, where=where))


def logs(run: Path) -> str:
    return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in run.glob("logs/*.log"))


def steps_taken(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def wait_for_steps(run: Path, steps: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while steps_taken(run) < steps:
        assert process.poll() is None, finish(process)[1] + logs(run)
        assert time.monotonic() < deadline, logs(run)
        time.sleep(0.05)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A whole demo: (the folder it ran in, what it said)."""
    where = tmp_path_factory.mktemp("demo")
    status, said = farcast(
        "demo", "--model", "tiny", "--steps", str(STEPS), "--json", "out.json", where=where
    )
    assert status == 0, said + logs(where / "runs" / "demo")
    return where, said


def test_one_command_trains_kills_joins_and_proves(finished: tuple[Path, str]) -> None:
    where, said = finished
    out: dict[str, Any] = json.loads((where / "out.json").read_text())
    assert out["steps"] == STEPS
    assert out["versions_published"] == out["versions_verified"] == STEPS + 1
    assert out["roots_match"] is True
    assert out["differences"] == []
    assert out["replicas_killed"] == out["replicas_joined"] == 1
    assert out["trajectories_submitted"] == out["trajectories_consumed"] + out["trajectories_stale"]
    assert out["trajectories_consumed"] > 0
    assert 0 < out["bytes_sent"] < out["bytes_full"]
    assert 0 < out["changed_fraction"] <= 1
    assert out["trainer_blocked_seconds"] >= 0
    assert 0 <= out["reward_first"] <= 1
    assert 0 <= out["reward_last"] <= 1
    run = where / "runs" / "demo"
    for name in ("summary.json", "plot.png", "metrics.jsonl"):
        assert str(run / name) in said
        assert (run / name).stat().st_size > 0
    assert json.loads((run / "summary.json").read_text()) == out
    assert "everything agrees" in said


def test_a_late_replica_serves_and_a_killed_one_stays_silent(finished: tuple[Path, str]) -> None:
    where, _ = finished
    status, said = farcast(
        "status", "--store", "runs/demo/store", "--json", "status.json", where=where
    )
    assert status == 0, said
    state = json.loads((where / "status.json").read_text())
    assert state["trainer"]["state"] == "done"
    replicas = {name: entry["record"] for name, entry in state["replicas"].items()}
    assert replicas["r2"]["state"] == replicas["r3"]["state"] == "stopped"
    assert replicas["r1"]["state"] not in ("stopped", "failed")
    assert replicas["r3"]["version"] >= 0


def test_a_folder_replica_catches_up(finished: tuple[Path, str]) -> None:
    where, _ = finished
    status, said = farcast(
        "replica", "--store", "runs/demo/store", "--dir", "copy", "--once", "--json", "r.json",
        where=where,
    )  # fmt: skip
    assert status == 0, said
    got = json.loads((where / "r.json").read_text())
    assert got["version"] == STEPS
    assert (where / "copy" / "config.json").is_file()
    assert list((where / "copy").glob("*.safetensors"))


def test_versions_and_plans_can_be_looked_at(finished: tuple[Path, str]) -> None:
    where, _ = finished
    status, said = farcast("inspect", "--store", "runs/demo/store", where=where)
    assert status == 0
    assert len([line for line in said.splitlines() if line.startswith(("●", "○"))]) > STEPS, said
    status, said = farcast("plan", "--store", "runs/demo/store", "--have", "1", where=where)
    assert status == 0
    assert f"from version 1 to version {STEPS}" in said


def test_a_tampered_object_fails_verification(finished: tuple[Path, str]) -> None:
    where, _ = finished
    store = where / "tampered"
    shutil.copytree(where / "runs" / "demo" / "store", store)
    assert farcast("verify", "--store", str(store), where=where)[0] == 0
    victim = max((store / "objects").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 3] ^= 4
    victim.write_bytes(data)
    status, said = farcast("verify", "--store", str(store), "--json", "v.json", where=where)
    assert status == 3
    assert "NOT everything agrees" in said
    assert json.loads((where / "v.json").read_text())["differences"]


def test_another_run_cannot_use_the_store(finished: tuple[Path, str]) -> None:
    where, _ = finished
    before = sorted(path.name for path in (where / "runs" / "demo" / "store").rglob("*"))
    status, said = farcast(
        "train", "--model", "tiny", "--store", "runs/demo/store", "--out", "other", where=where
    )
    assert status == 5, said
    assert said.count("\n") == 1
    assert "use another store prefix" in said
    assert not (where / "other").exists()
    assert sorted(p.name for p in (where / "runs" / "demo" / "store").rglob("*")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_is_one_sentence_and_nothing_is_lost(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], check=True)
    try:
        status, said = farcast(
            "train", "--model", "tiny", "--steps", "2", "--out", "small/run", where=tmp_path
        )
        assert status == 4, said
        assert said.splitlines()[-1].startswith("farcast: ")
        assert "space" in said.splitlines()[-1]
        assert "Traceback" not in said
        subprocess.run(["mount", "-o", "remount,size=64m", small], check=True)
        trainer = start("train", "--out", "small/run", "--resume", where=tmp_path)
        deadline = time.monotonic() + 200
        while not list(small.glob("run/store/fleet/steps/*.json")):
            assert time.monotonic() < deadline
            assert trainer.poll() is None, finish(trainer)[1]
            time.sleep(0.05)
        trainer.send_signal(signal.SIGTERM)
        status, said = finish(trainer)
        assert status == 0, said
        status, said = farcast("verify", "--store", "small/run/store", where=tmp_path)
        assert status == 0, said
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_run_survives_ctrl_c_and_a_killed_trainer(tmp_path: Path) -> None:
    """Three sittings: stopped in order, trainer lost, finished. Everything counts once."""
    run, steps = tmp_path / "run", 12
    demo = start("demo", "--model", "tiny", "--steps", str(steps), "--out", "run", where=tmp_path)
    wait_for_steps(run, 3, demo)
    demo.send_signal(signal.SIGINT)
    status, said = finish(demo)
    assert status == 130, said + logs(run)
    assert "farcast demo --resume --out run" in said
    stopped_at = steps_taken(run)
    assert stopped_at < steps

    demo = start("demo", "--resume", "--out", "run", "--no-kill", where=tmp_path)
    wait_for_steps(run, stopped_at + 3, demo)
    (trainer,) = [c for c in psutil.Process(demo.pid).children() if "train" in c.cmdline()]
    trainer.kill()
    status, said = finish(demo)
    assert status not in (0, 130), said
    assert "trainer" in said

    status, said = farcast("demo", "--resume", "--out", "run", "--json", "out.json", where=tmp_path)
    assert status == 0, said + logs(run)
    out = json.loads((tmp_path / "out.json").read_text())
    assert (out["steps"], out["differences"], out["trainer_resumed"]) == (steps, [], 2)
    assert out["versions_published"] == out["versions_verified"] >= steps + 1
    assert out["trajectories_submitted"] == out["trajectories_consumed"] + out["trajectories_stale"]
    records = sorted((run / "store" / "fleet" / "steps").iterdir())
    in_order = [json.loads(path.read_text()) for path in records][: stopped_at + 2]
    assert [r["step"] for r in in_order] == list(range(stopped_at + 2)), "Ctrl-C loses no step"
