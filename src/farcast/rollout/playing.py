"""One episode under way, between an engine and an environment's conversation.

    question ─> prompt ─> engine ─> completion ─> text ─> environment ─> reply ─> prompt ─> ...

The prompt of the next turn is every token so far, as sampled and as shown, followed by the ids of
the reply; nothing that was sampled is encoded again. Refuses to give an episode that was broken
off a reward: it is aborted.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from farcast.engines.base import Completion
from farcast.errors import ScoringError
from farcast.rollout.environment import Conversation, Reply, Score
from farcast.rollout.episode import Episode
from farcast.rollout.prompts import PromptCodec
from farcast.trajectory import FinishReason
from farcast.trajectory.wire import MAX_FEEDBACK

_NOTHING = Score(reward=0.0)


class Limits(NamedTuple):
    """Where an episode is cut: turns of the model, and tokens that the next prompt and its answer
    may have together."""

    turns: int
    tokens: int
    answer_tokens: int


class Play:
    """One episode. `prompt` is what the engine is to continue; `take` what came of it, until
    `finish` says how it ended."""

    def __init__(
        self,
        conversation: Conversation,
        codec: PromptCodec,
        prompt: Sequence[int],
        limits: Limits,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._conversation = conversation
        self._codec = codec
        self._limits = limits
        self._clock = clock
        self._turns = 0
        self.episode = Episode()
        now = clock()
        self.episode.show(prompt, "user", started=now, ended=now)
        self.finish: FinishReason | None = None
        self.score = _NOTHING

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(self.episode.token_ids)

    def abort(self) -> None:
        """End without a reward, so that the trainer releases the group at once."""
        self.finish, self.score = "aborted", _NOTHING

    def take(self, completion: Completion, *, started: float) -> None:
        """Add what the engine wrote since `started`, and the environment's reply to it."""
        ended = self._clock()
        self._turns += 1
        if completion.finish_reason == "aborted":
            self.episode.sampled(completion, started=started, ended=ended)
            return self.abort()
        try:
            reply = self._conversation.reply(self._codec.decode(completion.token_ids))
        except ScoringError:
            self.episode.sampled(completion, started=started, ended=ended)
            return self.abort()
        self.episode.sampled(
            completion,
            "tool_call" if reply.called else "model",
            started=started,
            ended=ended,
            feedback=reply.feedback[:MAX_FEEDBACK],
        )
        if reply.score is not None:
            return self._end(reply.score, completion.finish_reason)
        if not self._went_on(completion, reply, ended):
            self._cut()
        return None

    def _went_on(self, completion: Completion, reply: Reply, since: float) -> bool:
        """Show the reply, if the model may go on: a turn that was itself cut short cannot be
        closed in its name."""
        if completion.finish_reason == "length" or self._turns >= self._limits.turns:
            return False
        shown = self._codec.encode_reply(reply.text, reply.role)
        held = len(self.episode.token_ids)
        if held + len(shown) + self._limits.answer_tokens > self._limits.tokens:
            return False
        self.episode.show(shown, reply.role, started=since, ended=self._clock())
        return True

    def _cut(self) -> None:
        try:
            self._end(self._conversation.cut(), "length")
        except ScoringError:
            self.abort()

    def _end(self, score: Score, finish: FinishReason) -> None:
        if all(map(math.isfinite, (score.reward, *score.parts.values()))):
            self.finish, self.score = finish, score
        else:
            self.abort()
