"""One step on whole groups: packs -> objective -> gradients -> optimizer, `updates_per_step` times.

The proximal log-probs are those of the first pass, before anything moved, so no objective needs
a forward pass of its own.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from farcast.config import TrainConfig
from farcast.train.objectives import (
    LossInputs,
    LossOutputs,
    Objective,
    StepSize,
    evaluate,
    fresh_enough,
)
from farcast.train.packing import Pack, pack_group, token_ages
from farcast.trajectory import Trajectory


class Learner(Protocol):
    """What an update needs of a policy."""

    def logprobs(self, pack: Pack) -> torch.Tensor:
        """Log-probs [N] of the pack's targets, with a graph behind them."""
        ...

    def step(self, step: int) -> float:
        """Move along the gathered gradients; returns their norm before clipping."""
        ...


class UpdateReport(NamedTuple):
    """What one step did. Means are over the tokens that entered."""

    loss: float
    kl: float
    clipped: float
    entered: int
    """Tokens in the last update's loss."""
    masked: int
    """Tokens that a rule kept out."""
    left_out: int
    """Tokens kept out since a number was not finite."""
    tokens: int
    """Tokens in the loss of all groups, those of groups without a gradient included."""
    grad_norm: float


def update(
    learner: Learner,
    groups: Sequence[Sequence[Trajectory]],
    objective: Objective,
    config: TrainConfig,
    *,
    version: int,
    step: int,
) -> UpdateReport:
    """Train on `groups` under the trainer's `version`; this is optimizer step `step`, from 1."""
    size = step_size(groups, version=version, bound=config.mask_staleness)
    packs = [pack for group in groups for pack in _packs(group, objective, version)]
    proximal: list[torch.Tensor] = []
    outputs: list[LossOutputs] = []
    grad_norm = 0.0
    for number in range(config.updates_per_step):
        outputs.clear()
        for index, pack in enumerate(packs):
            logprobs = learner.logprobs(pack)
            if number == 0:
                proximal.append(logprobs.detach())
            inputs = loss_inputs(pack, logprobs, proximal[index], objective, config, size)
            out = evaluate(objective.surrogate, inputs)
            out.loss.backward()
            outputs.append(out._replace(loss=out.loss.detach()))
        grad_norm = learner.step(step)
    return _report(outputs, groups, grad_norm)


def step_size(
    groups: Sequence[Sequence[Trajectory]], *, version: int, bound: int | None
) -> StepSize:
    """Tokens in the loss that are young enough, and answers, of all groups."""
    tokens = sum(
        in_loss and (bound is None or age <= bound)
        for group in groups
        for member in group
        for in_loss, age in zip(member.loss_mask, token_ages(member, version), strict=True)
    )
    return StepSize(tokens=tokens, answers=sum(map(len, groups)))


def loss_inputs(
    pack: Pack,
    logprobs: torch.Tensor,
    proximal: torch.Tensor,
    objective: Objective,
    config: TrainConfig,
    size: StepSize,
) -> LossInputs:
    """A pack's columns as the objective takes them, where the log-probs are."""
    device = logprobs.device
    return LossInputs(
        logprobs=logprobs,
        proximal=proximal,
        behaviour=pack.behaviour.to(device),
        advantages=pack.advantages.to(device),
        weights=objective.averaging(pack.lengths, size).to(device),
        keep=fresh_enough(pack.ages, config.mask_staleness).to(device),
    )


def _packs(group: Sequence[Trajectory], objective: Objective, version: int) -> Iterator[Pack]:
    rewards = torch.tensor([member.reward for member in group])
    if bool((rewards == rewards[0]).all()):
        return  # no member is better than another: all advantages are zero
    yield from pack_group(group, objective.advantages(rewards).tolist(), version=version)


def _report(
    outputs: Sequence[LossOutputs], groups: Sequence[Sequence[Trajectory]], grad_norm: float
) -> UpdateReport:
    entered = max(sum(out.tokens for out in outputs), 1)
    return UpdateReport(
        loss=sum(float(out.loss) for out in outputs),
        kl=sum(out.kl for out in outputs) / entered,
        clipped=sum(out.clipped for out in outputs) / entered,
        entered=sum(out.tokens for out in outputs),
        masked=sum(out.masked for out in outputs),
        left_out=sum(out.left_out for out in outputs),
        tokens=sum(sum(member.loss_mask) for group in groups for member in group),
        grad_norm=grad_norm,
    )
