"""Tasks of the reasoning-gym library, by the name of one of its sets.

Refuses to invent a score: where the library fails at an answer, `ScoringError` says so.
"""

import re
from typing import Any

from farcast.errors import ConfigError, MissingDependencyError, ScoringError
from farcast.rollout.environment import Score, SingleTurn, Task

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym(SingleTurn):
    """One task set, such as "chain_sum". `params` are the set's own, such as max_digits.

    The answer that is scored is what stands in the last <answer>...</answer>, or all of the
    text where there is none, without white space around it. The reward is the set's own score;
    some sets give small credit to nonsense, so the part "exact" counts only full marks.
    """

    def __init__(self, name: str, params: dict[str, Any]) -> None:
        try:
            import reasoning_gym
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                f"The task {name[:60]!r} needs reasoning-gym; install farcast[tasks]."
            ) from error
        self._name = name
        self._params = params
        self._create = reasoning_gym.create_dataset
        try:
            self._scorer = self._dataset(0)
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(
                f"reasoning-gym has no set {name[:60]!r} with these params ({error}); "
                "correct the task's name or params."
            ) from error

    @property
    def name(self) -> str:
        return f"reasoning_gym/{self._name}"

    def task(self, seed: int) -> Task:
        entry = self._dataset(seed)[0]
        return Task(
            question=entry["question"],
            answer="" if entry["answer"] is None else str(entry["answer"]),
            metadata=entry,
        )

    def score(self, task: Task, text: str) -> Score:
        tagged = _TAGGED.findall(text)
        answer = (tagged[-1] if tagged else text).strip()
        try:
            reward = float(self._scorer.score_answer(answer, task.metadata))
        except Exception as error:  # sets raise anything at all on a model's text
            raise ScoringError(
                f"reasoning-gym's {self._name} failed at an answer ({type(error).__name__}); "
                "the episode is aborted."
            ) from error
        return Score(reward=reward, parts={"exact": float(reward >= 1.0)})

    def _dataset(self, seed: int) -> Any:
        """A set of one task: some sets prepare all of theirs at once, so a long one costs memory,
        and a seed alone says which task it is."""
        return self._create(self._name, seed=seed, size=1, **self._params)
