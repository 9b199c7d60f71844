"""Each objective against its formula written out in numpy, token by token, and by hand."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from farcast.config import TrainConfig  # noqa: E402
from farcast.train.objectives import (  # noqa: E402
    LossInputs,
    StepSize,
    answer_mean,
    centred_advantages,
    constant_length,
    evaluate,
    fresh_enough,
    group_advantages,
    objective_of,
    token_mean,
)

NAMES = ["dapo", "grpo", "dr_grpo", "tis", "decoupled", "reinforce"]
LOW, HIGH, CAP = 0.2, 0.28, 2.0


def config(name: str, **more: Any) -> TrainConfig:
    return TrainConfig(objective=name, clip_low=LOW, clip_high=HIGH, is_cap=CAP, **more)


def inputs_of(
    logprobs: Any, behaviour: Any, advantages: Any, proximal: Any = None, keep: Any = None
) -> LossInputs:
    current = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    size = len(current)
    return LossInputs(
        logprobs=current,
        proximal=current.detach()
        if proximal is None
        else torch.tensor(proximal, dtype=torch.float64),
        behaviour=torch.tensor(behaviour, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        weights=torch.ones(size, dtype=torch.float64),
        keep=torch.ones(size, dtype=torch.bool) if keep is None else torch.tensor(keep),
    )


def run(name: str, inputs: LossInputs, **more: Any) -> tuple[Any, list[float]]:
    out = evaluate(objective_of(config(name, **more)).surrogate, inputs)
    out.loss.backward()
    out = out._replace(loss=out.loss.detach())
    return out, inputs.logprobs.grad.tolist()


def naive(
    name: str, new: float, prox: float, old: float, advantage: float
) -> tuple[float, float, bool]:
    """(loss, its derivative by the current log-prob, whether the token entered) of one token."""
    if name == "reinforce":
        return -advantage * new, -advantage, True
    if name == "tis":
        weight = min(math.exp(new - old), CAP)
        return -weight * advantage * new, -weight * advantage, True
    if name == "decoupled":
        age, ratio = math.exp(prox - old), math.exp(new - prox)
        if age > CAP:
            return 0.0, 0.0, False
        factor, cap = age, math.inf
    else:
        factor, ratio, cap = 1.0, math.exp(new - old), CAP
    clipped = np.clip(ratio, 1 - LOW, 1 + HIGH)
    free, held = min(ratio, cap) * advantage, clipped * advantage
    moves = free <= held and ratio <= cap and not (free == held and ratio != clipped)
    return -factor * min(free, held), -factor * ratio * advantage if moves else 0.0, True


near = st.floats(-3, 3).map(lambda x: round(x, 3))
columns = st.lists(st.tuples(near, near, near, near), min_size=1, max_size=6)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(rows=columns)
def test_every_objective_is_its_formula(
    name: str, rows: list[tuple[float, float, float, float]]
) -> None:
    new, prox, old, advantage = (np.array(column) for column in zip(*rows, strict=True))
    expected = [naive(name, *map(float, row)) for row in zip(new, prox, old, advantage)]  # noqa: B905
    out, gradient = run(name, inputs_of(new, old, advantage, prox))
    assert float(out.loss) == pytest.approx(sum(e[0] for e in expected), abs=1e-9)
    assert gradient == pytest.approx([e[1] for e in expected], abs=1e-9)
    assert out.tokens == sum(e[2] for e in expected)
    assert out.tokens + out.masked + out.left_out == len(rows)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 1.0, -1.0, -1.0),
        (1.2, 1.0, -1.2, -1.2),
        (1.5, 1.0, -1.28, 0.0),  # above 1 + high: no further push
        (0.5, 1.0, -0.5, -0.5),  # the minimum keeps the way back open
        (0.5, -1.0, 0.8, 0.0),  # below 1 - low: no further push
        (1.5, -1.0, 1.5, 1.5),
        (50.0, -1.0, 2.0, 0.0),  # cut at is_cap
    ],
)
def test_the_clipped_surrogate_by_hand(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    out, got = run("dapo", inputs_of([math.log(ratio)], [0.0], [advantage]))
    assert float(out.loss) == pytest.approx(loss, rel=1e-6)
    assert got == pytest.approx([gradient], rel=1e-6)


def test_decoupled_clips_around_the_start_of_the_step_not_around_the_sampler() -> None:
    old, start = [-2.0], [-1.5]  # weight e^0.5 = 1.65, outside any clip around the sampler
    _, at_start = run("decoupled", inputs_of(start, old, [1.0], start))
    _, clipped_there = run("dapo", inputs_of(start, old, [1.0]))
    assert at_start == pytest.approx([-math.exp(0.5)])
    assert clipped_there == [0.0]
    _, moved_far = run("decoupled", inputs_of([-1.2], old, [1.0], start))  # e^0.3 > 1.28
    assert moved_far == [0.0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("column", ["logprobs", "behaviour", "advantages", "proximal"])
def test_numbers_that_are_not_finite_stay_out(name: str, poison: float, column: str) -> None:
    clean = {"logprobs": -1.0, "behaviour": -1.1, "advantages": 1.0, "proximal": -1.0}
    rows = {key: [value, value] for key, value in clean.items()}
    rows[column][1] = poison
    out, gradient = run(name, inputs_of(**rows))
    alone, expected = run(name, inputs_of(**{key: [value] for key, value in clean.items()}))
    assert float(out.loss) == float(alone.loss)
    assert gradient == [*expected, 0.0]
    assert (out.tokens, out.left_out) == (1, 1)


@pytest.mark.parametrize("name", NAMES)
def test_case_077_one_stale_sample_cannot_make_the_loss_infinite(name: str) -> None:
    """Case 077: exp(99) is infinite in float32."""
    inputs = inputs_of([-1.0, -1.0], [-100.0, -1.0], [-1.0, 1.0], [-1.0, -1.0])
    inputs = LossInputs(*(column.detach().float() for column in inputs[:5]), inputs.keep)
    inputs.logprobs.requires_grad_()
    out, gradient = run(name, inputs)
    assert out.loss.isfinite()
    assert all(map(math.isfinite, gradient))
    assert abs(float(out.loss)) <= CAP + 1


def test_advantages_are_relative_to_the_group() -> None:
    rewards = torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert group_advantages(rewards).tolist() == pytest.approx(
        [-0.8659, -0.8659, 0.8659, 0.8659], abs=1e-4
    )
    assert centred_advantages(rewards).tolist() == [-0.5, -0.5, 0.5, 0.5]
    assert group_advantages(torch.ones(4)).tolist() == [0.0] * 4


@pytest.mark.parametrize("advantages", [group_advantages, centred_advantages])
def test_case_083_a_reward_that_is_not_finite_has_no_part_in_the_others_baseline(
    advantages: Any,
) -> None:
    with_poison = advantages(torch.tensor([0.0, float("nan"), 1.0, float("inf")]))
    assert with_poison[[0, 2]].tolist() == advantages(torch.tensor([0.0, 1.0])).tolist()
    assert with_poison[[1, 3]].isnan().all()
    assert advantages(torch.tensor([float("nan")] * 2)).isnan().all()


def test_means_count_tokens_or_answers() -> None:
    """Two answers, of 1 and 3 tokens."""
    lengths, size = torch.tensor([1.0, 3.0, 3.0, 3.0]), StepSize(tokens=4, answers=2)
    assert token_mean(lengths, size).tolist() == [0.25] * 4
    assert answer_mean(lengths, size).tolist() == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6])
    assert constant_length(8)(lengths, size).tolist() == [1 / 16] * 4
    empty = StepSize(tokens=0, answers=0)
    assert all(token_mean(lengths, empty).isfinite())


@given(ages=st.lists(st.integers(0, 40), min_size=1, max_size=20), bound=st.integers(0, 40))
def test_span_masking_keeps_exactly_the_young_tokens(ages: list[int], bound: int) -> None:
    assert fresh_enough(torch.tensor(ages), bound).tolist() == [age <= bound for age in ages]
    assert fresh_enough(torch.tensor(ages), None).all()


def test_masked_tokens_move_nothing() -> None:
    inputs = inputs_of([-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0], keep=[True, False])
    out, gradient = run("dapo", inputs)
    assert gradient == [-1.0, 0.0]
    assert (out.tokens, out.masked, out.left_out) == (1, 1, 0)
