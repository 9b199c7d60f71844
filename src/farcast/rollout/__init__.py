"""Rollouts: environments, episodes, and the worker loop that samples and sends them home."""

from farcast.rollout.calculator import Calculator
from farcast.rollout.environment import (
    Conversation,
    Environment,
    Reply,
    Score,
    SingleTurn,
    Task,
)
from farcast.rollout.episode import Episode
from farcast.rollout.letters import Letters
from farcast.rollout.prompts import PromptCodec, ask
from farcast.rollout.registry import check_task, make_environment
from farcast.rollout.seeds import seed_of
from farcast.rollout.worker import Worker, WorkerCounters

__all__ = [
    "Calculator",
    "Conversation",
    "Environment",
    "Episode",
    "Letters",
    "PromptCodec",
    "Reply",
    "Score",
    "SingleTurn",
    "Task",
    "Worker",
    "WorkerCounters",
    "ask",
    "check_task",
    "make_environment",
    "seed_of",
]
