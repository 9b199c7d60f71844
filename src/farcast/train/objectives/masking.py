"""Span masking: tokens that are too old stay out of the loss, their younger neighbours do not."""

import torch


def fresh_enough(ages: torch.Tensor, bound: int | None) -> torch.Tensor:
    """ages [N] in versions -> bool [N]: True for tokens at most `bound` versions old.

    Made possible by spans, which say which version wrote each token; so an answer that an engine
    began under an old version and ended under a new one need not be dropped as a whole. There is
    no paper: it is the token-wise form of the bound on staleness of AReaL (arXiv:2505.24298),
    section 5.1. With `bound` None every token stays.
    """
    if bound is None:
        return torch.ones_like(ages, dtype=torch.bool)
    return ages <= bound
