"""Answers computed again with the exact weights of the versions they name, and judged.

A check that finds nothing proves something only if it could have: so wrong statements are planted,
and it is counted how many of them are found.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from farcast.bench.serving_judge import (
    Answer,
    Errors,
    Judge,
    Recompute,
    Versions,
    borders,
    moved_border,
)
from farcast.delta import from_bits
from farcast.engines.modules import load_module
from farcast.store.archive import Archive

PLANTED = 20
"""Answers that a commit crossed, with which wrong statements are tried."""

SHIFTS = (1, 2, 4, 8)

_KEPT = 5
"""Modules with the weights of a version, kept at a time."""

Say = Callable[[str], None]


class Planted(msgspec.Struct, frozen=True, kw_only=True):
    """How many of the wrong statements of one kind were found."""

    what: str
    planted: int
    found: int


class SpanReport(msgspec.Struct, frozen=True, kw_only=True):
    """Errors are means over an answer's tokens, in natural logs."""

    versions_checked: int
    answers: int
    answers_crossed: int
    span_mismatches: int
    requests_lost: int
    control_mismatches: int
    """Of as many answers, each said to be of the version before."""
    logprob_error_max: float
    control_error_min: float
    quiet_answers: int
    quiet_error_mean: float
    quiet_error_max: float
    quiet_token_error_max: float
    planted: list[Planted]
    smallest_shift_found: int | None
    """Tokens by which a border was moved."""
    worst: list[tuple[float, float, Versions]]
    """Of the three answers that fit worst: error, that of the control, version of each token."""


class Weights:
    """Modules with the exact weights of versions; the last few are kept."""

    def __init__(self, archive: Archive, folder: Path) -> None:
        self._archive = archive
        self._folder = folder
        self._modules: dict[int, Any] = {}

    def module(self, version: int) -> Any:
        import torch

        if version in self._modules:
            self._modules[version] = self._modules.pop(version)
            return self._modules[version]
        full = len(self._modules) >= _KEPT
        made = self._modules.pop(next(iter(self._modules))) if full else self._load()
        like = torch.empty(0)
        bits = self._archive.rebuild(version)
        state = {name: from_bits(tensor, like) for name, tensor in bits.items()}
        made.load_state_dict(state, strict=False)
        self._modules[version] = made
        return made

    def errors(self, answer: Answer, versions: Versions) -> Errors:
        """Of each token of an answer, if these versions wrote it (see `Judge`)."""
        import torch
        from transformers import DynamicCache

        cache, found, best = DynamicCache(), [], []
        fed = [*answer.prompt, *answer.tokens[:-1]]
        cuts = [0, *borders(versions), len(versions)]
        for start, end in pairwise(cuts):
            first = 0 if start == 0 else len(answer.prompt) + start - 1
            piece = torch.tensor([fed[first : len(answer.prompt) + end - 1]])
            module = self.module(versions[start])
            with torch.no_grad():
                logits = module(input_ids=piece, cache=cache, use_cache=True).logits
            rows = torch.log_softmax(logits[0, -(end - start) :].float(), dim=-1)
            chosen = torch.tensor(answer.tokens[start:end])
            found += rows.gather(1, chosen[:, None])[:, 0].tolist()
            best += rows.max(dim=-1).values.tolist()
        differ = np.abs(np.array(found) - np.array(answer.logprobs))
        return np.maximum(differ, np.array(best) - np.array(found))

    def _load(self) -> Any:
        return load_module(self._folder).eval()


def judged(
    recompute: Recompute, answers: Sequence[Answer], lost: int, say: Say = lambda _: None
) -> SpanReport:
    """Of all answers that were given; `lost` got none."""
    ordered = sorted(answers, key=lambda answer: answer.versions)
    say("computing again what the engine answered between versions")
    last = max(max(answer.versions) for answer in answers)
    judge = Judge(
        lru_cache(maxsize=64)(recompute), [answer for answer in ordered if answer.quiet], last
    )
    verdicts, control = [], []
    for place, answer in enumerate(ordered):
        if place % 20 == 0:
            say(f"computing again: {place} of {len(ordered)}")
        verdicts.append(judge.judge(answer, answer.versions))
        control.append(judge.judge(answer, _before(answer.versions)))
    planted = plant(judge, ordered, say)
    quiet = [float(errors.mean()) for errors in judge.quiet_errors]
    return SpanReport(
        versions_checked=len({version for answer in answers for version in answer.versions}),
        answers=len(answers),
        answers_crossed=sum(len(set(answer.versions)) > 1 for answer in answers),
        span_mismatches=sum(verdict.wrong for verdict in verdicts),
        requests_lost=lost,
        control_mismatches=sum(verdict.wrong for verdict in control),
        logprob_error_max=max(verdict.error for verdict in verdicts),
        control_error_min=min(verdict.error for verdict in control),
        quiet_answers=len(quiet),
        quiet_error_mean=float(np.mean(quiet)),
        quiet_error_max=max(quiet),
        quiet_token_error_max=judge.noise(1),
        planted=[kind for kinds in planted.values() for kind in kinds],
        smallest_shift_found=min(
            (shift for shift, kinds in planted.items() if shift and any(k.found for k in kinds)),
            default=None,
        ),
        worst=sorted(
            (
                (verdict.error, other.error, answer.versions)
                for verdict, other, answer in zip(verdicts, control, ordered, strict=True)
            ),
            reverse=True,
        )[:3],
    )


def plant(
    judge: Judge, answers: Sequence[Answer], say: Say = lambda _: None
) -> dict[int, list[Planted]]:
    """Wrong statements about answers that a commit crossed: by how many tokens a border was moved,
    0 for those that name other versions."""
    crossed = [answer for answer in answers if len(set(answer.versions)) > 1]
    chosen = crossed[:: max(1, len(crossed) // PLANTED)][:PLANTED]

    def found(what: str, wrong: Callable[[Versions], Versions | None]) -> Planted:
        say(f"planting: {what}")
        stated = [(answer, wrong(answer.versions)) for answer in chosen]
        verdicts = [judge.judge(answer, versions).wrong for answer, versions in stated if versions]
        return Planted(what=what, planted=len(verdicts), found=sum(verdicts))

    kinds = {
        0: [
            found("a version on", partial(_after, last=judge.last)),
            found("first and last swapped", _swapped),
        ]
    }
    for shift in SHIFTS:
        kinds[shift] = [
            found(f"border {shift} {side}", partial(_moved, by=by))
            for side, by in (("late", shift), ("early", -shift))
        ]
    return kinds


def _moved(versions: Versions, by: int) -> Versions | None:
    return moved_border(versions, borders(versions)[0], by)


def _before(versions: Versions) -> Versions:
    return tuple(version - 1 if version else 1 for version in versions)


def _after(versions: Versions, last: int) -> Versions | None:
    return None if max(versions) == last else tuple(version + 1 for version in versions)


def _swapped(versions: Versions) -> Versions:
    other = {versions[0]: versions[-1], versions[-1]: versions[0]}
    return tuple(other.get(version, version) for version in versions)
