"""A TRL run that is killed goes on: what was read and not trained on comes again, nothing else."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from test_trl import EXAMPLE, RUN, World  # needs farcast[trl], or is skipped there
from tests.models import tiny_folder

from farcast.errors import FormatError, RunMismatchError
from farcast.interop.trl import FarcastRollouts
from farcast.interop.trl_resume import FILE, RolloutsInCheckpoint, newest_checkpoint
from farcast.store import open_store
from farcast.store.archive import Archive


class Trainer:
    """As TRL takes samples: those of the next batch before it trains on one, and one more where a
    batch was full."""

    def __init__(self, world: World, folder: Path, step: int = 0) -> None:
        self.world = world
        self.args = SimpleNamespace(output_dir=str(folder))
        self.state = SimpleNamespace(is_world_process_zero=True, global_step=step)
        self.callback = RolloutsInCheckpoint(world.rollouts)
        self.callback.on_train_begin(self.args, self.state, None)
        world.rollouts.start()
        self.ahead = self._take(1)
        self.batch = self._take(7)

    def step(self) -> list[str]:
        """The samples it trained on."""
        batch, self.batch = self.batch, [*self.ahead, *self._take(7)]
        self.ahead = self._take(1)
        self.callback.on_step_begin(self.args, self.state, None)
        self.state.global_step += 1
        self.callback.on_step_end(self.args, self.state, None)
        return [name for name in batch if name]

    def save(self) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        folder.mkdir(parents=True)
        (folder / "optimizer.pt").write_bytes(b"x" * 100)
        self.callback.on_save(self.args, self.state, None)

    def _take(self, count: int) -> list[str]:
        return [repr(sample.input_ids.tolist()) for sample in self.world.samples(count)]


def again(world: World, **settings: Any) -> World:
    """Another process on the same store."""
    world.rollouts.stop()
    world.rollouts = FarcastRollouts(
        world.store, RUN, world.transfer, **{"max_staleness": 2, **settings}
    )
    return world


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_a_resumed_run_trains_on_every_group(steps: int, tmp_path: Path) -> None:
    world = World()
    world.sync(0.0)
    for number in range(20):
        world.submit(f"g{number}", version=0)
    trainer = Trainer(world, tmp_path)
    trained = [name for _ in range(steps) for name in trainer.step()]
    trainer.save()
    for _ in range(2):
        trainer.step()  # of a run that is killed before it saves these
    found = newest_checkpoint(tmp_path)
    assert found == str(tmp_path / f"checkpoint-{steps}")
    trainer = Trainer(again(world), tmp_path, steps)
    more = [name for _ in range(11 - steps - 2) for name in trainer.step()]
    whole = trained + more
    assert set(whole) == set(_all(world)[: len(set(whole))]), "nothing is passed over"
    twice = len(whole) - len(set(whole))
    assert twice <= 8 + 4, "a batch, and the group at its border"
    world.rollouts.stop()
    world.transfer.destroy()


def _all(world: World) -> list[str]:
    """The samples of every group, in the order in which they are read."""
    world = again(world)
    world.rollouts.start()
    return [repr(sample.input_ids.tolist()) for sample in world.samples(80)]


def test_a_checkpoint_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for number in (9, 10, 11):
        (tmp_path / f"checkpoint-{number}").mkdir()
    (tmp_path / "checkpoint-x").mkdir()
    for number in (9, 10):
        (tmp_path / f"checkpoint-{number}" / FILE).write_bytes(b"")
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


@pytest.mark.parametrize("damage", ["nonsense", "run", "empty"])
def test_a_damaged_state_is_a_typed_error(damage: str, tmp_path: Path) -> None:
    world = World()
    world.sync(0.0)
    for number in range(6):
        world.submit(f"g{number}", version=0)
    trainer = Trainer(world, tmp_path)
    trainer.step()
    trainer.save()
    path = tmp_path / "checkpoint-1" / FILE
    if damage == "nonsense":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        held = msgspec.msgpack.decode(path.read_bytes())
        held["groups"] = [[]] if damage == "empty" else held["groups"]
        held["receiver"]["run_id"] = "other" if damage == "run" else RUN
        path.write_bytes(msgspec.msgpack.encode(held))
    with pytest.raises((FormatError, RunMismatchError)):
        Trainer(again(world), tmp_path, 1)
    world.transfer.destroy()


def test_without_checkpoints_no_group_is_held() -> None:
    world = World()
    world.sync(0.0)
    for number in range(6):
        world.submit(f"g{number}", version=0)
    world.rollouts.start()
    world.samples(24)
    assert not world.rollouts._handed
    world.rollouts.stop()
    world.transfer.destroy()


@pytest.mark.full
def test_the_example_goes_on_after_a_kill(tmp_path: Path) -> None:
    script = (
        "import importlib.util, sys; from pathlib import Path\n"
        "spec = importlib.util.spec_from_file_location('trl_async_grpo', sys.argv[1])\n"
        "example = importlib.util.module_from_spec(spec); sys.modules[spec.name] = example\n"
        "spec.loader.exec_module(example)\n"
        "print(example.main(Path(sys.argv[2]), steps=int(sys.argv[3]), model=Path(sys.argv[4])))\n"
    )
    env = {**os.environ, "PYTHONPATH": "", "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [sys.executable, "-c", script, str(EXAMPLE), str(tmp_path), "4", str(tiny_folder())]
    first = subprocess.Popen(command, env=env, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "trl" / "checkpoint-2" / FILE).exists():
            assert first.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    began = newest_checkpoint(tmp_path / "trl")
    assert began is not None
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert newest_checkpoint(tmp_path / "trl") == str(tmp_path / "trl" / "checkpoint-4")
    rewards = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(rewards) == 4, "those of the first life are in the trainer's own log"
    newest = Archive(open_store(tmp_path / "store"), "trl").newest()
    assert newest is not None
    assert newest.step >= 4
