"""Sticky policies: what is served stays within the stated bound of the master, and follows from
the masters and the version before alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farcast.delta import to_bits
from farcast.errors import ConfigError, PoisonError
from farcast.formats import FORMATS, Recipe, parse_recipe
from farcast.formats.deriving import derive, unpacked
from farcast.formats.rounding import GRIDS, rounded

MODULE = "model.layers.0.mlp.up_proj"
NAME = f"{MODULE}.weight"
ELEMENTS = {"bf16": 2.0, "fp16": 2.0, "e4m3": 500.0, "int8": 130.0, "int4": 9.0, "e2m1": 7.0}

thresholds = st.sampled_from([0.5, 0.55, 0.6, 0.75, 1.0, 1.5])
seeds = st.integers(0, 2**31)


def walk(size: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values, and the values a small step later; some on the borders between codes."""
    random = torch.Generator().manual_seed(seed)
    first = (torch.rand(4096, generator=random) * 2 - 1) * size
    first[::7] = (first[::7] * 8).round() / 8
    second = first + torch.randn(4096, generator=random) * size * 0.02
    second[::5] = (second[::5] * 16).round() / 16
    return first, second


@pytest.mark.parametrize("element", ELEMENTS)
@settings(max_examples=15, deadline=None)
@given(threshold=thresholds, seed=seeds)
def test_a_code_is_never_further_than_its_threshold(
    element: str, threshold: float, seed: int
) -> None:
    first, second = walk(ELEMENTS[element], seed)
    grid = GRIDS[element]  # type: ignore[index]
    before = grid.nearest(first)
    codes = rounded(element, second, before, threshold)  # type: ignore[arg-type]
    plain = grid.nearest(second)
    same = codes.view(torch.uint8) == plain.view(torch.uint8)
    kept = codes.view(torch.uint8) == before.view(torch.uint8)
    assert bool((same | kept).all())
    value = grid.values(codes).double()
    down, up = grid.neighbours(codes)
    off = second.double() - value
    step = torch.where(off < 0, value - down, up - value)
    inside = (off.abs() <= threshold * step) | (step == 0)
    assert bool(inside.all())


@pytest.mark.parametrize("element", ELEMENTS)
@settings(max_examples=15, deadline=None)
@given(seed=seeds)
def test_threshold_one_half_is_plain_rounding(element: str, seed: int) -> None:
    """Checked on the rule itself, one grain above the value at which it is left out."""
    first, second = walk(ELEMENTS[element], seed)
    grid = GRIDS[element]  # type: ignore[index]
    before = grid.nearest(first)
    barely = rounded(element, second, before, 0.5 + 1e-15)  # type: ignore[arg-type]
    plain = rounded(element, second, before, 0.5)  # type: ignore[arg-type]
    assert torch.equal(plain.view(torch.uint8), grid.nearest(second).view(torch.uint8))
    off = (grid.values(barely).double() - grid.values(plain).double()).abs()
    twice = (second.double() - grid.values(plain).double()).abs() * 2
    assert bool(((off == 0) | (off == twice)).all())  # only ties may fall to the other side


@pytest.mark.parametrize("element", ELEMENTS)
def test_a_code_whose_value_is_the_master_stays_and_every_code_has_neighbours(element: str) -> None:
    grid = GRIDS[element]  # type: ignore[index]
    first, _ = walk(ELEMENTS[element], 3)
    codes = grid.nearest(first)
    values = grid.values(codes)
    assert torch.equal(
        rounded(element, values, codes, 1.0).view(torch.uint8),  # type: ignore[arg-type]
        codes.view(torch.uint8),
    )
    down, up = grid.neighbours(codes)
    assert bool(((down < values) | (values == values.min())).all())
    assert bool(((up > values) | (values == values.max())).all())
    assert torch.equal(grid.values(grid.nearest(up.float())).double(), up)
    middle = ((values.double() + up) / 2).float()
    assert bool(((grid.values(grid.nearest(middle)) - values).abs() <= (up - values)).all())


def scale_numbers(served: dict[str, torch.Tensor], recipe: Recipe) -> torch.Tensor:
    name = next(n for n in served if n.endswith(("weight_scale", "weight_scale_inv")))
    scale = served[name]
    if recipe.format == "mxfp4":
        return torch.ldexp(torch.ones(scale.shape), scale.int() - 127).double()
    over = served.get(f"{MODULE}.weight_global_scale")
    return scale.double() if over is None else scale.double() / over.double()


SCALED = [name for name in FORMATS if parse_recipe(name).layout.quantised]


