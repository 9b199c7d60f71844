"""Cells are as wide as the formats make them, and masters leave them as often as the law says."""

import pytest

pytest.importorskip("torch")

import torch

from farcast.formats.rounding import GRIDS
from farcast.study.cells import chance, spread, widths
from farcast.study.measuring import Law, Line, by_exponent, counts_of

NAME = "model.layers.0.mlp.up_proj.weight"
RECIPES = (
    "bf16",
    "fp16",
    "fp8_block-scale1.5",
    "fp8_channel-scale1.5",
    "int8-scale1.5",
    "int4_g32-scale1.5",
    "nvfp4-scale1.5",
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_cell_of_bf16_is_half_the_distance_between_its_neighbours() -> None:
    words = torch.arange(0x0081, 0x7F7F, dtype=torch.int16)  # positive, normal, not the last

    def values(words: torch.Tensor) -> torch.Tensor:
        return words.view(torch.bfloat16).double()

    expected = (values(words + 1) - values(words - 1)) / 2
    assert torch.equal(widths("bf16", values(words).float()).double(), expected)
    assert torch.equal(widths("bf16", -values(words).float()).double(), expected)


def test_a_cell_of_e4m3_is_half_the_distance_between_its_neighbours() -> None:
    codes = torch.arange(1, 0x7E, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = GRIDS["e4m3"].values(codes).double()
    inner = widths("e4m3", values.float()).double()[1:-1]
    assert torch.equal(inner, (values[2:] - values[:-2]) / 2)


def test_a_chance_is_the_step_in_cells_and_at_most_one() -> None:
    step, width = torch.tensor([0.0, -0.25, 3.0]), torch.tensor([1.0, 0.5, 2.0])
    assert chance(step, width).tolist() == [0.0, 0.5, 1.0]


def test_spread_masters_keep_their_bits_and_fill_their_cells() -> None:
    values = normal(1 << 16).to(torch.bfloat16).float()
    masters = spread(values, seed=1)
    assert torch.equal(masters.to(torch.bfloat16), values.to(torch.bfloat16))
    within = (masters - values) / widths("bf16", values)
    assert abs(float(within.mean())) < 0.005
    assert float(within.std()) == pytest.approx(12**-0.5, rel=0.02)  # of a uniform one
    assert torch.equal(masters, spread(values, seed=1))
    assert not torch.equal(masters, spread(values, seed=2))


@pytest.mark.parametrize("recipe", RECIPES)
def test_masters_leave_their_cells_as_often_as_the_law_says(recipe: str) -> None:
    """Scales are held by the recipes, so that codes change for no other reason."""
    masters = {NAME: normal(512, 512)}
    step = {NAME: 2e-3 * normal(512, 512, seed=1)}
    line, before = Line(recipe, masters), {NAME: masters[NAME] - step[NAME]}
    old = line.advance(before)
    counts = counts_of(old, line.served, line.recipe)
    told = Law(old, line.recipe).fraction(step)
    assert counts.scales_changed == 0
    assert told is not None
    assert 3e-4 < counts.fraction < 0.99
    assert counts.fraction == pytest.approx(told, rel=0.12)


def test_bins_by_exponent_add_up() -> None:
    masters, step = {NAME: normal(64, 64)}, {NAME: 1e-3 * normal(64, 64, seed=1)}
    line = Line("bf16", masters)
    old = line.advance({NAME: masters[NAME] - step[NAME]})
    bins = list(by_exponent(old, line.served, step, step))
    counts = counts_of(old, line.served, line.recipe)
    assert sum(found.weights for found in bins) == counts.weights == 64 * 64
    assert sum(found.changed for found in bins) == counts.changed
    law = Law(old, line.recipe).fraction(step)
    assert sum(found.told for found in bins) / counts.weights == pytest.approx(law)
