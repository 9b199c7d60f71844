"""What config.json must say for an engine to load a served format. Pure.

fp8 blocks are announced as DeepSeek-V3's checkpoints do (`quant_method: fp8`), everything else as
compressed-tensors; vLLM, SGLang and transformers read both. What is left in high precision is
found by the tensors themselves: a matrix that is served without a scale is named in the list of
modules to leave alone, and so is the output head, which tied models don't store.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from farcast.formats.recipes import Recipe, parse_recipe

_HEAD = "lm_head"
_SCALES = ("weight_scale", "weight_scale_inv")


def checkpoint_config(
    config: Mapping[str, Any], recipe: Recipe | str, names: Iterable[str]
) -> dict[str, Any]:
    """A model's config.json for the served tensors called `names`; the one given is of the model in
    high precision and stays as it is."""
    recipe = parse_recipe(recipe) if isinstance(recipe, str) else recipe
    out = {key: value for key, value in config.items() if key != "quantization_config"}
    key = "dtype" if "dtype" in config else "torch_dtype"
    out[key] = "float16" if recipe.format == "fp16" else "bfloat16"
    entry = quantization_config(recipe, names)
    return out if entry is None else out | {"quantization_config": entry}


def quantization_config(recipe: Recipe | str, names: Iterable[str]) -> dict[str, Any] | None:
    """The `quantization_config` entry for the served tensors called `names`; None where a format
    needs none."""
    recipe = parse_recipe(recipe) if isinstance(recipe, str) else recipe
    if not recipe.layout.quantised:
        return None
    kept = _kept_modules(names)
    if recipe.format == "fp8_block":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [recipe.layout.block_rows, recipe.layout.group],
            "modules_to_not_convert": kept,
        }
    weights, activations = _WEIGHTS[recipe.format], _ACTIVATIONS.get(recipe.format)
    return {
        "quant_method": "compressed-tensors",
        "format": _CONTAINERS[recipe.format],
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"symmetric": True, "dynamic": False, **weights},
                "input_activations": activations,
                "output_activations": None,
            }
        },
        "ignore": kept,
    }


def _kept_modules(names: Iterable[str]) -> list[str]:
    """Modules whose weight is served without a scale, and the output head."""
    held = set(names)
    modules = {name.removesuffix(".weight") for name in held if name.endswith(".weight")}
    scaled = {name.rpartition(".")[0] for name in held if name.rpartition(".")[2] in _SCALES}
    return sorted((modules - scaled) | {_HEAD})


_INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group"}
_E2M1: dict[str, Any] = {"num_bits": 4, "type": "float"}

_WEIGHTS: Mapping[str, dict[str, Any]] = {
    "fp8_channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "int8": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "int4_g32": {**_INT4, "group_size": 32},
    "int4_g128": {**_INT4, "group_size": 128},
    "nvfp4": {
        **_E2M1,
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn",
        "zp_dtype": "torch.float8_e4m3fn",
    },
    "mxfp4": {
        **_E2M1,
        "strategy": "group",
        "group_size": 32,
        "scale_dtype": "torch.uint8",
        "zp_dtype": "torch.uint8",
    },
}

_TOKENS = {"strategy": "token", "symmetric": True, "dynamic": True, "num_bits": 8}

_ACTIVATIONS: Mapping[str, dict[str, Any]] = {
    "fp8_channel": {**_TOKENS, "type": "float"},
    "int8": {**_TOKENS, "type": "int"},
}
"""8-bit weights are multiplied with 8-bit activations, whose scales the engine takes as they come;
4-bit weights with activations in high precision."""

_CONTAINERS: Mapping[str, str] = {
    "fp8_channel": "float-quantized",
    "int8": "int-quantized",
    "int4_g32": "pack-quantized",
    "int4_g128": "pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
}
