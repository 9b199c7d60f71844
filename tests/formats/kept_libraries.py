"""The quantisers of the libraries that define served formats, called as their own users call them:
observed minima and maxima to scales, then the compressor that writes a checkpoint."""

from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

E4M3 = torch.float8_e4m3fn
_ARGS: dict[str, dict[str, Any]] = {
    "fp8_block": {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [128] * 2,
    },
    "fp8_channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "int8": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "int4_g32": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    "int4_g128": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    | {"scale_dtype": E4M3, "zp_dtype": E4M3},
    "mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    | {"scale_dtype": torch.uint8, "zp_dtype": torch.uint8},
}
_COMPRESSORS = {
    "fp8_block": "naive-quantized",
    "fp8_channel": "float-quantized",
    "int8": "int-quantized",
    "int4_g32": "pack-quantized",
    "int4_g128": "pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
}


def compressed(format_name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """What compressed-tensors stores for a matrix, by parameter name."""
    args = dict(_ARGS[format_name])
    if format_name.startswith("int4"):
        args["scale_dtype"] = torch.bfloat16  # the dtype of the model, as llm-compressor has it
    quantised = QuantizationArgs(symmetric=True, dynamic=False, **args)
    low, high = _extremes(weight, args)
    over = generate_gparam(weight.amin(), weight.amax()) if format_name == "nvfp4" else None
    scale, zero = calculate_qparams(low, high, quantised, global_scale=over)
    if format_name.startswith("int4"):
        scale = scale.to(torch.bfloat16)
    state = {"weight": weight.clone(), "weight_scale": scale}
    if not format_name.startswith("fp8"):  # adding a zero point would turn -0.0 into 0.0
        state["weight_zero_point"] = zero
    if over is not None:
        state["weight_global_scale"] = over
    scheme = QuantizationScheme(targets=["Linear"], weights=quantised)
    made = BaseCompressor.get_value_from_registry(_COMPRESSORS[format_name]).compress(state, scheme)
    made.pop("weight_zero_point", None)
    return made


def decompressed(format_name: str, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weights that compressed-tensors reads out of what is stored."""
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(symmetric=True, dynamic=False, **_ARGS[format_name]),
    )
    kind = BaseCompressor.get_value_from_registry(_COMPRESSORS[format_name])
    return kind.decompress(dict(stored), scheme)["weight"]


def _extremes(weight: torch.Tensor, args: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    if args["strategy"] == "block":
        padded = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
        blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    if "group_size" in args:
        groups = weight.unflatten(1, (-1, args["group_size"]))
        return groups.amin(-1), groups.amax(-1)
    return weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
