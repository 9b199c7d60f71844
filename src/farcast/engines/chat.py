"""Between text and token ids, through a tokenizer's own chat template."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from farcast.config import TaskConfig
from farcast.errors import ConfigError

_SAID = "\x00said\x00"
"""Stands for what the model said while the template around it is looked at. No text of a
template or a tokenizer has it."""


class ChatCodec:
    """Questions become the user's turn of a chat; the task says what stands around them.

    The prompt is one text that is tokenised once, so that the answer's prefix joins the
    template's tokens as it would if the model had written it.
    """

    def __init__(self, tokenizer: Any, task: TaskConfig) -> None:
        self._tokenizer = tokenizer
        self._system = [{"role": "system", "content": task.system}] if task.system else []
        self._prefix = task.answer_prefix

    @classmethod
    def from_folder(cls, folder: Path, task: TaskConfig) -> "ChatCodec":
        """With the tokenizer of a Hugging Face folder."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"No tokenizer can be read from {folder}; it needs tokenizer.json and "
                "tokenizer_config.json."
            ) from error
        if not tokenizer.chat_template or tokenizer.eos_token_id is None:
            raise ConfigError(
                f"The tokenizer in {folder} lacks a chat template or an end token; "
                "use a model that was tuned to chat."
            )
        return cls(tokenizer, task)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """What ends the model's turn."""
        return (int(self._tokenizer.eos_token_id),)

    @property
    def pad_id(self) -> int:
        pad = self._tokenizer.pad_token_id
        return self.eos_ids[0] if pad is None else int(pad)

    def encode_prompt(self, text: str) -> Sequence[int]:
        turns = [*self._system, {"role": "user", "content": text}]
        prompt = self._tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True
        )
        ids = self._tokenizer(prompt + self._prefix, add_special_tokens=False)["input_ids"]
        return tuple(int(token) for token in ids)

    def encode_reply(
        self, text: str, role: Literal["observation", "user", "feedback"]
    ) -> Sequence[int]:
        """What stands between a model's turn, which ended with its end token, and its next one.
        Observations are a tool's where the template knows of tools, else the user's."""
        tools = role == "observation" and "tool" in self._tokenizer.chat_template
        turns = [
            *self._system,
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": _SAID},
            {"role": "tool" if tools else "user", "content": text},
        ]
        chat = self._tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True
        )
        _, found, tail = chat.partition(_SAID)
        if not found:
            raise ConfigError(
                "The tokenizer's chat template drops what the model said before; it is no use "
                "for episodes of several turns."
            )
        tail = tail.removeprefix(self._tokenizer.eos_token) + self._prefix
        ids = self._tokenizer(tail, add_special_tokens=False)["input_ids"]
        return tuple(int(token) for token in ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
