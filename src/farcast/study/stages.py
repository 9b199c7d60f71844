"""The stages that are compared, each small and real: gradients that the trainer's own policy,
objective and optimizer take.

    grpo          samples of the policy itself, scored by the model's task
    grpo_async    the same, learnt from `lag` steps after they were sampled
    sft           right answers to the same task's questions
    continued     text (see `corpus`), from the model's weights
    pretraining   the same text, from random weights

One process plays all parts. Masters begin spread over their cells (see `cells.spread`).
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from farcast.config import RunConfig
from farcast.engines.chat import ChatCodec
from farcast.engines.decoding import Row as Answer
from farcast.engines.decoding import decode
from farcast.engines.modules import empty_module, load_module
from farcast.errors import ConfigError, ScoringError
from farcast.rollout.environment import Task
from farcast.rollout.prompts import ask
from farcast.rollout.registry import make_environment
from farcast.rollout.seeds import seed_of
from farcast.study.cells import spread
from farcast.study.corpus import token_rows
from farcast.study.settings import STAGES, StageName, StudySettings
from farcast.train.objectives import objective_of
from farcast.train.policy import Policy
from farcast.train.update import Learner, update
from farcast.trajectory import Trajectory, Turn
from farcast.types import PolicySpan, VersionRef

RUN = "study"
_TRIES = 8
"""Questions drawn for a group before one without a gradient is taken."""
_IGNORED = -100
"""The label that transformers leaves out of a loss."""


class Course(Protocol):
    """What a stage learns from."""

    def step(self, number: int, learner: Learner) -> float:
        """Take step `number`, from 1; returns the mean reward, or the negative loss."""
        ...


def make_policy(folder: Path, run: RunConfig, *, from_scratch: bool, seed: int) -> Policy:
    """The model with its masters spread over their cells."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = empty_module(folder) if from_scratch else load_module(folder)
    with torch.no_grad():
        for index, param in enumerate(module.parameters()):
            param.copy_(spread(param, seed_of(seed, "spread", index)))
    return Policy(module, run.train)


def make_course(
    stage: StageName, policy: Policy, folder: Path, run: RunConfig, settings: StudySettings
) -> Course:
    """The stage's course for a policy that `make_policy` made."""
    sampler = Sampler(policy.module, folder, run, settings)
    if stage in ("grpo", "grpo_async"):
        return _Grpo(sampler, run, settings, STAGES[stage].lag)
    if stage == "sft":
        return _Answers(sampler, policy, settings)
    return _Text(policy, folder, settings)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder that `ChatCodec` accepted."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


