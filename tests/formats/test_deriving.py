"""derive(masters) holds, bit for bit, what the library that defines a format would store."""

from itertools import pairwise

import kept_libraries
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farcast.delta import to_bits
from farcast.errors import ConfigError, PoisonError
from farcast.formats import FORMATS, parse_recipe, quantization_config
from farcast.formats.deriving import Rows, derive, layout_of, measure, unpacked

QUANTISED = [name for name in FORMATS if parse_recipe(name).layout.quantised]
MODULE = "model.layers.3.mlp.down_proj"
GROUP = {"int4_g32": 32, "int4_g128": 128, "nvfp4": 16, "mxfp4": 32}


def derived(weight: torch.Tensor, recipe: str) -> dict[str, torch.Tensor]:
    served = derive({f"{MODULE}.weight": weight}, recipe)
    return {name.removeprefix(f"{MODULE}."): tensor for name, tensor in served.items()}


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(to_bits(a[name]) == to_bits(b[name]) for name in a)


def kept(format_name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    stored = kept_libraries.compressed(format_name, weight)
    if format_name == "fp8_block":  # the same numbers under the name that DeepSeek gave them
        stored["weight_scale_inv"] = stored.pop("weight_scale")
    return stored


KINDS = ("normal", "zeros", "tiny", "subnormal", "huge", "ties", "bf16", "outlier", "signed zeros")


def weights(kind: str, rows: int, columns: int, seed: int) -> torch.Tensor:
    made = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02
    if kind == "zeros":
        made[: rows // 2 + 1] = 0
    elif kind == "tiny":
        made *= 1e-33
    elif kind == "subnormal":
        made *= 1e-40
    elif kind == "huge":
        made *= 1e35
    elif kind == "ties":  # halves and quarters under a scale that is a power of two
        made = (made * 1e4).round().clamp(-30, 30) / 4
        made[:, 0] = 7.5
    elif kind == "bf16":
        made = made.bfloat16().float()
    elif kind == "outlier":
        made[0, 0] = 1e4
    elif kind == "signed zeros":
        made[made < 0.01] = -0.0
    return made


@pytest.mark.parametrize("format_name", QUANTISED)
@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 300),
    groups=st.integers(1, 3),
    rest=st.integers(0, 127),
    seed=st.integers(0, 2**31),
)
def test_codes_and_scales_are_those_of_compressed_tensors(
    format_name: str, kind: str, rows: int, groups: int, rest: int, seed: int
) -> None:
    group = GROUP.get(format_name)
    columns = groups * group if group else groups * 100 + rest
    weight = weights(kind, rows, columns, seed)
    assert same_bits(derived(weight, format_name), kept(format_name, weight))


@settings(max_examples=25, deadline=None)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**31))
def test_fp8_is_also_that_of_torchao(kind: str, seed: int) -> None:
    from torchao.quantization.quant_primitives import _choose_scale_float8, _quantize_affine_float8

    weight = weights(kind, 256, 384, seed)
    for format_name, block, scale_name in (
        ("fp8_block", [128, 128], "weight_scale_inv"),
        ("fp8_channel", [1, 384], "weight_scale"),
    ):
        scale = _choose_scale_float8(weight, block)
        if not bool((scale > 0).all()):
            continue  # torchao divides by zero where compressed-tensors puts an epsilon
        ours = derived(weight, format_name)
        assert to_bits(ours[scale_name]) == to_bits(scale)
        assert to_bits(ours["weight"]) == to_bits(_quantize_affine_float8(weight, scale))


