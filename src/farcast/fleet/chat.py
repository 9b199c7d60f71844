"""A Hugging Face tokenizer with its chat template, as the worker loop needs it."""

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
        """The tokenizer of a Hugging Face folder. Raises `ConfigError` when it has none."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"No tokenizer could be read from {folder}; a model folder needs tokenizer.json "
                "and tokenizer_config.json."
            ) from error
        if not tokenizer.chat_template:
            raise ConfigError(
                f"The tokenizer in {folder} has no chat template; use an instruction-tuned model "
                "or add a chat_template.jinja."
            )
        return cls(tokenizer, task)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """What ends an answer."""
        return (int(self._tokenizer.eos_token_id),)

    @property
    def pad_id(self) -> int:
        pad = self._tokenizer.pad_token_id
        return int(self._tokenizer.eos_token_id if pad is None else pad)

    def encode_prompt(self, text: str) -> Sequence[int]:
        turns = [*self._system, {"role": "user", "content": text}]
        prompt = self._tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True
        )
        ids = self._tokenizer(prompt + self._prefix, add_special_tokens=False)["input_ids"]
        return tuple(int(token) for token in ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
