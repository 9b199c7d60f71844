"""What corrections for old tokens are worth: the same small job at several ages of its samples.

One process plays both sides. It keeps the last versions of the policy in a ring and samples from
old ones through the engine's own decoding, so log-probs and spans are as a replica would send them;
then the trainer's own update learns from them. Two ways to be late:

    lag      a whole answer was written by the version `staleness` before the trainer's
    spread   an answer begins under that version, and new ones arrive while it is written, so its
             last token is of the trainer's own

The model is random to begin with and far smaller than any real one, and the task is `letters`: this
ranks corrections, it does not predict a run.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch

from farcast.config import ObjectiveName, SamplingConfig, TrainConfig
from farcast.engines.decoding import Row, decode
from farcast.rollout.environment import Task
from farcast.rollout.letters import Letters
from farcast.train.objectives import Objective, objective_of
from farcast.train.policy import Policy
from farcast.train.update import update
from farcast.trajectory import Trajectory, Turn
from farcast.types import PolicySpan, VersionRef

RUN = "staleness"
STALENESS = (0, 2, 4, 8, 16)
SEEDS = (0, 1, 2)
STEPS = 40
LAGS = (4, 16)
"""Whole answers late are tried at fewer ages: a replica that follows is rarely so."""

GROUPS, MEMBERS, TOKENS = 4, 8, 10
MASK_BOUND = 4
EVALUATED = 128
"""Answers of the final policy that a result is the mean reward of."""

Way = Literal["lag", "spread"]
Progress = Callable[[str, int, int], None]


class Correction(NamedTuple):
    """A way to treat old tokens, by the settings that choose it."""

    title: str
    objective: ObjectiveName
    mask: int | None = None


CORRECTIONS = {
    "none": Correction("none (reinforce)", "reinforce"),
    "clip": Correction("clipped and truncated (dapo)", "dapo"),
    "tis": Correction("truncated weights (tis)", "tis"),
    "decoupled": Correction("decoupled PPO", "decoupled"),
    "mask": Correction(f"span mask, {MASK_BOUND} versions (dapo)", "dapo", mask=MASK_BOUND),
}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One run: mean reward of the final policy, and how it went on the way."""

    correction: str
    way: Way
    staleness: int
    seed: int
    reward: float
    curve: tuple[float, ...]
    """Mean reward of the samples of each step."""
    used: float
    """Share of tokens that entered the loss, of those with an advantage."""
    clipped: float
    seconds: float


def settings(correction: Correction, *, steps: int, seed: int) -> TrainConfig:
    """The same job for all: two updates a step, so that a clip around its start has work to do."""
    return TrainConfig(
        steps=steps,
        seed=seed,
        objective=correction.objective,
        mask_staleness=correction.mask,
        updates_per_step=2,
        learning_rate=2e-3,
        group_size=MEMBERS,
        groups_per_step=GROUPS,
    )


def cases(corrections: Sequence[str] = tuple(CORRECTIONS)) -> Iterator[tuple[str, Way, int]]:
    """Every combination that says something: of answers that are late as a whole, a mask keeps
    all or nothing."""
    for name in corrections:
        for staleness in STALENESS:
            yield name, "spread", staleness
        if CORRECTIONS[name].mask is None:
            for staleness in LAGS:
                yield name, "lag", staleness


def run_case(
    name: str, way: Way, staleness: int, seed: int, *, steps: int, tokenizer: Any
) -> Outcome:
    """Train once."""
    began = time.perf_counter()
    world = _World(settings(CORRECTIONS[name], steps=steps, seed=seed), tokenizer)
    for _ in range(steps):
        world.step(way, staleness)
    return Outcome(
        correction=name,
        way=way,
        staleness=staleness,
        seed=seed,
        reward=world.evaluate(),
        curve=tuple(world.curve),
        used=world.entered / max(world.scored, 1),
        clipped=sum(world.clipped) / max(len(world.clipped), 1),
        seconds=time.perf_counter() - began,
    )


