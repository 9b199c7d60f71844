"""Directions are those of torch's own optimizers."""

import math
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch

from farcast.config import TrainConfig
from farcast.study.directions import (
    OptimizerKind,
    directions_of,
    kind_of,
    layer_of,
    orthogonal,
    rates,
    scale_of,
)

CONFIG = TrainConfig()
NAME = "layers.0.mlp.up_proj.weight"
LR = 1e-2


def gradients(*shape: int, count: int = 5) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield torch.randn(*shape, generator=generator)


def followed(kind: OptimizerKind, *shape: int) -> torch.Tensor:
    """What five directions take off in all, at the rate `LR`."""
    rule = directions_of(kind, CONFIG, {NAME})
    total = torch.zeros(*shape)
    for gradient in gradients(*shape):
        total += LR * scale_of(kind, NAME, total.shape, {NAME}) * rule(NAME, gradient)
    return total


def taken(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> torch.Tensor:
    for gradient in gradients(*param.shape):
        param.grad = gradient
        optimizer.step()
    return -param.detach()


def test_adamw_is_torchs() -> None:
    param = torch.zeros(16, 8, requires_grad=True)
    betas = (CONFIG.beta1, CONFIG.beta2)
    optimizer = torch.optim.AdamW([param], lr=LR, betas=betas, weight_decay=0.0)
    torch.testing.assert_close(followed("adamw", 16, 8), taken(optimizer, param))


def test_sgd_is_torchs() -> None:
    param = torch.zeros(16, 8, requires_grad=True)
    optimizer = torch.optim.SGD([param], lr=LR, momentum=0.9)
    torch.testing.assert_close(followed("sgd", 16, 8), taken(optimizer, param))


@pytest.mark.parametrize(
    ("kind", "scale"), [("muon", "match_rms_adamw"), ("muon_unscaled", "original")]
)
@pytest.mark.parametrize("shape", [(48, 16), (16, 48)])
def test_both_muons_are_torchs_to_the_bits_that_bf16_keeps(
    kind: OptimizerKind, scale: str, shape: tuple[int, int]
) -> None:
    param = torch.zeros(*shape, requires_grad=True)
    optimizer = torch.optim.Muon(
        [param], lr=LR, momentum=CONFIG.muon_momentum, weight_decay=0.0, adjust_lr_fn=scale
    )
    ours, theirs = followed(kind, *shape), taken(optimizer, param)
    assert float((ours - theirs).norm() / theirs.norm()) < 0.02


def test_muon_leaves_what_is_not_hidden_to_adamw() -> None:
    gradient = next(gradients(8, 8))
    muon, adamw = (directions_of(kind, CONFIG, {NAME}) for kind in ("muon", "adamw"))
    assert torch.equal(muon("lm_head.weight", gradient), adamw("lm_head.weight", gradient))
    assert not torch.equal(muon(NAME, gradient), adamw(NAME, gradient))


def test_an_orthogonal_factor_has_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(orthogonal(next(gradients(64, 16))))
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3


def test_a_rate_rises_in_a_line_and_then_stands() -> None:
    assert [rates(2.0, 4, step) for step in (1, 2, 4, 9)] == [0.5, 1.0, 2.0, 2.0]
    assert rates(2.0, 0, 1) == 2.0


def test_scales_of_muon_differ_by_the_shape_alone() -> None:
    wide = scale_of("muon_unscaled", NAME, torch.Size((100, 400)), {NAME})
    assert wide == pytest.approx(1 / (0.2 * math.sqrt(400)))
    assert scale_of("muon_unscaled", "lm_head.weight", torch.Size((100, 400)), {NAME}) == 1.0


def test_tensors_are_told_apart_by_name_and_shape() -> None:
    matrix, vector = torch.zeros(2, 2), torch.zeros(2)
    assert kind_of("model.embed_tokens.weight", matrix) == "embedding"
    assert kind_of("model.layers.3.self_attn.q_proj.weight", matrix) == "attention"
    assert kind_of("model.layers.3.mlp.up_proj.weight", matrix) == "mlp"
    assert kind_of("model.layers.3.input_layernorm.weight", vector) == "norm"
    assert layer_of("model.layers.3.mlp.up_proj.weight") == 3
    assert layer_of("model.norm.weight") is None
