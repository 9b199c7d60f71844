"""Every type that travels home, in one file.

Producer: workers (`rollout`, through `TrajectorySender`). Consumer: the trainer
(`train`, through `TrajectoryReceiver`). Token ids are those that were sampled; nothing is
ever re-tokenised. Log-probs are natural logs under the sampling distribution.
"""

from typing import Annotated, Literal

import msgspec

from farcast.types import Name, PolicySpan

Role = Literal["system", "user", "model", "tool_call", "observation", "feedback"]
FinishReason = Literal["stop", "length", "aborted"]

MAX_TOKENS = 1 << 22
"""Tokens of one trajectory: 4 Mi is beyond every context window in use."""

MAX_TURNS = 1 << 14


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Turn(_Wire, frozen=True, kw_only=True):
    """Tokens `start <= i < end` of the trajectory, said by `role`.

    `started` and `ended` are seconds since the epoch by the worker's clock: an interaction
    with a real harness cannot be replayed, so its times are part of the record.
    """

    role: Role
    start: Annotated[int, msgspec.Meta(ge=0)]
    end: Annotated[int, msgspec.Meta(ge=0)]
    started: float = 0.0
    ended: float = 0.0


class Trajectory(_Wire, frozen=True, kw_only=True):
    """One episode.

    `token_ids`, `logprobs` and `loss_mask` have one entry per token, prompt included;
    `logprobs` is 0.0 and `loss_mask` False where the token was not sampled.
    `spans` are in token coordinates and cover every token whose mask is True.
    `group_id` joins the trajectories that share a prompt (GRPO); `group_size` says how many
    there were to be.
    """

    id: Name
    group_id: Name
    group_size: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    worker_id: Name
    token_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_TOKENS)]
    logprobs: Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_TOKENS)]
    loss_mask: Annotated[tuple[bool, ...], msgspec.Meta(max_length=MAX_TOKENS)]
    spans: Annotated[tuple[PolicySpan, ...], msgspec.Meta(max_length=MAX_TURNS)]
    turns: Annotated[tuple[Turn, ...], msgspec.Meta(max_length=MAX_TURNS)]
    reward: float
    rewards: dict[str, float] = {}
    """Named parts of the reward, where the environment gives them."""
    finish_reason: FinishReason
    task: str = ""
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    engine: str = ""
    metadata: dict[str, str] = {}
    top_k: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0
    """How many tokens could be drawn; 0 where all could."""
