"""PPO whose clip is around the policy that the step began with, not around the one that sampled."""

import torch

from farcast.train.objectives.inputs import LossInputs, Surrogate, Terms, ratio


def decoupled(*, low: float, high: float, cap: float) -> Surrogate:
    """(proximal / behaviour) min(r A, clip(r, 1 - low, 1 + high) A) with r = current / proximal,
    [N] -> [N]; no gradient through the first factor.

    Decoupled PPO, Hilton et al. 2022 (arXiv:2110.00641); proximal log-probs recomputed by
    the trainer, and tokens whose first factor is above `cap` left out, as in AReaL, Fu et al. 2025
    (arXiv:2505.24298). With one update a step r is 1, the clip rests, and the rest is importance
    sampling.
    """

    def surrogate(inputs: LossInputs) -> Terms:
        age = ratio(inputs.proximal - inputs.behaviour)
        moved = ratio(inputs.logprobs - inputs.proximal)
        bounded = moved.clamp(1.0 - low, 1.0 + high)
        advantages = inputs.advantages
        gains = age.clamp(max=cap) * torch.minimum(moved * advantages, bounded * advantages)
        return Terms(gains, moved != bounded, age > cap)

    return surrogate
