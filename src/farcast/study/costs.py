"""What sticky rounding costs the policy: the whole model trained by GRPO, and its versions served
under several thresholds at once. At the run's end each is compared with plain rounding, on the
same questions: KL of the next token over the whole vocabulary, and reward. So is the policy that
the run began with: what a threshold costs is much if it is as far away."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from farcast.engines.decoding import Row as Answer
from farcast.rollout.environment import Task
from farcast.study.measuring import Line, counts_of, delta_bytes, full_bytes, moved_words
from farcast.study.rows import Row
from farcast.study.settings import STAGES
from farcast.study.setup import Setup, Tag
from farcast.study.stages import Sampler, make_course, make_policy
from farcast.train.policy import Policy

RECIPES = ("bf16", "bf16-round0.6", "bf16-round0.75", "bf16-round1")
"""Plain rounding first. All are bf16, so that one module can hold each of them."""


class _Asked(NamedTuple):
    task: Task
    prompt: tuple[int, ...]


def sticky_costs(setup: Setup) -> Iterator[Row]:
    """A row for each recipe at the run's last step, and one of step 0 for its beginning."""
    settings, spec = setup.settings, STAGES["grpo"]
    train = replace(setup.run.train, learning_rate=spec.lr, warmup_steps=settings.warmup)
    run = replace(setup.run, train=train)
    policy = make_policy(setup.model, run, from_scratch=False, seed=settings.seed)
    course = make_course("grpo", policy, setup.model, run, settings)
    lines = [Line(recipe, policy.masters()) for recipe in RECIPES]
    start = lines[0].served
    for step in range(1, settings.cost_steps):
        setup.progress(f"sticky: trained, step {step}", step, settings.cost_steps)
        course.step(step, policy)
        for line in lines:
            line.advance(policy.masters())  # what it returns goes at once: whole models are large
    course.step(settings.cost_steps, policy)
    before = [line.advance(policy.masters()) for line in lines]
    judge = _Judge(policy, Sampler(policy.module, setup.model, run, settings), settings.answers)
    tag = Tag("sticky", settings.model, "grpo", "adamw", spec.lr, loop="closed")
    versions = [(0, lines[0].recipe, start, start)]
    versions += [
        (settings.cost_steps, line.recipe, old, line.served)
        for line, old in zip(lines, before, strict=True)
    ]
    for step, recipe, old, new in versions:
        counts = counts_of(old, new, recipe)
        kl, reward = judge.verdict(new)
        yield tag.row(
            step,
            recipe.name,
            weights=counts.weights,
            changed_fraction=counts.fraction,
            bytes=delta_bytes(old, new),
            bytes_full=full_bytes(new),
            apart=_apart(lines[0].served, new),
            kl=kl,
            reward=reward,
        )


def _apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The share of elements with other bits."""
    found = [moved_words(tensor, other[name]) for name, tensor in one.items()]
    moved, count = 0, 0
    for part in found:
        moved += int(part.count_nonzero())
        count += part.numel()
    return moved / count


class _Judge:
    """Judges served tensors by the answers of the policy as it is, plainly rounded."""

    def __init__(self, policy: Policy, sampler: Sampler, count: int) -> None:
        self._module, self._sampler = policy.module, sampler
        asked = [sampler.task() for _ in range(count)]
        self._asked = [_Asked(task, prompt) for task, prompt, _ in asked]
        self._texts = [
            (each.prompt, answer.token_ids)
            for each, answer in zip(self._asked, self._answers(), strict=True)
        ]
        self._plain = self._logprobs()

    def verdict(self, served: dict[str, torch.Tensor]) -> tuple[float, float]:
        """Nats a token from plain rounding to `served`, and the mean reward of its own answers."""
        with torch.no_grad():
            for name, param in self._module.named_parameters():
                param.copy_(served[name])
        rewards = [
            self._sampler.reward(each.task, answer.token_ids)
            for each, answer in zip(self._asked, self._answers(), strict=True)
        ]
        pairs = list(zip(self._plain, self._logprobs(), strict=True))
        nats = sum(float((p.exp() * (p - q)).sum(dtype=torch.float64)) for p, q in pairs)
        return nats / sum(len(p) for p, _ in pairs), sum(rewards) / len(rewards)

    def _answers(self) -> list[Answer]:
        return self._sampler.answers([each.prompt for each in self._asked], 0, 0)

    def _logprobs(self) -> list[torch.Tensor]:
        """Of every token that might follow, [tokens of the answer, V] for each text."""
        return [self._of(prompt, ids) for prompt, ids in self._texts]

    def _of(self, prompt: tuple[int, ...], ids: list[int]) -> Any:
        with torch.no_grad():
            logits = self._module(
                input_ids=torch.tensor([[*prompt, *ids]]), logits_to_keep=len(ids) + 1
            ).logits[0, :-1]
        return torch.log_softmax(logits.float(), dim=-1)
