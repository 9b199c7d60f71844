"""A trainer killed with SIGKILL at random moments, again and again, on a real file system:
every committed version rebuilds exactly, and each restart goes on where the last one was stopped.
"""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from farcast.store import open_store
from farcast.store.archive import Archive
from version_world import RUN, bits_of, keys, rebuilt, tensors

_TRAINER = """
import sys
from farcast.publish import Publisher
from farcast.store import open_store
from version_world import RUN, tensors
publisher = Publisher(open_store(sys.argv[1]), RUN, anchor_every=4, part_bytes=300, workers=2)
step = -1 if publisher.newest is None else publisher.newest.version
print("ready", flush=True)
while True:
    step += 1
    if step % 3:
        publisher.publish(tensors(step), step=step)
    else:
        publisher.publish_async(tensors(step), step=step).result()
"""

KILLS = 6


def test_a_trainer_killed_at_random_moments(tmp_path: Path) -> None:
    chance = random.Random(5)
    store = open_store(tmp_path)
    env = {"PYTHONPATH": str(Path(__file__).parent.parent), "PATH": "", "OMP_NUM_THREADS": "1"}
    seen = -1
    for _ in range(KILLS):
        command = [sys.executable, "-c", _TRAINER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as trainer:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == b"ready\n"
            time.sleep(chance.uniform(0.0, 0.25))
            trainer.send_signal(signal.SIGKILL)
        newest = Archive(store, RUN).newest()
        now = -1 if newest is None else newest.version
        assert now >= seen
        seen = now
    assert seen > KILLS
    assert len(keys(store, "versions/")) == seen + 1
    for version in range(seen + 1):
        assert rebuilt(store, version) == bits_of(tensors(version))
