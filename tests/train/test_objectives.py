import math

import pytest

torch = pytest.importorskip("torch")

from farcast.train.objectives import group_advantages, policy_loss  # noqa: E402

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "is_cap": 2.0}


def loss_of(ratio: float, advantage: float) -> tuple[float, float]:
    """Loss and its gradient by the log-prob, of one token."""
    logprob = torch.tensor([math.log(ratio)], requires_grad=True)
    out = policy_loss(logprob, torch.zeros(1), torch.tensor([advantage]), **CLIP)
    out.loss.backward()
    return float(out.loss.detach()), float(logprob.grad)


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
    got_loss, got_gradient = loss_of(ratio, advantage)
    assert got_loss == pytest.approx(loss, rel=1e-5)
    assert got_gradient == pytest.approx(gradient, rel=1e-5)


def test_advantages_are_relative_to_the_group() -> None:
    got = group_advantages(torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert got.tolist() == pytest.approx([-0.8659, -0.8659, 0.8659, 0.8659], abs=1e-4)
    assert group_advantages(torch.ones(4)).tolist() == [0.0] * 4


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_stay_out(poison: float) -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    behaviour = torch.tensor([-1.0, poison, -1.0])
    out = policy_loss(logprobs, behaviour, torch.tensor([1.0, 1.0, poison]), **CLIP)
    out.loss.backward()
    assert out.loss.isfinite()
    assert logprobs.grad.tolist() == [-1.0, 0.0, 0.0]
    assert (out.tokens, out.left_out) == (1, 2)


def test_one_stale_sample_cannot_make_the_loss_infinite() -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    out = policy_loss(
        logprobs, torch.tensor([-100.0, -1.0]), torch.tensor([-1.0, 1.0]), **CLIP
    )  # exp(99) is infinite in float32
    out.loss.backward()
    assert out.loss.isfinite()
    assert logprobs.grad.isfinite().all()
    assert float(out.loss.detach()) == pytest.approx(2.0 - 1.0)