@pytest.mark.parametrize("format_name", [*SCALED, "fp8_block_pow2"])
@settings(max_examples=12, deadline=None)
@given(bound=st.sampled_from([1.25, 1.5, 2.0, 4.0]), seed=seeds, drift=st.floats(0.001, 0.3))
def test_a_scale_never_strays_more_than_its_bound_and_never_clips(
    format_name: str, bound: float, seed: int, drift: float
) -> None:
    base = parse_recipe(format_name)
    recipe = Recipe(format=base.format, pow2=base.pow2, bound=bound)
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(160, 256, generator=random)
    served = None
    for _ in range(4):
        served = derive({NAME: weight}, recipe, previous=served)
        exact = derive({NAME: weight}, base)
        ratio = scale_numbers(served, recipe) / scale_numbers(exact, base)
        if base.format == "nvfp4":
            # Two scales, each within the bound; the outer one moves the grid of the inner one.
            over = f"{MODULE}.weight_global_scale"
            room = exact[over] / served[over]
            assert 1.0 <= float(room) <= bound * 1.000001
            assert bool((ratio <= bound * bound * 1.2).all())
        else:
            assert bool(((ratio >= 1.0) & (ratio <= bound)).all())
        weight = weight * (1 + drift * torch.randn(weight.shape, generator=random))


def test_the_largest_code_does_not_hide_a_value_that_no_code_has() -> None:
    before = derive({"x": torch.tensor([65504.0, -65504.0])}, "fp16")
    with pytest.raises(PoisonError, match="65504"):
        derive({"x": torch.tensor([1e6, -65504.0])}, "fp16-round0.75", previous=before)
    largest = torch.tensor([torch.finfo(torch.bfloat16).max])
    before = derive({"x": largest}, "bf16")
    served = derive({"x": largest * torch.inf}, "bf16-round0.75", previous=before)
    assert served["x"].isinf().all()


def test_scales_that_stay_keep_codes_that_would_all_have_moved() -> None:
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    grown = weight.clone()
    grown[weight.abs() == weight.abs().max()] *= 1.01
    changed = {}
    for name in ("fp8_block", "fp8_block-scale1.25"):
        first = derive({NAME: weight}, name)
        second = derive({NAME: grown}, name, previous=first)
        before, after = (unpacked(s, name)[NAME].view(torch.uint8) for s in (first, second))
        changed[name] = int((before != after).sum())
    assert changed["fp8_block-scale1.25"] <= 1 < 100 < changed["fp8_block"]


@pytest.mark.parametrize(
    "name", ["bf16-round0.75", "fp16-round1", "int4_g32-scale1.5-round0.75", "nvfp4-scale2-round1"]
)
def test_the_same_masters_and_the_same_previous_codes_give_the_same_bytes(name: str) -> None:
    random = torch.Generator().manual_seed(5)
    weight = torch.randn(64, 128, generator=random)
    first = derive({NAME: weight}, name)
    moved = weight + torch.randn(64, 128, generator=random) * 0.01
    again = [derive({NAME: moved}, name, previous=first) for _ in range(2)]
    fresh = derive({NAME: moved}, name)
    assert all(to_bits(again[0][key]) == to_bits(again[1][key]) for key in again[0])
    assert any(to_bits(again[0][key]) != to_bits(fresh[key]) for key in fresh)
    # A tensor of another shape is no previous one.
    other = {key: tensor[:1] for key, tensor in first.items() if len(tensor) > 1}
    unled = derive({NAME: moved}, name, previous=other)
    assert all(to_bits(unled[key]) == to_bits(fresh[key]) for key in fresh)


def test_fewer_codes_flip_under_a_higher_threshold() -> None:
    random = torch.Generator().manual_seed(0)
    start = torch.randn(64, 512, generator=random) * 0.02
    flips = {}
    for threshold in (0.5, 0.75, 1.0):
        recipe, weight = Recipe(format="bf16", threshold=threshold), start
        served, count = derive({NAME: start}, recipe), 0
        for _ in range(8):
            weight = weight + torch.randn(start.shape, generator=random) * 2e-6
            made = derive({NAME: weight}, recipe, previous=served)
            count += int((made[NAME].view(torch.int16) != served[NAME].view(torch.int16)).sum())
            served = made
        flips[threshold] = count
    assert flips[1.0] < flips[0.75] < flips[0.5]


@pytest.mark.parametrize(
    "name",
    [
        *FORMATS,
        "fp8_block_pow2",
        "int4_g128-rule_mlp-scale1.25-round0.6",
        "nvfp4-rule_experts",
        "bf16-round0.75",
    ],
)
def test_a_recipe_has_one_name(name: str) -> None:
    recipe = parse_recipe(name)
    assert recipe.name == name
    assert parse_recipe(recipe.name) == recipe


@pytest.mark.parametrize(
    "text",
    [
        "fp9",
        "",
        "bf16_pow2",
        "nvfp4_pow2",
        "bf16-scale1.5",
        "int8-scale1",
        "int8-scale1.50",
        "int8-round0.4",
        "int8-round99",
        "int8-rule_none",
        "int8-round0.6-scale1.5",
        "int8-round0.6-round0.7",
        "int8-" + "x" * 500,
        "int8-scalenan",
    ],
)
def test_what_is_no_recipe_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_recipe(text)
