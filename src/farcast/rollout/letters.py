"""`letters`: write the letter that is asked for, again and again. For models of any size.

A randomly initialised model of a million parameters improves within a few dozen steps: the
reward counts characters, so already the first samples differ in it, and writing any of the few
letters in use earns something before the model has learnt to look at the question.

    question    Write the letter b 8 times.
    answer      bbbb       reward 4/8
    answer      bbabbbcb   reward 6/8
    answer      b b b b b b b b b b (10 letters, all right)   reward 1.0
"""

from farcast.errors import ConfigError
from farcast.rollout.environment import Score, SingleTurn, Task


class Letters(SingleTurn):
    """Reward: the share of letters that are the asked one, of at least `count`. White space
    does not count, nor does case. `letters` are those that may be asked for."""

    name = "letters"

    def __init__(self, *, letters: str = "ab", count: int = 8) -> None:
        if not letters or not letters.isalpha() or not letters.isascii() or count < 1:
            raise ConfigError(
                "The letters task needs some of a to z as `letters` and a `count` of at least 1; "
                "correct the task's params."
            )
        self._letters = letters.lower()
        self._count = count

    def task(self, seed: int) -> Task:
        letter = self._letters[seed % len(self._letters)]
        return Task(question=f"Write the letter {letter} {self._count} times.", answer=letter)

    def score(self, task: Task, text: str) -> Score:
        written = "".join(text.lower().split())
        right = written.count(task.answer) / max(len(written), self._count)
        length = min(len(written) / self._count, 1.0)
        return Score(reward=right, parts={"length": length})
