"""TRL's AsyncGRPOTrainer through its two protocols: the example runs, the adapters keep count."""

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tests.models import tiny_folder

from farcast import Publisher, TrajectorySender
from farcast.errors import TrajectoryError
from farcast.store import open_store
from farcast.store.archive import Archive
from trajectory_world import episode, group

TESTS = Path(__file__).parents[1]
with pytest.MonkeyPatch.context() as patch:
    # The folder tests/vllm would pass for the package of that name, which TRL looks for.
    patch.setattr(sys, "path", [entry for entry in sys.path if Path(entry).resolve() != TESTS])
    patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    pytest.importorskip("trl.experimental.async_grpo", reason="needs farcast[trl]")

from farcast.interop.trl import FarcastRollouts, FarcastTransfer  # noqa: E402

RUN = "run1"
EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_async_grpo.py"


def weights(value: float) -> Any:
    return iter([("a.weight", torch.full((4,), value)), ("b.weight", torch.ones(3))])


class World:
    def __init__(self, **settings: Any) -> None:
        self.store = open_store("memory://")
        self.transfer = FarcastTransfer(Publisher(self.store, RUN))
        self.rollouts = FarcastRollouts(
            self.store, RUN, self.transfer, **{"max_staleness": 2, **settings}
        )
        self.archive = Archive(self.store, RUN)
        self.syncs = 0

    def sync(self, value: float) -> None:
        """As TRL does it."""
        self.transfer.pause()
        self.transfer.send_weights(weights(value))
        self.transfer.resume()
        self.syncs += 1
        self.rollouts.update_model_version(self.syncs)
        self.transfer._overlapped.settle()

    def submit(self, name: str, version: int, **changes: Any) -> None:
        root = self.archive.manifest(version).root
        sender = TrajectorySender(self.store, RUN, "w0")
        members = group(name, 4, version=version, **changes)
        sender.submit_many(
            [replace(m, spans=tuple(replace(s, root=root) for s in m.spans)) for m in members]
        )

    def samples(self, count: int) -> list[Any]:
        return [self.rollouts.rollout_buffer.get(timeout=10) for _ in range(count)]


@pytest.fixture
def world() -> Any:
    world = World()
    yield world
    world.rollouts.stop()
    world.transfer.destroy()


def test_samples_say_how_many_syncs_old_they_are(world: World) -> None:
    world.sync(0.0)
    world.rollouts.start()
    world.submit("old", version=0)
    assert {s.model_version for s in world.samples(4)} == {1}
    world.sync(1.0)
    world.sync(2.0)
    world.submit("late", version=1)
    samples = world.samples(4)
    assert {s.model_version for s in samples} == {2}, "one sync behind the third"
    assert len({s.group_id for s in samples}) == 1


def test_tokens_and_log_probs_arrive_as_sampled_and_advantages_are_the_groups(
    world: World,
) -> None:
    world.sync(0.0)
    world.rollouts.start()
    world.submit("g", version=0)
    samples, sent = world.samples(4), [episode(f"g-{i}", version=0) for i in range(4)]
    for sample, one in zip(samples, sent, strict=True):
        assert sample.input_ids.tolist() == list(one.token_ids)
        assert sample.completion_mask.tolist() == list(map(int, one.loss_mask))
        assert sample.old_log_probs.tolist() == list(one.logprobs)
    rewards = np.array([s.metrics["reward"] for s in samples])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
    assert np.allclose([s.advantage for s in samples], expected)


def test_what_is_too_old_or_of_no_version_never_reaches_the_trainer(world: World) -> None:
    for value in range(5):
        world.sync(float(value))
    world.submit("stale", version=0)
    sender = TrajectorySender(world.store, RUN, "w1")
    sender.submit_many(group("made-up", 4, worker="w1", version=0))  # a root nobody published
    world.submit("fresh", version=4)
    world.rollouts.start()
    assert {s.model_version for s in world.samples(4)} == {5}
    deadline = time.monotonic() + 10
    while sum(world.rollouts.dropped.values()) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert world.rollouts.dropped == {"stale": 4, "invalid": 4, "partial": 0}
    assert world.rollouts.rollout_buffer.empty()


def test_the_first_sync_of_a_resumed_run_is_its_last_one(world: World) -> None:
    world.sync(0.0)
    world.sync(1.0)
    again = FarcastTransfer(Publisher(world.store, RUN))
    again.send_weights(weights(1.0))
    again.destroy()
    newest = world.archive.newest()
    assert newest is not None
    assert (newest.version, newest.step) == (1, 1)


def test_reading_stops_while_the_trainer_is_behind() -> None:
    world = World(ahead=4)
    world.sync(0.0)
    for number in range(6):
        world.submit(f"g{number}", version=0)
    world.rollouts.start()
    time.sleep(0.3)
    assert world.rollouts.rollout_buffer.qsize() == 4
    assert len({s.group_id for s in world.samples(24)}) == 6
    world.rollouts.stop()


def test_a_failure_of_the_reader_is_raised_in_the_trainer(world: World) -> None:
    world.rollouts._failure = TrajectoryError("The reader failed; see why.")
    with pytest.raises(TrajectoryError, match="see why"):
        world.rollouts.check_health(60)


def test_a_silent_store_is_raised_in_the_trainer(world: World) -> None:
    world.rollouts.check_health(60)
    world.rollouts._heard -= 100
    with pytest.raises(TrajectoryError, match="has not answered"):
        world.rollouts.check_health(60)


@pytest.mark.full
def test_the_example_trains(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("trl_async_grpo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example
    spec.loader.exec_module(example)
    rewards = example.main(tmp_path, steps=2, model=tiny_folder())
    assert len(rewards) == 2
    newest = Archive(open_store(tmp_path / "store"), "trl").newest()
    assert newest is not None
    assert (newest.version, newest.step) == (2, 2)
