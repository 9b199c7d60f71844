"""Advantages within a group: how much better an answer was than its siblings.

Shapes: G members of a group. A reward that is not finite gets the advantage NaN, which the loss
leaves out, and has no part in what the others are compared with.
"""

import torch

STD_FLOOR = 1e-4
"""Added to a group's standard deviation: a group that agrees gets advantages near zero."""


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards [G] -> advantages [G]: (r - mean) / (std + floor).

    GRPO, Shao et al. 2024 (arXiv:2402.03300), section 4.1.2; the standard deviation is the
    sample's.
    """
    centred = centred_advantages(rewards)
    known = centred[rewards.isfinite()]
    spread = known.std() if known.numel() > 1 else torch.zeros(())
    return centred / (spread + STD_FLOOR)


def centred_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Rewards [G] -> advantages [G]: r - mean.

    Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783), section 3.2: dividing by the standard deviation
    favours questions that are nearly always or nearly never answered right.
    """
    finite = rewards.isfinite()
    if not bool(finite.any()):
        return torch.full_like(rewards, float("nan"))
    return torch.where(finite, rewards - rewards[finite].mean(), float("nan"))
