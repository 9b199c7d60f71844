"""Batched sampling from a causal language model of `transformers`, token by token.

Prompts that stand next to each other and are equal (a group) are computed once: the cache of
the prompt is repeated for its members. Rows that have ended leave the batch.

Shapes: B rows now in the batch, L tokens of the longest prompt, V vocabulary.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any, NamedTuple

import torch

from farcast.config import SamplingConfig
from farcast.types import VersionRef

SHRINK_BELOW = 0.75
"""Ended rows leave once fewer than this share is still going: each time copies the cache."""


class Row(NamedTuple):
    """What one prompt got: ids, log-probs, and the version that wrote each token."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[VersionRef]
    ended: bool


class _Batch(NamedTuple):
    """State between two steps: the rows' numbers, next logits [B, V], attention mask [B, L + t],
    position of the next token [B, 1]."""

    rows: torch.Tensor
    logits: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor


def sample_logprobs(logits: torch.Tensor, sampling: SamplingConfig) -> torch.Tensor:
    """Log-probs [B, V] in float32 of the distribution that is sampled: temperature, then the
    smallest set of tokens whose mass reaches top_p, renormalised (nucleus sampling,
    Holtzman et al. 2020)."""
    logprobs = torch.log_softmax(logits.float() / sampling.temperature, dim=-1)
    if sampling.top_p >= 1.0:
        return logprobs
    ordered, order = logprobs.sort(dim=-1, descending=True)
    mass_before = ordered.exp().cumsum(dim=-1) - ordered.exp()
    cut = torch.zeros_like(logprobs, dtype=torch.bool)
    cut.scatter_(-1, order, mass_before >= sampling.top_p)
    return torch.log_softmax(logprobs.masked_fill(cut, float("-inf")), dim=-1)


def decode(
    module: Any,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    *,
    eos_ids: frozenset[int],
    pad_id: int,
    seed: int,
    step: Callable[[], AbstractContextManager[VersionRef]],
) -> list[Row]:
    """Sample one answer for each prompt. `step` is entered around each forward pass and gives
    the version that is live inside it."""
    rows = [Row([], [], [], ended=False) for _ in prompts]
    if prompts:
        with torch.no_grad():
            _decode(module, prompts, sampling, rows, eos_ids, pad_id, seed, step)
    return rows


def _decode(
    module: Any,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    rows: list[Row],
    eos_ids: frozenset[int],
    pad_id: int,
    seed: int,
    step: Callable[[], AbstractContextManager[VersionRef]],
) -> None:
    device = next(module.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    with step() as version:
        batch, cache = _prefill(module, prompts, pad_id, device)
    for index in range(sampling.max_new_tokens):
        logprobs = sample_logprobs(batch.logits, sampling)
        chosen = torch.multinomial(logprobs.exp(), 1, generator=generator)
        picked = logprobs.gather(1, chosen)
        going = _record(rows, batch.rows, chosen, picked, version, eos_ids)
        if not going or index == sampling.max_new_tokens - 1:
            break
        if len(going) < SHRINK_BELOW * len(batch.rows):
            batch, chosen = _shrink(batch, cache, chosen, going)
        with step() as version:
            batch = _advance(module, batch, cache, chosen)


def _prefill(
    module: Any, prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[_Batch, Any]:
    """Run each distinct prompt once, padded on the left, then repeat it for its members."""
    from transformers import DynamicCache

    groups = [(ids, len(list(same))) for ids, same in groupby(tuple(p) for p in prompts)]
    longest = max(len(ids) for ids, _ in groups)
    tokens = torch.full((len(groups), longest), pad_id, dtype=torch.long, device=device)
    mask = torch.zeros_like(tokens)
    for row, (ids, _) in enumerate(groups):
        tokens[row, longest - len(ids) :] = torch.tensor(ids, device=device)
        mask[row, longest - len(ids) :] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache()
    logits = module(
        input_ids=tokens,
        attention_mask=mask,
        position_ids=positions,
        cache=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]
    repeats = torch.tensor([count for _, count in groups], device=device)
    members = torch.arange(len(groups), device=device).repeat_interleave(repeats)
    cache.batch_select_indices(members)
    batch = _Batch(
        rows=torch.arange(len(prompts), device=device),
        logits=logits[members],
        mask=mask[members],
        positions=positions[members, -1:] + 1,
    )
    return batch, cache


def _record(
    rows: list[Row],
    numbers: torch.Tensor,
    chosen: torch.Tensor,
    picked: torch.Tensor,
    version: VersionRef,
    eos_ids: frozenset[int],
) -> list[int]:
    """Write down a step's tokens; returns the places in the batch whose rows go on."""
    going = []
    columns = zip(numbers.tolist(), chosen[:, 0].tolist(), picked[:, 0].tolist(), strict=True)
    for place, (number, token, logprob) in enumerate(columns):
        row = rows[number]
        if row.ended:
            continue
        row.token_ids.append(token)
        row.logprobs.append(logprob)
        row.versions.append(version)
        if token in eos_ids:
            rows[number] = row._replace(ended=True)
        else:
            going.append(place)
    return going


def _shrink(
    batch: _Batch, cache: Any, chosen: torch.Tensor, going: list[int]
) -> tuple[_Batch, torch.Tensor]:
    """Keep only the rows that go on."""
    keep = torch.tensor(going, device=chosen.device)
    cache.batch_select_indices(keep)
    return _Batch(*(tensor[keep] for tensor in batch)), chosen[keep]


def _advance(module: Any, batch: _Batch, cache: Any, chosen: torch.Tensor) -> _Batch:
    """One forward pass over the tokens just chosen."""
    mask = torch.cat([batch.mask, torch.ones_like(chosen)], dim=1)
    logits = module(
        input_ids=chosen,
        attention_mask=mask,
        position_ids=batch.positions,
        cache=cache,
        use_cache=True,
    ).logits[:, -1]
    return _Batch(batch.rows, logits, mask, batch.positions + 1)
