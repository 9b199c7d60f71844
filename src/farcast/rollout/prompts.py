"""How questions become token ids and answers become text. The tokenizer is the caller's."""

from collections.abc import Sequence
from typing import Protocol

from farcast.rollout.environment import ReplyRole


class PromptCodec(Protocol):
    """A tokenizer with its chat template, or anything that does the same."""

    def encode_prompt(self, text: str) -> Sequence[int]:
        """The ids of a whole prompt that asks `text` in the user's turn and opens the model's."""
        ...

    def encode_reply(self, text: str, role: ReplyRole) -> Sequence[int]:
        """The ids that follow a model's turn which ended by itself: what closes that turn beyond
        its own end token, `text` said by `role`, and what opens the model's next turn. They do
        not depend on what the model said, so nothing that was sampled is encoded again."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, without special tokens."""
        ...


def ask(instruction: str, question: str) -> str:
    """The user's turn: the instruction, if any, before the question."""
    return f"{instruction}\n\n{question}" if instruction else question
