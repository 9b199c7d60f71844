"""The check of `farcast bench serve` that each token was written by the version it is said to be
of: an engine in another precision than the check's own, wrong statements of every kind."""

import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from farcast.bench.serving_judge import Answer, Judge, Versions, borders, moved_border
from farcast.bench.serving_recomputed import Weights, judged, plant
from farcast.bench.serving_spans import _Run
from farcast.engines.modules import load_module
from farcast.errors import ConfigError
from models import tiny_folder

LAST = 4
TOKENS = 24
GAIN, SHARE = 6.0, 0.05


class Engine:
    """Generates greedily in bf16, and goes to the next version in the middle of an answer."""

    def __init__(self, run: _Run) -> None:
        self._weights = Weights(run.archive, run.folder)
        for version in range(LAST + 1):
            self._weights.module(version).to(torch.bfloat16)

    def answer(self, prompt: tuple[int, ...], versions: Versions, *, quiet: bool = False) -> Answer:
        from transformers import DynamicCache

        cache, fed = DynamicCache(), list(prompt)
        tokens, logprobs = list[int](), list[float]()
        for version in versions:
            module = self._weights.module(version)
            with torch.no_grad():
                logits = module(input_ids=torch.tensor([fed]), cache=cache, use_cache=True).logits
            row = torch.log_softmax(logits[0, -1].float(), dim=-1)
            fed = [int(row.argmax())]
            tokens += fed
            logprobs.append(float(row[fed[0]]))
        return Answer(prompt, tuple(tokens), tuple(logprobs), versions, quiet)


def sharp_model(folder: Path) -> Path:
    """The tiny model, surer of itself: as it is, all its versions say nearly the same."""
    module = load_module(tiny_folder())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(GAIN if parameter.ndim > 1 else 1.0)
    module.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_folder() / name, folder)
    return folder


class World:
    def __init__(self, folder: Path) -> None:
        run = _Run(folder, sharp_model(folder / "sharp"), SHARE)
        for number in range(1, LAST + 1):
            run.publish(number)
        engine, rng = Engine(run), np.random.default_rng(0)
        self.weights = Weights(run.archive, run.folder)
        self.recompute = lru_cache(maxsize=None)(self.weights.errors)

        def prompt() -> tuple[int, ...]:
            return tuple(int(token) for token in rng.integers(5, 90, 6))

        whole = [(version,) * TOKENS for version in range(LAST + 1)]
        self.quiet = [engine.answer(prompt(), v, quiet=True) for v in whole for _ in range(3)]
        self.crossed = [
            engine.answer(prompt(), (old,) * at + (old + 1,) * (TOKENS - at))
            for old in range(1, LAST - 1)
            for at in (6, 10, 14, 18)
        ]
        self.judge = Judge(self.recompute, self.quiet, LAST)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("judge"))


def wrong(world: World, answer: Answer, versions: Versions) -> bool:
    return world.judge.judge(answer, versions).wrong


def test_right_statements_are_right(world: World) -> None:
    for answer in (*world.quiet, *world.crossed):
        assert not wrong(world, answer, answer.versions)


@pytest.mark.parametrize("step", [-1, 1])
def test_a_version_early_or_late_is_found(world: World, step: int) -> None:
    for answer in (*world.quiet, *world.crossed):
        said = tuple(version + step for version in answer.versions)
        if min(said) >= 0 and max(said) <= LAST:
            assert wrong(world, answer, said)


def test_swapped_versions_are_found(world: World) -> None:
    for answer in world.crossed:
        old, new = answer.versions[0], answer.versions[-1]
        assert wrong(world, answer, tuple(old if v == new else new for v in answer.versions))


@pytest.mark.parametrize("by", [-4, -1, 1, 4])
def test_a_moved_border_is_found(world: World, by: int) -> None:
    """Where one token's log-prob is the same under both versions, nobody could tell."""
    found = 0
    for answer in world.crossed:
        said = moved_border(answer.versions, borders(answer.versions)[0], by)
        assert said is not None
        verdict = world.judge.judge(answer, said)
        assert verdict.rival in (None, answer.versions) or verdict.wrong
        found += verdict.wrong
    assert found >= 0.75 * len(world.crossed)


def test_a_border_that_is_left_out_is_found(world: World) -> None:
    for answer in world.crossed:
        assert wrong(world, answer, (answer.versions[0],) * TOKENS)
        assert wrong(world, answer, (answer.versions[-1],) * TOKENS)


def test_weights_that_no_version_has_are_found(world: World) -> None:
    answer = world.quiet[0]
    odd = answer._replace(logprobs=tuple(value - 1.0 for value in answer.logprobs))
    verdict = world.judge.judge(odd, odd.versions)
    assert verdict.wrong
    assert verdict.rival is None


def test_an_answer_beyond_the_noise_that_no_neighbour_explains_better_is_right(
    world: World,
) -> None:
    answer = world.crossed[0]
    more = 1.5 * world.judge.noise(TOKENS) / TOKENS
    noisy = answer._replace(logprobs=tuple(value + more for value in answer.logprobs))
    assert not wrong(world, noisy, noisy.versions)


def test_the_report_counts_what_was_planted(world: World) -> None:
    answers = [*world.quiet, *world.crossed]
    report = judged(world.recompute, answers, lost=2)
    assert report.span_mismatches == 0
    assert report.control_mismatches == report.answers == len(answers)
    assert report.answers_crossed == len(world.crossed)
    assert report.requests_lost == 2
    assert report.smallest_shift_found == 1
    assert all(kind.found <= kind.planted for kind in report.planted)
    swapped: Any = next(kind for kind in plant(world.judge, answers)[0] if "swap" in kind.what)
    assert swapped.found == swapped.planted == len(world.crossed)


def test_without_a_quiet_answer_there_is_no_judging(world: World) -> None:
    with pytest.raises(ConfigError):
        Judge(world.recompute, [], LAST)