@settings(max_examples=25, deadline=None)
@given(
    # torchao divides by no subnormal scale, and keeps the sign of a weight that is exactly -0.0,
    # which compressed-tensors does not.
    kind=st.sampled_from([kind for kind in KINDS if kind != "subnormal"]),
    seed=st.integers(0, 2**31),
)
def test_mxfp4_is_also_that_of_torchao(kind: str, seed: int) -> None:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    weight = weights(kind, 64, 96, seed) + 0.0
    scale, packed = to_mx(weight, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.EVEN)
    ours = derived(weight, "mxfp4")
    assert torch.equal(ours["weight_scale"], scale.view(torch.uint8).reshape(64, 3))
    assert torch.equal(ours["weight_packed"], packed.view(torch.uint8))


@pytest.mark.parametrize("format_name", QUANTISED)
def test_what_is_served_is_close_to_the_master(format_name: str) -> None:
    weight = weights("normal", 256, 256, 1)
    stored = derived(weight, format_name)
    if format_name == "fp8_block":
        stored["weight_scale"] = stored.pop("weight_scale_inv")
    back = kept_libraries.decompressed(format_name, stored).float()
    bound = 0.04 if format_name.startswith(("fp8", "int8")) else 0.25
    assert float((back - weight).norm() / weight.norm()) < bound


@pytest.mark.parametrize("format_name", ["fp8_block_pow2", "fp8_channel_pow2", "int4_g32_pow2"])
@settings(max_examples=30, deadline=None)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 2**31))
def test_power_of_two_scales_are_the_exact_ones_rounded_up(
    format_name: str, kind: str, seed: int
) -> None:
    weight = weights(kind, 130, 160, seed)
    pow2, exact = derived(weight, format_name), derived(weight, format_name.removesuffix("_pow2"))
    name = next(name for name in pow2 if "scale" in name)
    mantissa, exponent = torch.frexp(pow2[name].float())
    assert bool((mantissa == 0.5).all()) or kind in ("tiny", "subnormal")
    ratio = pow2[name].double() / exact[name].double()
    normal = exponent > -125
    assert bool(((ratio >= 0.99) & (ratio <= 2))[normal].all())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("format_name", QUANTISED)
def test_what_is_not_finite_is_refused_by_name(format_name: str, value: float) -> None:
    weight = weights("normal", 40, 128, 0)
    weight[17, 33] = value
    with pytest.raises(PoisonError, match=r"down_proj\.weight"):
        derived(weight, format_name)


def test_fp16_refuses_what_it_cannot_hold_and_rounds_like_torch() -> None:
    weight = torch.tensor([65504.0, 65519.9, 1e-8, -0.0, float("nan")])
    served = derive({"a.weight": weight}, "fp16")["a.weight"]
    assert to_bits(served) == to_bits(weight.to(torch.float16))
    with pytest.raises(PoisonError, match="65504"):
        derive({"a.weight": torch.tensor([65520.0])}, "fp16")


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    layer = "model.layers.0"
    shapes = {
        "model.embed_tokens.weight": (50, 64),
        f"{layer}.self_attn.q_proj.weight": (64, 64),
        f"{layer}.self_attn.k_proj.weight": (32, 64),
        f"{layer}.self_attn.q_proj.bias": (64,),
        f"{layer}.mlp.gate.weight": (4, 64),
        f"{layer}.mlp.experts.0.w2.weight": (64, 64),
        f"{layer}.mlp.up_proj.weight": (100, 64),
        f"{layer}.mlp.down_proj.weight": (64, 100),
        f"{layer}.input_layernorm.weight": (64,),
        "model.norm.weight": (64,),
        "lm_head.weight": (50, 64),
    }
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def test_high_precision_tensors_are_those_of_the_rule_and_those_the_groups_do_not_fit() -> None:
    masters = model() | {"counts": torch.arange(3), "half": torch.ones(2, dtype=torch.bfloat16)}
    served = derive(masters, "int4_g32")
    assert "model.layers.0.mlp.up_proj.weight_packed" in served
    assert "model.layers.0.mlp.experts.0.w2.weight_packed" in served
    for name in (
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.down_proj.weight",  # 100 columns are no groups of 32
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.input_layernorm.weight",
    ):
        assert served[name].dtype == torch.bfloat16
    assert served["counts"].dtype == torch.int64
    mlp = derive(masters, "int4_g32-rule_mlp")
    assert "model.layers.0.self_attn.q_proj.weight" in mlp
    assert "model.layers.0.mlp.up_proj.weight_packed" in mlp
    kept_modules = quantization_config("int4_g32", served)
    assert kept_modules is not None
    assert {"lm_head", "model.layers.0.mlp.gate", "model.layers.0.mlp.down_proj"} <= set(
        kept_modules["ignore"]
    )
    assert "model.layers.0.self_attn.q_proj" not in kept_modules["ignore"]


