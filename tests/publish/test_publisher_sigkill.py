"""A trainer killed with SIGKILL at random moments, again and again, on a real file system:
every version that is kept rebuilds exactly, and each restart goes on where the last was stopped.
"""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farcast.lineage import parse_version_key
from farcast.store import open_store
from farcast.store.archive import Archive
from version_world import RUN, bits_of, keys, rebuilt, tensors

_TRAINER = """
import sys
from farcast.publish import Publisher
from farcast.store import open_store
from version_world import RUN, tensors
publisher = Publisher(
    open_store(sys.argv[1]), RUN, anchor_every=4, squash=2, part_bytes=300, workers=2
)
collect = sys.argv[2] == "collect"
step = -1 if publisher.newest is None else publisher.newest.version
print("ready", flush=True)
while True:
    step += 1
    if step % 3:
        publisher.publish(tensors(step), step=step)
    else:
        publisher.publish_async(tensors(step), step=step)
    if collect and step % 2:
        publisher.collect_garbage(keep=2, grace=0.0)
"""

KILLS = 5


@pytest.mark.parametrize("mode", ["keep all", "collect"])
def test_a_trainer_killed_at_random_moments(tmp_path: Path, mode: str) -> None:
    chance = random.Random(5)
    store = open_store(tmp_path)
    env = {"PYTHONPATH": str(Path(__file__).parent.parent), "PATH": "", "OMP_NUM_THREADS": "1"}
    seen, kills = -1, 0
    while kills < KILLS or seen < KILLS:  # a busy machine needs more tries
        kills += 1
        assert kills < 100
        command = [sys.executable, "-c", _TRAINER, str(tmp_path), mode]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as trainer:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == b"ready\n"
            time.sleep(chance.uniform(0.0, 0.25))
            trainer.send_signal(signal.SIGKILL)
        newest = Archive(store, RUN).newest()
        now = -1 if newest is None else newest.version
        assert now >= seen
        seen = now
        found = [parse_version_key(key) for key in keys(store, "versions/")]
        if newest is None:
            assert found == []
            continue
        # A collection that was stopped leaves versions without their anchor below the last one.
        first = 0 if mode == "keep all" else newest.anchor_version
        assert found[-1] == now
        assert [v for v in found if v is not None and v >= first] == list(range(first, now + 1))
        for version in range(first, now + 1):
            assert rebuilt(store, version) == bits_of(tensors(version))
