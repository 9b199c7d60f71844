"""What one token counts in the mean over a step.

Shapes: N tokens of one pack. `lengths` is, for each token, the number of tokens in the loss of
the answer it belongs to.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch


class StepSize(NamedTuple):
    """Sums over all packs of a step, those without a gradient included."""

    tokens: int
    answers: int


Averaging: TypeAlias = Callable[[torch.Tensor, StepSize], torch.Tensor]
"""lengths [N] -> weights [N]"""


def token_mean(lengths: torch.Tensor, size: StepSize) -> torch.Tensor:
    """Each token the same: 1 / tokens of the step.

    DAPO, Yu et al. 2025 (arXiv:2503.14476), section 3.3, with the step in place of the group.
    """
    return torch.full_like(lengths, 1.0 / max(size.tokens, 1))


def answer_mean(lengths: torch.Tensor, size: StepSize) -> torch.Tensor:
    """Each answer the same: 1 / (answers x its length), so a long answer's tokens count less.

    GRPO, Shao et al. 2024 (arXiv:2402.03300), eq. 3.
    """
    return 1.0 / (lengths.clamp(min=1) * max(size.answers, 1))


def constant_length(longest: int) -> Averaging:
    """Each token 1 / (answers x longest), whatever the answer's length.

    Dr. GRPO, Liu et al. 2025 (arXiv:2503.20783), section 3.2: `longest` is the generation's
    budget, so an answer cannot lower its loss by being long.
    """

    def weights(lengths: torch.Tensor, size: StepSize) -> torch.Tensor:
        return torch.full_like(lengths, 1.0 / (max(size.answers, 1) * longest))

    return weights
