"""What every objective is given, and what it gives back.

Shapes: N tokens in the loss of one pack, of any number of answers. Log-probs are natural logs.
Three policies speak about the same token: `behaviour` sampled it (the version in its span, so
tokens of one answer may differ), `proximal` is the trainer's own as the step begins, recomputed,
and the current one is being changed.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch

MAX_EXPONENT = 20.0
"""exp(20) is far above any bound on a ratio, and finite in float32."""


class LossInputs(NamedTuple):
    """One pack's tokens, [N] each."""

    logprobs: torch.Tensor
    """Of the current policy, with a graph behind them."""
    proximal: torch.Tensor
    """Of the policy that the step began with; no graph."""
    behaviour: torch.Tensor
    """As recorded at sampling, under the version that wrote the token."""
    advantages: torch.Tensor
    weights: torch.Tensor
    """What a token counts in the mean; see `averaging`. They sum to at most 1 over a step."""
    keep: torch.Tensor
    """bool: False for tokens that a rule keeps out; see `masking`."""


class LossOutputs(NamedTuple):
    """`loss` is a weighted sum, so that the packs of a step add up; the rest is detached."""

    loss: torch.Tensor
    tokens: int
    """Tokens that entered."""
    left_out: int
    """Tokens kept out since a log-prob or advantage was not finite."""
    masked: int
    """Tokens kept out by a rule: of the span mask, or of the objective itself."""
    clipped: int
    kl: float
    """Sum of behaviour minus current log-probs: KL(behaviour || current) by its samples."""
    largest_ratio: float


class Terms(NamedTuple):
    """An objective's answer, [N] each: what is to be made large, which tokens its clip holds
    back, which it refuses."""

    gains: torch.Tensor
    clipped: torch.Tensor
    refused: torch.Tensor


Surrogate: TypeAlias = Callable[[LossInputs], Terms]
"""The maths of one objective. Its inputs are finite."""


def evaluate(surrogate: Surrogate, inputs: LossInputs) -> LossOutputs:
    """The loss of one pack. A token with a number that is not finite, or kept out by a rule,
    reaches neither the loss nor the gradient."""
    finite = (
        inputs.logprobs.isfinite()
        & inputs.proximal.isfinite()
        & inputs.behaviour.isfinite()
        & inputs.advantages.isfinite()
    )
    used = finite & inputs.keep
    clean = inputs._replace(
        logprobs=torch.where(used, inputs.logprobs, 0.0),
        proximal=torch.where(used, inputs.proximal, 0.0),
        behaviour=torch.where(used, inputs.behaviour, 0.0),
        advantages=torch.where(used, inputs.advantages, 0.0),
        keep=used,
    )
    terms = surrogate(clean)
    used = used & ~terms.refused
    loss = -(torch.where(used, terms.gains, 0.0) * inputs.weights).sum()
    with torch.no_grad():
        ages = clean.behaviour - clean.logprobs
        return LossOutputs(
            loss=loss,
            tokens=int(used.sum()),
            left_out=int((~finite).sum()),
            masked=int((finite & ~used).sum()),
            clipped=int((terms.clipped & used).sum()),
            kl=float(ages[used].sum()),
            largest_ratio=float(ratio(-ages)[used].max()) if bool(used.any()) else 0.0,
        )


def ratio(difference: torch.Tensor) -> torch.Tensor:
    """exp of a difference of log-probs [N], bounded above so that it stays finite."""
    return difference.clamp(max=MAX_EXPONENT).exp()


def none_of(like: torch.Tensor) -> torch.Tensor:
    """False for every token."""
    return torch.zeros_like(like, dtype=torch.bool)