def small_model(tokenizer: Any, seed: int) -> Any:
    """A Llama of about 90,000 parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


class _World:
    """One run: the policy, a sampler, and the last versions."""

    def __init__(self, config: TrainConfig, tokenizer: Any) -> None:
        self._config = config
        self._objective: Objective = objective_of(config)
        self._tokenizer = tokenizer
        self._policy = Policy(small_model(tokenizer, config.seed), config)
        self._sampler = small_model(tokenizer, config.seed).eval()
        self._task = Letters(count=TOKENS - 2)
        self._sampling = SamplingConfig(max_new_tokens=TOKENS)
        self._ring: list[list[torch.Tensor]] = []
        self._draws = 0
        self.version = 0
        self.curve: list[float] = []
        self.clipped: list[float] = []
        self.entered = self.scored = 0
        self._remember()

    def step(self, way: Way, staleness: int) -> None:
        """Sample from old versions, learn, and be one version further."""
        groups = self._sample(GROUPS, MEMBERS, self._ages(way, staleness))
        rewards = [member.reward for group in groups for member in group]
        self.curve.append(sum(rewards) / len(rewards))
        self.version += 1
        report = update(
            self._policy,
            groups,
            self._objective,
            self._config,
            version=self.version - 1,
            step=self.version,
        )
        self.clipped.append(report.clipped)
        self.entered += report.entered
        self.scored += report.entered + report.masked + report.left_out
        self._remember()

    def evaluate(self) -> float:
        """Mean reward of answers by the newest version."""
        groups = self._sample(EVALUATED // MEMBERS, MEMBERS, lambda _: 0)
        rewards = [member.reward for group in groups for member in group]
        return sum(rewards) / len(rewards)

    def _remember(self) -> None:
        params = [p.detach().clone() for p in self._policy.module.parameters()]
        self._ring = [*self._ring[-max(STALENESS) :], params]

    def _ages(self, way: Way, staleness: int) -> Callable[[int], int]:
        """The age of the version that writes the i-th token."""
        if way == "lag":
            return lambda _: staleness
        return lambda i: math.ceil(staleness * (TOKENS - 1 - min(i, TOKENS - 1)) / (TOKENS - 1))

    def _sample(
        self, groups: int, members: int, age_of: Callable[[int], int]
    ) -> list[list[Trajectory]]:
        seeds = [self._draws * 1000 + i for i in range(groups)]
        self._draws += 1
        tasks = [self._task.task(seed) for seed in seeds]
        prompts = [self._tokenizer.encode(f"{task.question}\n>") for task in tasks]
        written = 0

        @contextlib.contextmanager
        def step() -> Iterator[VersionRef]:
            nonlocal written
            age = min(age_of(written), self.version, len(self._ring) - 1)
            written += 1
            with torch.no_grad():
                for param, old in zip(
                    self._sampler.parameters(), self._ring[-1 - age], strict=True
                ):
                    param.copy_(old)
            yield VersionRef(RUN, self.version - age, "0" * 64)

        rows = decode(
            self._sampler,
            [prompt for prompt in prompts for _ in range(members)],
            self._sampling,
            eos_ids=frozenset([self._tokenizer.eos_token_id]),
            pad_id=self._tokenizer.pad_token_id,
            seed=self._config.seed * 100_003 + self._draws,
            step=step,
        )
        return [
            [
                self._trajectory(prompts[g], row, tasks[g], f"{self._draws}-{g}-{m}")
                for m, row in enumerate(rows[g * members : (g + 1) * members])
            ]
            for g in range(groups)
        ]

    def _trajectory(self, prompt: list[int], row: Row, task: Task, name: str) -> Trajectory:
        start, count = len(prompt), len(row.token_ids)
        text = self._tokenizer.decode(row.token_ids, skip_special_tokens=True)
        return Trajectory(
            id=name,
            group_id=name.rpartition("-")[0],
            group_size=MEMBERS,
            worker_id="w",
            token_ids=(*prompt, *row.token_ids),
            logprobs=(*(0.0,) * start, *row.logprobs),
            loss_mask=(*(False,) * start, *(True,) * count),
            spans=tuple(
                PolicySpan(start + i, start + i + 1, ref.version, ref.root)
                for i, ref in enumerate(row.versions)
            ),
            turns=(
                Turn(role="user", start=0, end=start),
                Turn(role="model", start=start, end=start + count),
            ),
            reward=self._task.score(task, text).reward,
            finish_reason="stop" if row.ended else "length",
        )


def run_all(
    cache: Path, *, steps: int = STEPS, seeds: Sequence[int] = SEEDS, progress: Progress
) -> list[Outcome]:
    """Every case with every seed."""
    from transformers import AutoTokenizer

    from farcast.train.models import TINY, prepare_model

    tokenizer = AutoTokenizer.from_pretrained(prepare_model(TINY, cache), local_files_only=True)
    todo = [(case, seed) for case in cases() for seed in seeds]
    outcomes = []
    for number, ((name, way, staleness), seed) in enumerate(todo):
        progress(f"{name} {way} {staleness}", number, len(todo))
        outcomes.append(run_case(name, way, staleness, seed, steps=steps, tokenizer=tokenizer))
    return outcomes
