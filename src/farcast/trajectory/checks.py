"""Is this trajectory well formed? One place answers, for writers and for readers.

Raises `FormatError` with the trajectory's id and the first rule it breaks:

1. It holds at least one token; ids are integers in [0, 2**31).
2. Token ids, log-probs and loss mask have one entry per token.
3. Every log-prob is finite, and at most 0 where the mask is set (but for rounding).
4. Spans are in order, do not overlap, end within the trajectory, and cover every masked token.
5. Turns are in order, do not overlap, end within the trajectory; a masked token stands in no
   turn that the model did not say.
6. Rewards, times, temperature and top-p are finite; temperature and top-p are positive.
7. Routed experts have whole rows, for at least one token and at most all of them.

Refuses to judge staleness or whether a version exists: that is the batcher's.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from farcast.errors import FormatError, LimitError
from farcast.trajectory.wire import (
    MAX_EXPERT_LAYERS,
    MAX_EXPERTS_PER_TOKEN,
    MAX_TOKENS,
    SAID_BY_MODEL,
    RoutedExperts,
    Trajectory,
)

MAX_TOKEN_ID = (1 << 31) - 1

LOGPROB_SLACK = 1e-3
"""A log-softmax in bfloat16 or with a fused kernel may end a rounding error above 0."""


class Columns(NamedTuple):
    """The three per-token columns of one trajectory, as arrays of one length."""

    ids: NDArray[np.uint32]
    logprobs: NDArray[np.float32]
    mask: NDArray[np.bool_]


def check_trajectory(trajectory: Trajectory, columns: Columns | None = None) -> Columns:
    """Check every rule and return the columns.

    `columns` is for a reader that already holds them as arrays; otherwise they are made from
    the trajectory's tuples, log-probs rounded to the nearest float32.
    """
    try:
        return _checked(trajectory, columns)
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        # Nothing checks types when a trajectory is made: a value of another kind shows itself here.
        raise _broken(
            trajectory, f"has a field of the wrong kind ({str(error)[:200]}); correct it"
        ) from error


def _checked(trajectory: Trajectory, columns: Columns | None) -> Columns:
    tokens = len(trajectory.token_ids)
    if tokens > MAX_TOKENS:
        raise LimitError(f"The trajectory has {tokens} tokens, the bound is {MAX_TOKENS}.")
    if not tokens or {len(trajectory.logprobs), len(trajectory.loss_mask)} != {tokens}:
        raise _broken(
            trajectory,
            f"has {tokens} token ids, {len(trajectory.logprobs)} log-probs and "
            f"{len(trajectory.loss_mask)} mask entries; give one of each per token, and a token",
        )
    columns = columns or _columns(trajectory)
    if not np.isfinite(columns.logprobs).all():
        raise _broken(trajectory, "has a log-prob that is not finite; drop it where it was sampled")
    if (columns.logprobs[columns.mask] > LOGPROB_SLACK).any():
        raise _broken(trajectory, "has a log-prob above 0; give natural logs of probabilities")
    _check_spans(trajectory, columns.mask)
    _check_turns(trajectory, columns.mask)
    _check_numbers(trajectory)
    _check_experts(trajectory)
    return columns


def _columns(t: Trajectory) -> Columns:
    try:
        ids, logprobs, mask = (np.asarray(c) for c in (t.token_ids, t.logprobs, t.loss_mask))
    except (TypeError, ValueError, OverflowError) as error:
        raise _broken(t, f"has columns that are no numbers ({error}); correct them") from error
    kinds = (ids.dtype.kind, logprobs.dtype.kind, mask.dtype.kind)
    flat = ids.ndim == logprobs.ndim == mask.ndim == 1
    if not flat or kinds[0] not in "iu" or kinds[1] not in "fiu" or kinds[2] != "b":
        raise _broken(t, "has columns of the wrong type; give integers, floats and booleans")
    if int(ids.min()) < 0 or int(ids.max()) > MAX_TOKEN_ID:
        raise _broken(t, f"has a token id outside [0, {MAX_TOKEN_ID}]; send ids as sampled")
    with np.errstate(over="ignore"):
        return Columns(ids.astype(np.uint32), logprobs.astype(np.float32), mask)


def _check_spans(t: Trajectory, mask: NDArray[np.bool_]) -> None:
    if not _ordered(((s.start, s.end) for s in t.spans), len(mask), empty=False):
        raise _broken(t, "has policy spans out of order or out of bounds; sort and shift them")
    covered = sum(int(np.count_nonzero(mask[s.start : s.end])) for s in t.spans)
    if covered != int(np.count_nonzero(mask)):
        raise _broken(t, "has tokens in the loss that no policy span covers; add their version")


def _check_turns(t: Trajectory, mask: NDArray[np.bool_]) -> None:
    if not _ordered(((u.start, u.end) for u in t.turns), len(mask), empty=True):
        raise _broken(t, "has turns out of order or out of bounds; sort and shift them")
    for turn in t.turns:
        if turn.role not in SAID_BY_MODEL and mask[turn.start : turn.end].any():
            raise _broken(t, f"has tokens of a {turn.role} turn in the loss; mask them out")


def _ordered(borders: Iterable[tuple[int, int]], tokens: int, *, empty: bool) -> bool:
    last = 0
    for start, end in borders:
        if start < last or end < start or (end == start and not empty):
            return False
        last = end
    return last <= tokens


def _check_numbers(t: Trajectory) -> None:
    times = (time for turn in t.turns for time in (turn.started, turn.ended))
    numbers = (t.reward, *t.rewards.values(), t.temperature, t.top_p, *times)
    if not all(map(math.isfinite, numbers)) or t.temperature <= 0 or t.top_p <= 0:
        raise _broken(t, "has a reward, time or sampling setting that is not usable; correct it")


def _check_experts(t: Trajectory) -> None:
    experts = t.experts
    if experts is None:
        return
    known = isinstance(experts, RoutedExperts) and isinstance(experts.ids, bytes)
    whole = known and _is_shape(experts) and len(experts.ids) % experts.row_bytes == 0
    if not whole or not 1 <= experts.tokens <= len(t.token_ids):
        raise _broken(t, "has routed experts that do not fit its tokens; give [tokens, layers, k]")


def _is_shape(experts: RoutedExperts) -> bool:
    return (
        experts.width in (1, 2)
        and experts.layers in range(1, MAX_EXPERT_LAYERS + 1)
        and experts.top_k in range(1, MAX_EXPERTS_PER_TOKEN + 1)
    )


def _broken(t: Trajectory, what: str) -> FormatError:
    return FormatError(f"Trajectory {str(t.id)[:130]} {what}.")
