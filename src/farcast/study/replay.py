"""Masters along a recorded run, under an optimizer and any rates of one's own.

Along the way the weights are those of the recorded run: what a rate much larger than its own would
have made of the gradients, this does not say. At the run's own optimizer and rate it is that run.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch

from farcast.config import TrainConfig
from farcast.study.directions import OptimizerKind, directions_of, rates, scale_of
from farcast.study.streams import Stream

Tensors = dict[str, torch.Tensor]


class Moment(NamedTuple):
    """One step at rate 1: what all steps before took off the masters, what this one takes, and
    what the one before took at the same warm-up, which the optimizer's state before this step
    tells; None at the first step."""

    step: int
    start: Mapping[str, torch.Tensor]
    taken: Mapping[str, torch.Tensor]
    now: Mapping[str, torch.Tensor]
    told: Mapping[str, torch.Tensor] | None

    def masters(self, lr: float, kind: OptimizerKind, hidden: Collection[str]) -> "Hop":
        """This step at the rate `lr`, of the given scale."""
        base, target, moved = {}, {}, {}
        told: Tensors | None = None if self.told is None else {}
        for name, start in self.start.items():
            rate = lr * scale_of(kind, name, start.shape, hidden)
            base[name] = start.sub(self.taken[name], alpha=rate)
            moved[name] = self.now[name] * rate
            target[name] = base[name] - moved[name]
            if self.told is not None and told is not None:
                told[name] = self.told[name] * rate
        return Hop(self.step, base, target, moved, told)


class Hop(NamedTuple):
    """Masters before and after a step, the step, and the step as it was foretold."""

    step: int
    base: Tensors
    target: Tensors
    moved: Tensors
    told: Tensors | None


def replay(
    stream: Stream,
    kind: OptimizerKind,
    config: TrainConfig,
    *,
    steps: int,
    names: Collection[str] | None = None,
    fresh: bool = False,
) -> Iterator[Moment]:
    """The first `steps` moments, of the followed tensors among `names`. With `fresh` masters begin
    as a checkpoint loads them, in the middle of their cells."""
    warmup = stream.record.settings.warmup
    hidden = stream.hidden
    start = {n: t for n, t in stream.start().items() if names is None or n in names}
    if fresh:
        start = {name: tensor.to(torch.bfloat16).float() for name, tensor in start.items()}
    rule = directions_of(kind, config, hidden)
    nothing = {name: torch.zeros(()).expand(tensor.shape) for name, tensor in start.items()}
    taken = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    last: Tensors = {}
    for step, gradients in enumerate(stream.gradients(steps), start=1):
        share = rates(1.0, warmup, step)
        # As torch's optimizers do, what has no gradient is left where it is, state included.
        direction = {name: rule(name, gradients[name]) for name in start if name in gradients}
        now = {name: direction.get(name, zeros) * share for name, zeros in nothing.items()}
        known = last.keys() == start.keys()
        told = {name: tensor * share for name, tensor in last.items()} if known else None
        yield Moment(step, start, taken, now, told)
        for name, tensor in now.items():
            taken[name] += tensor
        last |= direction