def test_matrices_that_engines_fuse_share_nvfp4s_global_scale() -> None:
    masters = model()
    served = derive(masters, "nvfp4")
    q, k = (f"model.layers.0.self_attn.{x}_proj" for x in "qk")
    assert torch.equal(served[f"{q}.weight_global_scale"], served[f"{k}.weight_global_scale"])
    alone = derive({f"{q}.weight": masters[f"{q}.weight"]}, "nvfp4")
    other = derive({f"{k}.weight": masters[f"{k}.weight"]}, "nvfp4")
    both = [alone[f"{q}.weight_global_scale"], other[f"{k}.weight_global_scale"]]
    assert float(served[f"{q}.weight_global_scale"]) == min(map(float, both))


def test_a_name_like_a_scale_is_refused() -> None:
    masters = model()
    masters["model.layers.0.mlp.up_proj.weight_scale"] = torch.ones(1)
    with pytest.raises(ConfigError, match="served twice"):
        derive(masters, "int8")


@pytest.mark.parametrize("format_name", [*FORMATS, "fp8_block_pow2", "nvfp4-scale1.5-round0.75"])
def test_nothing_given_is_written_to_and_threads_change_nothing(format_name: str) -> None:
    masters, same = model(), model()
    before = torch.get_num_threads()
    try:
        made = []
        for threads in (1, 4):
            torch.set_num_threads(threads)
            made.append(derive(masters, format_name))
    finally:
        torch.set_num_threads(before)
    assert same_bits(*made)
    assert same_bits(masters, same)


@pytest.mark.parametrize("format_name", [*FORMATS, "fp8_block_pow2"])
@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(0, 300), max_size=3), seed=st.integers(0, 1000))
def test_shards_give_the_rows_of_the_whole(format_name: str, cuts: list[int], seed: int) -> None:
    name = f"{MODULE}.weight"
    weight = weights("normal", 300, 256, seed)
    whole = derive({name: weight}, format_name)
    edges = [0, *sorted(cuts), 300]
    spans = list(pairwise(edges))
    recipe = parse_recipe(format_name)
    shards = [({name: weight[a:b]}, {name: Rows(a, 300)}) for a, b in spans]
    found = [measure(shard, recipe, rows=rows) for shard, rows in shards]
    most = {key: torch.stack([f[key] for f in found]).amax(0) for key in found[0]}
    parts = [derive(shard, recipe, rows=rows, measured=most) for shard, rows in shards]
    by_row = layout_of(name, recipe, (300, 256))
    assert by_row.keys() == whole.keys()
    for key, tensor in whole.items():
        if by_row[key]:
            pieces = torch.cat([part[key].view(torch.uint8) for part in parts])
            assert torch.equal(pieces, tensor.view(torch.uint8))
        else:
            assert all(to_bits(part[key]) == to_bits(tensor) for part in parts)


def test_unpacked_gives_one_code_a_weight() -> None:
    weight = weights("normal", 8, 64, 0)
    for format_name, dtype in (("int4_g32", torch.int8), ("mxfp4", torch.uint8)):
        served = derive({f"{MODULE}.weight": weight}, format_name)
        codes = unpacked(served, format_name)[MODULE]
        assert (codes.shape, codes.dtype) == (weight.shape, dtype)
