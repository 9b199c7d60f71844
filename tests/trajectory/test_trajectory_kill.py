"""Workers and a trainer that die by SIGKILL at any moment: every acknowledged id counts once."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from farcast.store import open_store
from farcast.trajectory.encoding import MAX_BATCH_BYTES, decode_batch
from farcast.trajectory.keys import TRAJECTORIES_PREFIX

HELPERS = str(Path(__file__).parent.parent)

WORKER = """
import os, sys, time
from trajectory_world import RUN, group
from farcast.store import open_store
from farcast.trajectory import TrajectorySender
url, worker, log, start = sys.argv[1:]
sender = TrajectorySender(open_store(url), RUN, worker)
out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for n in range(1000):
    time.sleep(0.01)
    name = f"{worker}.{start}.{n}"
    sender.submit_many(group(name, 2, worker=worker))
    os.write(out, f"{name}-0\\n{name}-1\\n".encode())   # acknowledged: the loop saw it return
"""

TRAINER = """
import base64, json, os, sys
from trajectory_world import RUN, ids
from farcast.store import open_store
from farcast.trajectory import GroupBatcher, TrajectoryReceiver
url, path = sys.argv[1:]
receiver = TrajectoryReceiver(open_store(url), RUN, discover_seconds=0.05)
batcher = GroupBatcher(RUN, max_staleness=9, group_timeout=3600)
used = []
if os.path.exists(path):
    saved = json.load(open(path))
    receiver.restore(saved["receiver"])
    batcher.restore(base64.b64decode(saved["batcher"]), now=0)
    used = saved["used"]
until_empty = os.environ.get("UNTIL_EMPTY")
while True:
    arrived = receiver.consume(5)
    batcher.add(arrived, now=0)
    groups = batcher.take(batcher.whole_groups(), version=0, now=0)
    used += [i for g in groups for i in ids(list(g.members))]
    checkpoint = {"receiver": receiver.state(), "used": used,
                  "batcher": base64.b64encode(batcher.state(now=0)).decode()}
    with open(path + ".new", "w") as f:
        json.dump(checkpoint, f)
    os.replace(path + ".new", path)
    if until_empty and not arrived and not groups:
        break
"""


def launch(code: str, *args: str, **env: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": HELPERS, "OMP_NUM_THREADS": "1", **env}
    return subprocess.Popen([sys.executable, "-c", code, *args], env=environment)


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def wait_for_lines(logs: list[Path], lines: int) -> None:
    deadline = time.monotonic() + 30
    while any(not log.exists() or log.read_text().count("\n") < lines for log in logs):
        assert time.monotonic() < deadline, "the workers never began"
        time.sleep(0.05)


def test_killed_workers_and_a_killed_trainer_lose_and_double_nothing(tmp_path: Path) -> None:
    url, checkpoint, rng = (
        (tmp_path / "store").as_uri(),
        str(tmp_path / "checkpoint"),
        random.Random(5),
    )
    starts = 0

    def worker(name: str) -> subprocess.Popen[bytes]:
        nonlocal starts
        starts += 1
        return launch(WORKER, url, name, str(tmp_path / f"{name}.log"), str(starts))

    workers = {name: worker(name) for name in ("w0", "w1")}
    trainer = launch(TRAINER, url, checkpoint)
    try:
        wait_for_lines([tmp_path / "w0.log", tmp_path / "w1.log"], 20)
        for _ in range(6):
            time.sleep(rng.uniform(0.3, 0.9))
            victim = rng.choice(["w0", "w1", "trainer"])
            if victim == "trainer":
                kill(trainer)
                trainer = launch(TRAINER, url, checkpoint)
            else:
                kill(workers[victim])
                workers[victim] = worker(victim)
        time.sleep(0.8)
    finally:
        for process in (trainer, *workers.values()):
            kill(process)
    last = launch(TRAINER, url, checkpoint, UNTIL_EMPTY="1")
    try:
        assert last.wait(timeout=60) == 0
    finally:
        kill(last)

    used = json.loads(Path(checkpoint).read_text())["used"]
    logs = [log.read_text().split("\n")[:-1] for log in tmp_path.glob("w*.log")]
    acknowledged = {id_ for log in logs for id_ in log}
    store = open_store(url)
    stored = [
        t.id
        for info in store.list(TRAJECTORIES_PREFIX)
        for t in decode_batch(store.get(info.key, max_bytes=MAX_BATCH_BYTES)).trajectories
    ]
    assert len(acknowledged) > 50
    assert len(used) == len(set(used)), "counted twice"
    assert acknowledged <= set(used), "acknowledged and lost"
    assert sorted(used) == sorted(stored), "in the store and not counted"
