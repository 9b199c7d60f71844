"""One step on whole groups: packs -> objective -> gradients -> optimizer, `updates_per_step` times.

The proximal log-probs are those of the first pass, before anything moved, so no objective needs
a forward pass of its own.

A sample for which this model computes a number that is not finite is left out and counted: through
the graph its gradient would reach every weight, even with a loss of zero. That takes a second pass
over its pack, which ranks in step cannot take one by one; there such a step changes nothing.
"""

from collections.abc import Callable, Iterator, Sequence
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
from farcast.train.packing import Pack, pack_group, token_ages, without
from farcast.train.team import Team
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
    """Tokens kept out since a number was not finite, theirs or another of the same sample."""
    largest_ratio: float
    """Of current to behaviour probability, among the tokens that entered; 0 without one."""
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
    team: Team | None = None,
    before_moving: Callable[[], None] = lambda: None,
) -> UpdateReport:
    """Train on `groups` under the trainer's `version`; this is optimizer step `step`, from 1.

    Every rank of a `team` gets all groups, and computes its share of the packs. `before_moving` is
    called once, with the gradients there and every weight and moment still as it was.
    """
    team = team or Team()
    size = step_size(groups, version=version, bound=config.mask_staleness)
    packs = _share([pack for group in groups for pack in _packs(group, objective, version)], team)
    proximal: dict[int, torch.Tensor] = {}
    outputs: list[LossOutputs] = []
    grad_norm, lost = 0.0, 0
    for number in range(config.updates_per_step):
        outputs.clear()
        for index, (whole, counts) in enumerate(packs):
            pack, kept, logprobs = _computed(learner, whole, team)
            packs[index] = (pack, counts)
            lost += len(whole.targets) - len(pack.targets)
            if logprobs is None:
                continue
            before = proximal.get(index)
            mine = logprobs.detach() if before is None else before[kept.to(before.device)]
            proximal[index] = mine
            inputs = loss_inputs(pack, logprobs, mine, objective, config, size)
            if not counts:
                inputs = inputs._replace(keep=torch.zeros_like(inputs.keep))
            out = evaluate(objective.surrogate, inputs)
            (out.loss * team.size).backward()  # FSDP averages over ranks
            if counts:
                outputs.append(out._replace(loss=out.loss.detach()))
        if number == 0:
            before_moving()
        grad_norm = learner.step(step)
    return _report(outputs, groups, grad_norm, lost, team)


def _computed(
    learner: Learner, pack: Pack, team: Team
) -> tuple[Pack, torch.Tensor, torch.Tensor | None]:
    """A pass over the pack without the samples that this model cannot compute; which targets
    stayed, and their log-probs, None if no sample did."""
    logprobs = learner.logprobs(pack)
    if team.size > 1 or _is_finite(logprobs):
        return pack, torch.ones(len(pack.targets), dtype=torch.bool), logprobs
    pack, kept = without(pack, _broken_members(learner, pack))
    logprobs = learner.logprobs(pack)
    if not _is_finite(logprobs):  # each alone can be computed, together they can't
        pack, _ = without(pack, set(pack.owners.tolist()))
        kept = torch.zeros_like(kept)
    return pack, kept, logprobs if len(pack.targets) else None


def _broken_members(learner: Learner, pack: Pack) -> set[int]:
    """Found by a pass over each alone: a mask does not keep what is not finite from the others."""
    members = set(pack.owners.tolist())
    with torch.no_grad():
        return {
            member
            for member in members
            if not _is_finite(learner.logprobs(without(pack, members - {member})[0]))
        }


def _is_finite(logprobs: torch.Tensor) -> bool:
    return bool(logprobs.detach().isfinite().all())


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
    rewards = torch.tensor([float(member.reward) for member in group])
    if bool((rewards == rewards[0]).all()):
        return  # no member is better than another: all advantages are zero
    yield from pack_group(group, objective.advantages(rewards).tolist(), version=version)


def _share(packs: Sequence[Pack], team: Team) -> list[tuple[Pack, bool]]:
    """This rank's packs, as many as every other rank has: all take the same collectives. Those
    that only make up the number do not count."""
    rounds = -(-len(packs) // team.size)
    numbers = [team.rank + team.size * i for i in range(rounds)]
    return [(packs[n], True) if n < len(packs) else (packs[0], False) for n in numbers]


def _report(
    outputs: Sequence[LossOutputs],
    groups: Sequence[Sequence[Trajectory]],
    grad_norm: float,
    lost: int,
    team: Team,
) -> UpdateReport:
    columns = [
        (float(out.loss), out.kl, out.clipped, out.tokens, out.masked, out.left_out)
        for out in outputs
    ]
    own = [sum(column) for column in zip(*columns, strict=True)] if columns else [0.0] * 6
    largest = max((out.largest_ratio for out in outputs), default=0.0)
    rows = team.rows([*own, largest])
    *sums, _ = map(sum, zip(*rows, strict=True))
    loss, kl, clipped, entered, masked, left_out = sums
    return UpdateReport(
        loss=loss,
        kl=kl / max(entered, 1),
        clipped=clipped / max(entered, 1),
        entered=int(entered),
        masked=int(masked),
        left_out=int(left_out) + lost,
        largest_ratio=max(row[-1] for row in rows),
        tokens=sum(sum(member.loss_mask) for group in groups for member in group),
        grad_norm=grad_norm,
    )