class Sampler:
    """Questions of the model's task, and answers of a module to them."""

    def __init__(self, module: Any, folder: Path, run: RunConfig, settings: StudySettings) -> None:
        self._module = module
        self._run = run
        self._settings = settings
        self.codec = ChatCodec.from_folder(folder, run.task)
        self.environment = make_environment(run.task)
        self._tokenizer = load_tokenizer(folder)
        self._draws = 0

    def words(self, text: str) -> list[int]:
        """Token ids of a text by itself."""
        return [int(i) for i in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def task(self) -> tuple[Task, tuple[int, ...], int]:
        """The next question, its prompt, and its number."""
        self._draws += 1
        task = self.environment.task(seed_of(self._settings.seed, "task", self._draws))
        prompt = self.codec.encode_prompt(ask(self._run.task.instruction, task.question))
        return task, tuple(prompt), self._draws

    def group(self, version: int) -> list[Trajectory]:
        """Answers to one question, drawn until they earn different rewards."""
        members: list[Trajectory] = []
        for _ in range(_TRIES):
            task, prompt, number = self.task()
            answers = self.answers([prompt] * self._settings.members, number, version)
            members = [
                self._trajectory(task, prompt, answer, f"{number}-{m}", version)
                for m, answer in enumerate(answers)
            ]
            if len({member.reward for member in members}) > 1:
                break
        return members

    def answers(self, prompts: list[tuple[int, ...]], number: int, version: int) -> list[Answer]:
        """An answer to each prompt; the same for the same module and number."""

        @contextmanager
        def step() -> Iterator[VersionRef]:
            yield VersionRef(RUN, version, "0" * 64)

        return decode(
            self._module,
            prompts,
            self._run.sampling,
            eos_ids=frozenset(self.codec.eos_ids),
            pad_id=self.codec.pad_id,
            seed=seed_of(self._settings.seed, "sample", number),
            step=step,
        )

    def reward(self, task: Task, token_ids: list[int]) -> float:
        """What one answer earns; nothing where the task fails at it, or goes on after it."""
        try:
            score = self.environment.begin(task).reply(self.codec.decode(token_ids)).score
        except ScoringError:
            return 0.0
        return 0.0 if score is None else score.reward

    def _trajectory(
        self, task: Task, prompt: tuple[int, ...], answer: Answer, name: str, version: int
    ) -> Trajectory:
        start, count = len(prompt), len(answer.token_ids)
        return Trajectory(
            id=name,
            group_id=name.partition("-")[0],
            group_size=self._settings.members,
            worker_id="w",
            token_ids=(*prompt, *answer.token_ids),
            logprobs=(*(0.0,) * start, *answer.logprobs),
            loss_mask=(*(False,) * start, *(True,) * count),
            spans=(PolicySpan(start, start + count, version, "0" * 64),),
            turns=(
                Turn(role="user", start=0, end=start),
                Turn(role="model", start=start, end=start + count),
            ),
            reward=self.reward(task, answer.token_ids),
            finish_reason="stop" if answer.ended else "length",
        )


class _Grpo:
    """A queue of batches stands for replicas that are `lag` versions behind."""

    def __init__(self, sampler: Sampler, run: RunConfig, settings: StudySettings, lag: int) -> None:
        self._sampler, self._run = sampler, run
        self._groups, self._lag = settings.groups, lag
        self._waiting: deque[list[list[Trajectory]]] = deque()

    def step(self, number: int, learner: Learner) -> float:
        while len(self._waiting) <= self._lag:
            made = [self._sampler.group(number - 1) for _ in range(self._groups)]
            self._waiting.append(made)
        groups = self._waiting.popleft()
        objective = objective_of(self._run.train)
        update(learner, groups, objective, self._run.train, version=number - 1, step=number)
        rewards = [member.reward for group in groups for member in group]
        return sum(rewards) / len(rewards)


class _Answers:
    """Right answers; the loss is on their tokens alone."""

    def __init__(self, sampler: Sampler, policy: Policy, settings: StudySettings) -> None:
        self._sampler, self._module = sampler, policy.module
        self._count = settings.sequences * 2

    def step(self, number: int, learner: Learner) -> float:
        rows = [self._row() for _ in range(self._count)]
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.full((len(rows), longest), self._sampler.codec.pad_id)
        labels = torch.full_like(ids, _IGNORED)
        mask = torch.zeros_like(ids)
        for place, (row, shown) in enumerate(rows):
            ids[place, : len(row)] = torch.tensor(row)
            labels[place, shown : len(row)] = ids[place, shown : len(row)]
            mask[place, : len(row)] = 1
        return _descend(self._module, learner, number, ids, labels, mask)

    def _row(self) -> tuple[list[int], int]:
        task, prompt, _ = self._sampler.task()
        text = task.answer
        if self._sampler.environment.name == "letters":
            text *= 8
        ids = self._sampler.words(f" {text}")
        return [*prompt, *ids, *self._sampler.codec.eos_ids], len(prompt)


class _Text:
    """Pieces of the corpus, in an order that the seed decides."""

    def __init__(self, policy: Policy, folder: Path, settings: StudySettings) -> None:
        tokenizer = load_tokenizer(folder)
        self._module = policy.module
        self._rows = token_rows(tokenizer, settings.length)
        self._count = settings.sequences
        if len(self._rows) < self._count:
            raise ConfigError("The corpus is shorter than one batch; ask for shorter sequences.")
        generator = torch.Generator().manual_seed(seed_of(settings.seed, "text"))
        self._order = torch.randperm(len(self._rows), generator=generator)

    def step(self, number: int, learner: Learner) -> float:
        places = torch.arange((number - 1) * self._count, number * self._count)
        ids = self._rows[self._order[places % len(self._order)]]
        return _descend(self._module, learner, number, ids, ids, torch.ones_like(ids))


def _descend(
    module: Any,
    learner: Learner,
    number: int,
    ids: torch.Tensor,
    labels: torch.Tensor,
    mask: torch.Tensor,
) -> float:
    loss = module(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
    loss.backward()
    learner.step(number)
    return -float(loss.detach())


Take = Callable[[], None]


class Tapped:
    """A policy that shows its gradients before each step is made of them."""

    def __init__(self, policy: Policy, take: Take) -> None:
        self._policy, self._take = policy, take
        self.logprobs = policy.logprobs

    def step(self, step: int) -> float:
        self._take()
        return self._policy.step(step)
