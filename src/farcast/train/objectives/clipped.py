"""The clipped surrogate of PPO against the policy that sampled: GRPO, Dr. GRPO, DAPO."""

import torch

from farcast.train.objectives.inputs import LossInputs, Surrogate, Terms, none_of, ratio


def clipped(*, low: float, high: float, cap: float) -> Surrogate:
    """min(r A, clip(r, 1 - low, 1 + high) A) with r = current / behaviour, [N] -> [N].

    PPO, Schulman et al. 2017 (arXiv:1707.06347), eq. 7, with the two bounds apart as in DAPO
    (arXiv:2503.14476), eq. 10. The ratio is cut at `cap` (truncated importance sampling,
    Ionides 2008), which bounds the one side that the minimum leaves open: a negative advantage
    on a token that has become much more likely.
    """

    def surrogate(inputs: LossInputs) -> Terms:
        weight = ratio(inputs.logprobs - inputs.behaviour)
        bounded = weight.clamp(1.0 - low, 1.0 + high)
        advantages = inputs.advantages
        gains = torch.minimum(weight.clamp(max=cap) * advantages, bounded * advantages)
        return Terms(gains, weight != bounded, none_of(weight))

    return surrogate
