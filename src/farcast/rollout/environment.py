"""What a task is: something to ask, and a conversation that ends in a score. No engine, no
tokens, no store.

An environment is a pure function of the seed as far as what it asks goes: the same seed gives the
same task on every machine, so a trajectory's `task` and `seed` say which one it was. What happens
after the question is a `Conversation`: the model says something, the environment replies, until
there is a score. Most tasks are over after one answer; for these, derive from `SingleTurn`.

What tools may touch, how long they may run and what they may cost is the environment's to bound:
a worker calls `reply` and waits for it. It runs code of the environment's author with the
worker's rights, and text of a model must never become code there without a sandbox.
"""

from abc import ABC, abstractmethod
from typing import Any, Literal, Protocol

import msgspec

ReplyRole = Literal["observation", "user", "feedback"]


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One question. `metadata` is whatever the environment needs to score it."""

    question: str
    answer: str = ""
    metadata: dict[str, Any] = {}


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What an episode earned: the reward that is trained on, and its named parts."""

    reward: float
    parts: dict[str, float] = {}


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment says to one turn of the model.

    Without a `score` the episode goes on, and the model is shown `text` as `role` before its next
    turn. With one it is over, and `text` is not used.
    """

    text: str = ""
    role: ReplyRole = "observation"
    score: Score | None = None
    called: bool = False
    """Whether the turn that is replied to was a tool call."""
    feedback: str = ""
    """Said of that turn for whoever trains on it; the model is never shown it."""


class Conversation(Protocol):
    """One episode from the environment's side. Used by one thread, once."""

    def reply(self, text: str) -> Reply:
        """Answer the model's next turn. Raises `ScoringError` when that cannot be done; the
        episode is then aborted, since a reward of 0 would be a lie."""
        ...

    def cut(self) -> Score:
        """The score of an episode that a limit ended after the last reply. May raise
        `ScoringError`, as `reply` does."""
        ...


class Environment(Protocol):
    """A verifiable task. Called from one thread at a time; several conversations may be open."""

    @property
    def name(self) -> str:
        """Goes into each trajectory as its task."""
        ...

    def task(self, seed: int) -> Task:
        """The task of a seed in [0, 2**31)."""
        ...

    def begin(self, task: Task) -> Conversation:
        """A new episode of that task."""
        ...


class SingleTurn(ABC):
    """An environment whose episodes are one answer and its score."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Goes into each trajectory as its task."""

    @abstractmethod
    def task(self, seed: int) -> Task:
        """The task of a seed in [0, 2**31)."""

    @abstractmethod
    def score(self, task: Task, text: str) -> Score:
        """Score the text that the model answered. Raises `ScoringError` when that cannot be
        done; the episode is then aborted, since a reward of 0 would be a lie."""

    def begin(self, task: Task) -> Conversation:
        return _OneAnswer(self, task)


class _OneAnswer:
    def __init__(self, environment: SingleTurn, task: Task) -> None:
        self._environment = environment
        self._task = task

    def reply(self, text: str) -> Reply:
        return Reply(score=self._environment.score(self._task, text))

    def cut(self) -> Score:
        """Never needed: the first reply has the score."""
        return Score(reward=0.0)
