"""What of an answer is scored, where that is not all of it."""

import re

from farcast.rollout.environment import Score, SingleTurn, Task

_INTEGER = re.compile(r"-?\d+")


def last_integer(text: str) -> str:
    """The last integer written in `text`, without thousands separators; "" if there is none.

    `About 1,250. So: 1251` gives `1251`.
    """
    found = _INTEGER.findall(text.replace(",", ""))
    return found[-1] if found else ""


class LastInteger(SingleTurn):
    """An environment that sees only the last integer of each answer: for models too small to
    keep to a format."""

    def __init__(self, environment: SingleTurn) -> None:
        self._environment = environment

    @property
    def name(self) -> str:
        return self._environment.name

    def task(self, seed: int) -> Task:
        return self._environment.task(seed)

    def score(self, task: Task, text: str) -> Score:
        return self._environment.score(task, last_integer(text))
