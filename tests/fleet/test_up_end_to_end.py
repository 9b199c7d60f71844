"""`farcast up` over real processes, with a relay: one worker is killed in the middle, and nothing
that was acknowledged is lost or counts twice."""

import json
import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

from tests.models import tiny_folder

from farcast.fleet.registry import Registry
from farcast.store import Store, open_store
from farcast.trajectory import TrajectoryReceiver
from relay_world import Child, RelayProcess
from serving_world import wait_for

TOKEN = ("--relay-token-env", "FARCAST_TEST_TOKEN")


def process_of(up: Child, name: str) -> psutil.Process | None:
    for child in psutil.Process(up.process.pid).children(recursive=True):
        if name in child.cmdline() and "worker" in child.cmdline():
            return child
    return None


def acknowledged(store: Store, run_id: str) -> list[str]:
    """Every trajectory in the store, read as a trainer that begins anew would."""
    receiver = TrajectoryReceiver(store, run_id)
    found = []
    while batch := receiver.consume(1000):
        found += [trajectory.id for trajectory in batch]
    return found


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_worker_killed_under_up_is_made_good_and_everything_counts_once(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    store, out = open_store(url), tmp_path / "out"
    cache = str(tiny_folder().parent.parent)
    train = ("train", "--model", "tiny", "--steps", "8", "--store", url, "--out", str(out))
    trainer = Child(tmp_path, "trainer", *train, "--cache", cache)
    children = [trainer]
    try:
        relay = RelayProcess(tmp_path, url)
        children.append(relay)
        more = ("--relay", relay.url, *TOKEN, "--logs", str(tmp_path / "logs"))
        result = tmp_path / "up.json"
        up = Child(
            tmp_path,
            "up",
            *("up", "--store", url, "--min", "2", "--max", "2", "--name", "u"),
            *("--json", str(result), *more),
        )
        children.append(up)
        registry = Registry(store)

        def has_sent() -> bool:
            assert up.process.poll() is None, up.said()
            assert trainer.process.poll() is None, trainer.said()
            held = registry.replicas()
            return "u-1" in held and held["u-1"].record.trajectories > 0

        wait_for(has_sent, 240)
        before = process_of(up, "u-1")
        assert before is not None
        before.send_signal(signal.SIGKILL)
        wait_for(lambda: "u-1 crashed: signal 9" in up.said(), 30)
        assert trainer.process.wait(300) == 0, trainer.said()
        assert up.process.wait(120) == 0, up.said()
        assert relay.stop() == 0
    finally:
        for child in children:
            child.kill()
    assert "u-1 restarted" in up.said()
    told = json.loads(result.read_text())
    assert (told["crashed"], told["most_at_once"]) == (1, 2)
    _everything_counts_once(store, told["run_id"], tmp_path)
    read = relay.objects_read()
    assert read
    assert len(read) == len(set(read))


def _everything_counts_once(store: Store, run_id: str, folder: Path) -> None:
    steps = list(Registry(store).steps())
    consumed = Counter(id for step in steps for id in step.consumed)
    dropped = Counter(id for step in steps for ids in step.dropped.values() for id in ids)
    sent = Counter(acknowledged(store, run_id))
    assert consumed
    assert max((consumed + dropped).values()) == 1
    assert max(sent.values()) == 1
    assert set(consumed) | set(dropped) <= set(sent)
    # What the trainer's own account says, and what its steps say, is the same.
    verify = Child(folder, "verify", "verify", "--store", store.url)
    assert verify.process.wait(120) == 0, verify.said()
