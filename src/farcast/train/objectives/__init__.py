"""The maths of the policy update, as pure functions; one file an algorithm.

    name         ratio                 advantage        mean
    dapo         clipped, two bounds   / group's std    over tokens
    grpo         clipped               / group's std    over answers, then their tokens
    dr_grpo      clipped               - group's mean   over answers, by a constant length
    tis          truncated             / group's std    over tokens
    decoupled    proximal, clipped     / group's std    over tokens
    reinforce    none                  / group's std    over tokens

`mask_staleness` goes with each of them. No objective has a KL term to a reference policy.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from farcast.config import TrainConfig
from farcast.train.objectives.advantages import centred_advantages, group_advantages
from farcast.train.objectives.averaging import (
    Averaging,
    StepSize,
    answer_mean,
    constant_length,
    token_mean,
)
from farcast.train.objectives.clipped import clipped
from farcast.train.objectives.decoupled import decoupled
from farcast.train.objectives.inputs import LossInputs, LossOutputs, Surrogate, Terms, evaluate
from farcast.train.objectives.masking import fresh_enough
from farcast.train.objectives.truncated import truncated, uncorrected

__all__ = [
    "LossInputs",
    "LossOutputs",
    "Objective",
    "StepSize",
    "Terms",
    "answer_mean",
    "centred_advantages",
    "clipped",
    "constant_length",
    "decoupled",
    "evaluate",
    "fresh_enough",
    "group_advantages",
    "objective_of",
    "token_mean",
    "truncated",
    "uncorrected",
]


class Objective(NamedTuple):
    """One row of the table above."""

    surrogate: Surrogate
    advantages: Callable[[torch.Tensor], torch.Tensor]
    """rewards [G] -> advantages [G]"""
    averaging: Averaging


def objective_of(config: TrainConfig) -> Objective:
    """The objective that `config` names, with its bounds."""
    low, high, cap = config.clip_low, config.clip_high, config.is_cap
    match config.objective:
        case "dapo":
            return Objective(clipped(low=low, high=high, cap=cap), group_advantages, token_mean)
        case "grpo":
            return Objective(clipped(low=low, high=high, cap=cap), group_advantages, answer_mean)
        case "dr_grpo":
            average = constant_length(config.answer_tokens)
            return Objective(clipped(low=low, high=high, cap=cap), centred_advantages, average)
        case "tis":
            return Objective(truncated(cap=cap), group_advantages, token_mean)
        case "decoupled":
            return Objective(decoupled(low=low, high=high, cap=cap), group_advantages, token_mean)
        case "reinforce":
            return Objective(uncorrected, group_advantages, token_mean)
