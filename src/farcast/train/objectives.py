"""The maths of the policy update, as pure functions.

Shapes: G members of a group; N tokens in the loss of one pack (any number of members). Log-probs
are natural logs; `behaviour` is what the worker recorded when the token was sampled, under the
version that wrote it, so the importance weight of a token corrects for its own age.
"""

from typing import NamedTuple

import torch

STD_FLOOR = 1e-4
"""Added to a group's standard deviation: a group that agrees gets advantages near zero."""


class LossOutputs(NamedTuple):
    """`loss` is a sum over tokens (not a mean), so that packs add up; the rest is detached."""

    loss: torch.Tensor
    tokens: int
    """Tokens that entered: those with finite numbers."""
    left_out: int
    """Tokens kept out since a log-prob, weight or advantage was not finite."""
    clipped: int
    kl: float
    """Sum of behaviour minus current log-probs: KL(behaviour || current) by its samples."""
    largest_ratio: float


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards [G] -> advantages [G]: (r - mean) / (std + floor).

    GRPO, Shao et al. 2024 (arXiv:2402.03300), eq. 3; the standard deviation is the sample's.
    """
    return (rewards - rewards.mean()) / (rewards.std() + STD_FLOOR)


def policy_loss(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    is_cap: float,
) -> LossOutputs:
    """Clipped surrogate over tokens, [N] each -> the summed loss.

    ratio = exp(logprobs - behaviour); the term is min(ratio A, clip(ratio, 1 - low, 1 + high) A):
    PPO, Schulman et al. 2017 (arXiv:1707.06347), eq. 7, with the two bounds apart as in DAPO
    (arXiv:2503.14476), eq. 10. The ratio is cut at `is_cap` (truncated importance sampling,
    Ionides 2008), which bounds the one side that the minimum leaves open: a negative advantage
    on a token that has become much more likely.

    A token whose numbers are not finite stays out of the loss and of the gradient.
    """
    finite = logprobs.isfinite() & behaviour.isfinite() & advantages.isfinite()
    kept = torch.where(finite, logprobs, 0.0)
    difference = kept - torch.where(finite, behaviour, 0.0)
    weight = torch.where(finite, advantages, 0.0)
    ratio = difference.clamp(max=20.0).exp()  # exp(20) is far above any cap, and finite
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    terms = torch.minimum(ratio.clamp(max=is_cap) * weight, bounded * weight)
    loss = -terms.sum()
    with torch.no_grad():
        outside = (ratio != bounded) & finite
        return LossOutputs(
            loss=loss,
            tokens=int(finite.sum()),
            left_out=int((~finite).sum()),
            clipped=int(outside.sum()),
            kl=float(-difference.sum()),
            largest_ratio=float(ratio.max()) if ratio.numel() else 0.0,
        )
