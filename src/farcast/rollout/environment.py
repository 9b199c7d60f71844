"""What a task is: a question with a way to score answers. No engine, no tokens, no store.

An environment is a pure function of the seed: the same seed gives the same task on every
machine, so a trajectory's `task` and `seed` say which one it was.
"""

from typing import Any, Protocol

import msgspec


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One question. `metadata` is whatever the environment needs to score it."""

    question: str
    answer: str = ""
    metadata: dict[str, Any] = {}


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer earned: the reward that is trained on, and its named parts."""

    reward: float
    parts: dict[str, float] = {}


class Environment(Protocol):
    """A verifiable task. Safe to call from one thread at a time."""

    @property
    def name(self) -> str:
        """Goes into each trajectory as its task."""
        ...

    def task(self, seed: int) -> Task:
        """The task of a seed in [0, 2**31)."""
        ...

    def score(self, task: Task, text: str) -> Score:
        """Score the text that the model answered. Raises `ScoringError` when that cannot be
        done; the episode is then aborted, since a reward of 0 would be a lie."""
        ...
