"""Which version wrote each token of an answer: is what the answer says of it right?

Answers are computed again with the weights of the versions they name, fed the tokens that the
engine chose, keys and values kept across a border as the engine keeps them. A token's *error* is
how far its log-prob is from the engine's, or how far behind the likeliest token it is (answers are
greedy), whichever is more. Two programs that round differently never agree to the bit, so what
counts as wrong is measured:

    noise(n)   the largest error of n tokens in a row in any *quiet* answer: one that the same
               engine gave while no version was on its way

An answer is wrong if another statement explains it better than its own: over the n tokens of which
the two name different versions, its own errors exceed the other's by more than `MARGIN` times
noise(n). The others are its neighbours: every token a version earlier or later; each border moved
by 1, 2, 4 .. tokens, to either side; the first or last 1, 2, 4 .. tokens of the answer of the
version before or after, as if a border had been left out.

It is wrong too if no statement explains it: its errors over the whole exceed `BOUND` times what
any quiet answer's did. Weights that no version has are found so.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from farcast.errors import ConfigError

MARGIN, BOUND = 2.0, 3.0

Errors: TypeAlias = Any
"""f64[tokens], in natural logs."""

Versions: TypeAlias = tuple[int, ...]
"""The version of each token."""


class Answer(NamedTuple):
    """`versions` as the answer itself told; `quiet` if no version was on its way meanwhile."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: Versions
    quiet: bool = False


Recompute: TypeAlias = Callable[[Answer, Versions], Errors]
"""The errors of an answer, if these versions wrote it."""


class Verdict(NamedTuple):
    """`rival` is the statement that explains the answer better, if one does; `error` the mean
    over its tokens."""

    wrong: bool
    error: float
    rival: Versions | None


class Judge:
    """For answers over versions 0 to `last`. `quiet` are those whose versions are beyond doubt."""

    def __init__(self, recompute: Recompute, quiet: Sequence[Answer], last: int) -> None:
        if not quiet:
            raise ConfigError("No answer was given between versions, so noise is not known.")
        self._recompute = recompute
        self.last = last
        self.quiet_errors = [recompute(answer, answer.versions) for answer in quiet]

    def noise(self, count: int) -> float:
        """The largest sum of errors of `count` tokens in a row of a quiet answer. Where those are
        shorter, what they had of it is scaled."""
        most = 0.0
        for errors in self.quiet_errors:
            width = min(count, errors.size)
            sums = np.convolve(errors, np.ones(width), mode="valid")
            most = max(most, float(sums.max()) * count / width)
        return most

    def judge(self, answer: Answer, versions: Versions) -> Verdict:
        """Of the statement that `versions` wrote the tokens of `answer`."""
        own = self._recompute(answer, versions)
        if own.sum() > BOUND * self.noise(own.size):
            return Verdict(True, float(own.mean()), None)
        for rival in self._rivals(versions):
            differs = np.array(rival) != np.array(versions)
            allowed = MARGIN * self.noise(int(differs.sum()))
            if own[differs].sum() <= allowed:  # no statement can be better by more
                continue
            if (own - self._recompute(answer, rival))[differs].sum() > allowed:
                return Verdict(True, float(own.mean()), rival)
        return Verdict(False, float(own.mean()), None)

    def _rivals(self, versions: Versions) -> Iterator[Versions]:
        for step in (-1, 1):
            yield from self._known(tuple(version + step for version in versions))
        for border in borders(versions):
            for count in _doubling(len(versions)):
                for by in (-count, count):
                    yield from self._known(moved_border(versions, border, by))
        for count in _doubling(len(versions)):
            first, last = versions[0] - 1, versions[-1] + 1
            yield from self._known((first,) * count + versions[count:])
            yield from self._known(versions[:-count] + (last,) * count)

    def _known(self, versions: Versions | None) -> Iterator[Versions]:
        if versions is not None and min(versions) >= 0 and max(versions) <= self.last:
            yield versions


def borders(versions: Versions) -> list[int]:
    """Where another version begins."""
    return [at for at in range(1, len(versions)) if versions[at] != versions[at - 1]]


def moved_border(versions: Versions, border: int, by: int) -> Versions | None:
    """The border `by` tokens later, earlier if that is negative; None if that would reach beyond
    the span that gives way."""
    start, end = sorted((border, border + by))
    if start < 0 or end > len(versions) or len(set(versions[start:end])) > 1:
        return None
    given = versions[border - 1] if by > 0 else versions[border]
    return versions[:start] + (given,) * (end - start) + versions[end:]


def _doubling(below: int) -> Iterator[int]:
    count = 1
    while count < below:
        yield count
        count *= 2
