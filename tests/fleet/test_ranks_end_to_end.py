"""Two ranks under torchrun and a worker: a run that `farcast verify` finds right."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.models import tiny_folder

from farcast.errors import ConfigError
from farcast.fleet.ranks import Place, place


@pytest.mark.full
@pytest.mark.timeout(900)
def test_torchrun_trains_resumes_and_verifies(tmp_path: Path) -> None:
    cache = str(tiny_folder().parent.parent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    python = [sys.executable, "-m"]
    trainer = [*python, "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    trainer += ["-m", "farcast", "train", "--out", str(tmp_path / "out"), "--cache", cache]
    store = str(tmp_path / "store")
    started = [*trainer, "--model", "tiny", "--steps", "2", "--store", store]
    with (
        subprocess.Popen(started, env=environment, start_new_session=True) as ranks,
        subprocess.Popen(
            [*python, "farcast", "worker", "--store", store, "--id", "w1"], env=environment
        ) as worker,
    ):
        try:
            assert ranks.wait(timeout=400) == 0
            assert worker.wait(timeout=60) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(ranks.pid, signal.SIGKILL)  # the ranks too, not only their launcher
            worker.kill()
    verify = subprocess.run([*python, "farcast", "verify", "--store", store], env=environment)
    assert verify.returncode == 0
    again = subprocess.run([*trainer, "--resume"], env=environment, timeout=400)
    assert again.returncode == 0  # nothing is left to do
    assert (tmp_path / "out" / "checkpoint-rank-0001").is_dir()


def test_what_torchrun_says_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert place() == Place(0, 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert place() == Place(1, 4)
    monkeypatch.setenv("WORLD_SIZE", "four")
    with pytest.raises(ConfigError, match="torchrun"):
        place()
