"""What farcast asks of an inference engine that a worker samples from.

Producer -> consumer: the engine makes `Completion`s; `rollout` turns them into trajectories.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from farcast.config import SamplingConfig
from farcast.types import PolicySpan, VersionRef

FinishReason = Literal["stop", "length", "aborted"]


class Completion(msgspec.Struct, frozen=True):
    """One sampled answer.

    `token_ids` as sampled (the end-of-turn token included), `logprobs` natural logs under the
    distribution sampled from (temperature and top-p applied), one per token; `spans` cover
    [0, len(token_ids)) without gaps, in order.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[PolicySpan, ...]
    finish_reason: FinishReason


class Engine(Protocol):
    """An engine that always knows which verified version it serves."""

    @property
    def version(self) -> VersionRef | None:
        """The version live now, None before the first verified one."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, *, seed: int
    ) -> list[Completion]:
        """Sample one completion for each prompt of token ids, in order.

        A commit may fall between two tokens; the spans say so. Raises `TargetUncertainError`
        once the engine's weights are not known to be a verified version.
        """
        ...
