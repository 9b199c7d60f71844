"""Text to pretrain on that every machine with Python has: the source of its standard library."""

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from farcast.errors import ConfigError

MOST_CHARACTERS = 1 << 20
_LARGEST_FILE = 1 << 16
"""Larger ones are tables more often than prose."""


def standard_library(most: int = MOST_CHARACTERS) -> str:
    """Modules in the order of their names, up to `most` characters."""
    folder = Path(sysconfig.get_path("stdlib"))
    parts: list[str] = []
    size = 0
    for path in sorted(folder.glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) <= _LARGEST_FILE:
            parts.append(text)
            size += len(text)
        if size >= most:
            break
    if not parts:
        raise ConfigError(
            f"{folder} holds no Python sources to pretrain on; use a Python installation with its "
            "standard library in files."
        )
    return "\n".join(parts)[:most]


def token_rows(tokenizer: Any, length: int) -> torch.Tensor:
    """The corpus as rows [N, length] of token ids."""
    text = standard_library()
    pieces: Sequence[str] = [text[i : i + 4096] for i in range(0, len(text), 4096)]
    ids = [i for piece in tokenizer(list(pieces))["input_ids"] for i in piece]
    rows = len(ids) // length
    return torch.tensor(ids[: rows * length]).view(rows, length)
