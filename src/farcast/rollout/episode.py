"""Puts an episode together from token ids: what was shown, what was sampled, in order.

The trajectory's tokens are exactly those that the engine saw and sampled. Text is decoded to
score it and is never encoded again: two token sequences can read the same. Where a prompt is
made anew for each turn (a chat template), `show_prompt` checks that it continues what stands
already, and raises otherwise.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farcast.engines.base import Completion
from farcast.errors import FormatError
from farcast.trajectory import Role, RoutedExperts, Trajectory, Turn
from farcast.types import PolicySpan


class Episode:
    """The growing columns of one trajectory."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.loss_mask: list[bool] = []
        self.spans: list[PolicySpan] = []
        self.turns: list[Turn] = []
        self._experts: NDArray[Any] | None = None

    def trajectory(self, **about: Any) -> Trajectory:
        """The record of this episode; `about` has the fields that are no columns."""
        return Trajectory(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            loss_mask=tuple(self.loss_mask),
            spans=tuple(self.spans),
            turns=tuple(self.turns),
            experts=None if self._experts is None else RoutedExperts.of(self._experts),
            **about,
        )

    def show(
        self, ids: Sequence[int], role: Role, *, started: float = 0.0, ended: float = 0.0
    ) -> None:
        """Append tokens that the model did not write."""
        self._turn(role, len(ids), started, ended)
        self.token_ids += ids
        self.logprobs += [0.0] * len(ids)
        self.loss_mask += [False] * len(ids)

    def show_prompt(self, prompt: Sequence[int], role: Role) -> None:
        """Append what a prompt adds. It is the whole prompt of the next turn, and begins with
        every token so far; where it does not, training on them would be on tokens that the
        model never saw, so `FormatError` names the first that differs."""
        self.check_prompt(prompt)
        self.show(prompt[len(self.token_ids) :], role)

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Raise `FormatError` unless `prompt` begins with every token so far."""
        held = len(self.token_ids)
        if list(prompt[:held]) != self.token_ids:
            pairs = zip(prompt, self.token_ids, strict=False)
            common = next((i for i, (a, b) in enumerate(pairs) if a != b), len(prompt))
            raise FormatError(
                f"The next prompt differs from the episode at token {common} of {held}; "
                "end the trajectory before this turn and begin another one."
            )

    def sampled(
        self,
        completion: Completion,
        role: Role = "model",
        *,
        started: float = 0.0,
        ended: float = 0.0,
        feedback: str = "",
    ) -> None:
        """Append what the model wrote; its spans move into the trajectory's coordinates."""
        start, count = len(self.token_ids), len(completion.token_ids)
        self._turn(role, count, started, ended, feedback)
        self.token_ids += completion.token_ids
        self.logprobs += completion.logprobs
        self.loss_mask += [True] * count
        self.spans += [
            PolicySpan(start + s.start, start + s.end, s.version, s.root) for s in completion.spans
        ]

    def routed(self, experts: NDArray[Any]) -> None:
        """Note the experts of the first tokens, unsigned integers [tokens, layers, top_k] of one
        or two bytes. What is known of a token already stays: it was routed so when it was written,
        and a later turn only reads it again. What does not fit ends the record of it."""
        held = self._experts
        if held is None:
            self._experts = experts[: len(self.token_ids)]
        elif (held.shape[1:], held.dtype) == (experts.shape[1:], experts.dtype):
            more = experts[len(held) : len(self.token_ids)]
            self._experts = np.concatenate([held, more])

    def _turn(
        self, role: Role, count: int, started: float, ended: float, feedback: str = ""
    ) -> None:
        start = len(self.token_ids)
        self.turns.append(
            Turn(
                role=role,
                start=start,
                end=start + count,
                started=started,
                ended=ended,
                feedback=feedback,
            )
        )
