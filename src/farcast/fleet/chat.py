"""A Hugging Face tokenizer with its chat template, as the worker loop needs it."""

from collections.abc import Sequence
from typing import Any

from farcast.config import TaskConfig


class ChatCodec:
    """Questions become the user's turn of a chat; the task says what stands around them.

    The prompt is one text that is tokenised once, so that the answer's prefix joins the
    template's tokens as it would if the model had written it.
    """

    def __init__(self, tokenizer: Any, task: TaskConfig) -> None:
        self._tokenizer = tokenizer
        self._system = [{"role": "system", "content": task.system}] if task.system else []
        self._prefix = task.answer_prefix

    def encode_prompt(self, text: str) -> Sequence[int]:
        turns = [*self._system, {"role": "user", "content": text}]
        prompt = self._tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True
        )
        ids = self._tokenizer(prompt + self._prefix, add_special_tokens=False)["input_ids"]
        return tuple(int(token) for token in ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
