"""A tool environment trains: a scripted sampler whose log-probs are the model's own, the worker
loop, the store, and the real trainer."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.models import tiny_folder  # noqa: E402
from tests.train_world import RUN, TrainWorld  # noqa: E402

from farcast import TrajectorySender  # noqa: E402
from farcast.config import SamplingConfig, TaskConfig  # noqa: E402
from farcast.engines.base import Completion  # noqa: E402
from farcast.engines.chat import ChatCodec  # noqa: E402
from farcast.rollout import Calculator, Worker  # noqa: E402
from farcast.trajectory import Trajectory, TrajectoryReceiver  # noqa: E402
from farcast.types import PolicySpan, VersionRef  # noqa: E402

GROUPS = 4


def logprobs(module: Any, ids: Sequence[int], start: int) -> list[float]:
    """Of the tokens from `start` on."""
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([list(ids)])).logits[0].float()
    rows = torch.log_softmax(logits[:-1], -1)
    return [float(rows[i - 1, ids[i]]) for i in range(start, len(ids))]


class Scripted:
    """Even rows of a group compute and then repeat what the tool said, odd ones guess."""

    def __init__(self, module: Any, codec: ChatCodec, version: VersionRef) -> None:
        self.module = module
        self.codec = codec
        self.version = version

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, *, seed: int
    ) -> list[Completion]:
        assert sampling.temperature == 1.0
        assert seed >= 0
        return [self._say(prompt, row) for row, prompt in enumerate(prompts)]

    def _say(self, prompt: Sequence[int], row: int) -> Completion:
        shown = self.codec.decode(prompt)
        sum_ = re.search(r"What is (.*?)\?", shown)
        said = re.search(r"\n(-?\d+)\n>$", shown)
        assert sum_ is not None
        text = "<answer>12</answer>" if row % 2 else f"<calc>{sum_.group(1)}</calc>"
        if said is not None:
            text = f"<answer>{said.group(1)}</answer>"
        ids = self.codec._tokenizer(text)["input_ids"] + list(self.codec.eos_ids)
        values = logprobs(self.module, [*prompt, *ids], len(prompt))
        whole = PolicySpan(0, len(ids), self.version.version, self.version.root)
        return Completion(tuple(ids), tuple(values), (whole,), "stop")


def test_a_tool_environment_trains(tmp_path: Path) -> None:
    world = TrainWorld(tmp_path, steps=2, learning_rate=1e-3)
    trainer, policy, publisher = world.trainer()
    zero = publisher.publish(policy.served(), 0)
    codec = ChatCodec.from_folder(tiny_folder(), TaskConfig())
    engine = Scripted(policy.module, codec, zero)
    reports: list[Any] = []
    Worker(
        engine,
        Calculator(),
        codec,
        TrajectorySender(world.store, RUN, "tools"),
        group_size=4,
        task=TaskConfig(name="calculator"),
        sampling=SamplingConfig(max_new_tokens=64, batch_groups=1),
        report=reports.append,
        stop=lambda: len(reports) >= GROUPS,
    ).run()
    reader = TrajectoryReceiver(world.store, RUN)
    home = reader.consume(100)
    reader.close()
    assert [t.reward for t in home] == [1.0, 0.0, 1.0, 0.0] * GROUPS

    before = {t.id: mean_by_role(policy.module, t) for t in home}
    trainer.run()
    assert sum(len(r.consumed) for r in world.reports) == 4 * GROUPS
    gained = [
        {role: value - before[t.id][role] for role, value in after.items()}
        for t in home
        for after in [mean_by_role(policy.module, t)]
    ]
    called = [one["tool_call"] for one in gained if "tool_call" in one]
    guessed = [one["model"] for one in gained if "tool_call" not in one]
    assert len(called) == len(guessed) == 2 * GROUPS
    assert min(called) > max(guessed), "calls became likelier than guesses, in every episode"
    assert min(called) > 0


def mean_by_role(module: Any, t: Trajectory) -> dict[str, float]:
    """Mean log-prob of what the model wrote, by the role of the turn."""
    values = [0.0, *logprobs(module, t.token_ids, 1)]
    return {u.role: sum(values[u.start : u.end]) / (u.end - u.start) for u in t.model_turns}
