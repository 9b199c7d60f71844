"""Between text and token ids, through a tokenizer's own chat template."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farcast.config import TaskConfig
from farcast.errors import ConfigError


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

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
