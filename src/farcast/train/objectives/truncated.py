"""Policy gradient with truncated importance weights, and the same without any weights."""

import torch

from farcast.train.objectives.inputs import LossInputs, Surrogate, Terms, none_of, ratio


def truncated(*, cap: float) -> Surrogate:
    """min(current / behaviour, cap) A log current, [N] -> [N]; no gradient through the weight.

    Truncated importance sampling, Ionides 2008 (Journal of Computational and Graphical
    Statistics 17:2), as the policy gradient of IMPALA, Espeholt et al. 2018 (arXiv:1802.01561),
    section 4.2. Unlike a clip, it never takes a token's gradient away.
    """

    def surrogate(inputs: LossInputs) -> Terms:
        weight = ratio(inputs.logprobs.detach() - inputs.behaviour)
        kept = weight.clamp(max=cap)
        return Terms(kept * inputs.advantages * inputs.logprobs, weight > cap, none_of(weight))

    return surrogate


def uncorrected(inputs: LossInputs) -> Terms:
    """A log current, [N] -> [N]: as if the current policy had sampled.

    REINFORCE, Williams 1992 (Machine Learning 8). Right only for tokens of age 0; here to be
    compared with.
    """
    none = none_of(inputs.logprobs)
    return Terms(inputs.advantages * inputs.logprobs, none, torch.zeros_like(none))
