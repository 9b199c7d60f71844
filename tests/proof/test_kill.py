"""SIGKILL at every store call and at every change of a file, in publish and in sync: nothing torn
is ever visible, and the next start goes on with exact bits. See `killer`."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy

from farcast.lineage import parse_version_key
from farcast.publish import Publisher
from farcast.replica import CheckpointDirectory, Subscriber
from farcast.replica.layout import SINGLE, read_layout
from farcast.store import Store, open_store
from farcast.store.archive import Archive
from version_world import RUN, bits_of, keys, plain, tensors

HERE = Path(__file__).parent
SHARD = 600
EACH = (pytest.mark.full, pytest.mark.timeout(1200))


class Killer:
    """The process of `killer.py`."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(self, job: str, folder: Path, moment: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"job": job, "folder": str(folder), "moment": moment}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    env = {"PYTHONPATH": str(HERE.parent), "PATH": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "killer.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield Killer(process)
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A run of four versions, the second and the fourth published in full."""
    folder = tmp_path / "begun"
    folder.mkdir()
    publish(open_store(folder / "store"), 4)
    return folder


def publish(store: Store, versions: int) -> None:
    with Publisher(store, RUN, anchor_every=2, squash=2, part_bytes=300, workers=1) as trainer:
        for step in range(versions):
            trainer.publish(tensors(step), step=step)


def moments_of(killer: Killer, job: str, begun: Path, tmp_path: Path) -> int:
    """How many there are: the job runs once to its end."""
    folder = shutil.copytree(begun, tmp_path / "counted")
    told = killer.run(job, folder, 0)
    assert not told["killed"]
    return int(told["moments"])


def kill_each(
    killer: Killer, job: str, begun: Path, tmp_path: Path, every: int
) -> Iterator[tuple[int, Path]]:
    """Folders in which `job` was killed, at every `every`-th moment."""
    last = moments_of(killer, job, begun, tmp_path)
    assert last > 80, "calls are watched"
    for moment in range(1, last + 1, every):
        folder = shutil.copytree(begun, tmp_path / f"{job}-{moment}", symlinks=True)
        assert killer.run(job, folder, moment)["killed"], moment
        yield moment, folder
        shutil.rmtree(folder)


@pytest.mark.parametrize("every", [29, pytest.param(1, marks=EACH)])
def test_a_publisher_killed_anywhere(
    killer: Killer, begun: Path, tmp_path: Path, every: int
) -> None:
    for moment, folder in kill_each(killer, "publish", begun, tmp_path, every):
        store = open_store(folder / "store")
        newest = require_exact(store, moment)
        assert 3 <= newest <= 5, moment
        assert not killer.run("publish", folder, 0)["killed"]
        assert require_exact(store, moment) == newest + 2
        leftovers = [p for p in (folder / "store").rglob("*") if p.name.endswith(".tmp")]
        assert not leftovers, moment


def require_exact(store: Store, moment: int) -> int:
    """Every version from the oldest anchor that the newest needs rebuilds; returns the newest."""
    archive = Archive(store, RUN, workers=1)
    newest = archive.newest()
    assert newest is not None
    found = [v for key in keys(store, "versions/") if (v := parse_version_key(key)) is not None]
    assert found[-1] == newest.version, moment
    for version in range(newest.anchor_version, newest.version + 1):
        step = archive.manifest(version).step
        assert plain(archive.rebuild(version)) == bits_of(tensors(step)), (moment, version)
    return newest.version


@pytest.mark.parametrize("start", [None, 1])
@pytest.mark.parametrize("every", [11, pytest.param(1, marks=EACH)])
def test_a_folder_whose_sync_is_killed_anywhere(
    killer: Killer, begun: Path, tmp_path: Path, every: int, start: int | None
) -> None:
    """A folder at version 1, or none: what an engine loads is whole at every moment."""
    store = open_store(begun / "store")
    if start is not None:
        target = CheckpointDirectory(begun / "model", max_shard_bytes=SHARD)
        Subscriber(store, RUN, target, workers=1).sync(to=start)
    whole = [bits_of(tensors(version)) for version in (start, 3) if version is not None]
    for moment, folder in kill_each(killer, "sync", begun, tmp_path, every):
        held = load(folder / "model")
        assert (held is None and start is None) or (held and bits_of(held) in whole), moment
        assert not killer.run("sync", folder, 0)["killed"]
        after = load(folder / "model")
        assert after is not None
        assert bits_of(after) == bits_of(tensors(3)), moment
        require_tidy(folder / "model", moment)


def load(folder: Path) -> dict[str, Any] | None:
    """As an engine does it; None for a folder without a model."""
    if (folder / SINGLE).exists():
        return safetensors.numpy.load_file(folder / SINGLE)
    if not folder.exists() or not (layout := read_layout(folder)).where:
        return None
    shards = {name: safetensors.numpy.load_file(folder / name) for name in layout.shards}
    return {name: shards[file][name] for name, file in layout.where.items()}


def require_tidy(folder: Path, moment: int) -> None:
    """Only the model's own files, and nothing staged."""
    layout = read_layout(folder)
    used = {*layout.shards, "model.safetensors.index.json"}
    stray = {p.name for p in folder.iterdir() if p.is_file()} - used
    assert not stray, (moment, stray)
    assert not list((folder / ".farcast" / "staging").iterdir()), moment
