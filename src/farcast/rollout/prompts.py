"""How questions become token ids and answers become text. The tokenizer is the caller's."""

from collections.abc import Sequence
from typing import Protocol


class PromptCodec(Protocol):
    """A tokenizer with its chat template, or anything that does the same."""

    def encode_prompt(self, text: str) -> Sequence[int]:
        """The ids of a whole prompt that asks `text` in the user's turn and opens the model's."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, without special tokens."""
        ...


def ask(instruction: str, question: str) -> str:
    """The user's turn: the instruction, if any, before the question."""
    return f"{instruction}\n\n{question}" if instruction else question
