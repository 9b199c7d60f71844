"""Cells: the interval of masters that one served code stands for, and how likely a step leaves it.

A master that may be anywhere in a cell of width c, and moves by d, gets another code with the
chance min(1, |d| / c). The fraction of weights that change is the mean of that over the weights.
It holds as long as where a master lies in its cell tells nothing about its step.
"""

from collections.abc import Iterator, Mapping

import torch

from farcast.formats import Recipe
from farcast.formats.packing import unpack_e2m1, unpack_int4
from farcast.formats.recipes import Element
from farcast.formats.rounding import GRIDS

Tensors = Mapping[str, torch.Tensor]

_MANTISSA: Mapping[Element, tuple[int, int]] = {
    "bf16": (7, -126),
    "fp16": (10, -14),
    "e4m3": (3, -6),
    "e2m1": (1, 0),
}
"""Bits of the mantissa, and the exponent below which numbers are evenly spaced."""

_LEAVES = (".weight_packed", ".weight")
_SCALES = (".weight_scale", ".weight_scale_inv", ".weight_global_scale", ".weight_shape")


def widths(element: Element, values: torch.Tensor) -> torch.Tensor:
    """The width of the cell around each value (float32, on the element's grid): half the distance
    between its neighbours. At a power of two the cell reaches less far down than up."""
    if element in ("int8", "int4"):
        return torch.ones_like(values)
    bits, least = _MANTISSA[element]
    raw = values.contiguous().view(torch.int32)
    power = (raw & 0x7F80_0000).view(torch.float32).clamp(min=2.0**least)
    lopsided = ((raw & 0x7F_FFFF) == 0) & (values.abs() > 2.0**least)
    return torch.where(lopsided, 0.75 * power, power) * 2.0**-bits


def chance(step: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """min(1, |step| / width), elementwise."""
    return (step.abs() / width).clamp(max=1.0)


def spread(values: torch.Tensor, seed: int) -> torch.Tensor:
    """bf16 values (held in float32) moved to random places inside their bf16 cells, uniformly: as
    the masters of a run under way lie. What a checkpoint loads lies in the middle of every cell,
    from where it takes many steps to reach a border."""
    noise = torch.rand(values.shape, generator=torch.Generator().manual_seed(seed)) - 0.5
    moved = values + noise * widths("bf16", values)
    stays = moved.to(torch.bfloat16) == values.to(torch.bfloat16)
    return torch.where(stays, moved, values)


def is_scale(name: str) -> bool:
    """Whether a served tensor belongs to another one's codes."""
    return name.endswith(_SCALES)


def cell_widths(served: Tensors, recipe: Recipe) -> Iterator[tuple[str, torch.Tensor]]:
    """For each master of `served` its name and the width of every weight's cell, in float32."""
    for name, tensor in served.items():
        if is_scale(name):
            continue
        module = next((name.removesuffix(e) for e in _LEAVES if name.endswith(e)), name)
        scale = _scale(served, module, recipe)
        if scale is None:
            element: Element = "fp16" if tensor.dtype == torch.float16 else "bf16"
            yield name, widths(element, tensor.float())
            continue
        codes = _codes(tensor, recipe)
        values = GRIDS[recipe.layout.element].values(codes)
        each = _expanded(scale, recipe, codes.shape)
        yield f"{module}.weight", widths(recipe.layout.element, values) * each


def _codes(tensor: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    if tensor.dtype == torch.int32:
        return unpack_int4(tensor, tensor.shape[1] * 8)
    return unpack_e2m1(tensor) if recipe.layout.element == "e2m1" else tensor


def _scale(served: Tensors, module: str, recipe: Recipe) -> torch.Tensor | None:
    """The numbers that a matrix's codes are multiplied by, by block or group; None without."""
    inverse = served.get(f"{module}.weight_scale_inv")
    scale = served.get(f"{module}.weight_scale", inverse)
    if scale is None:
        return None
    if recipe.format == "mxfp4":
        return torch.ldexp(torch.ones(scale.shape), scale.int() - 127)
    over = served.get(f"{module}.weight_global_scale")
    return scale.float() if over is None else scale.float() / over


def _expanded(scale: torch.Tensor, recipe: Recipe, shape: torch.Size) -> torch.Tensor:
    """A scale for each weight."""
    rows, columns = shape
    each = scale.repeat_interleave(recipe.layout.block_rows, 0)[:rows]
    group = columns if recipe.layout.group is None else recipe.layout.group
    return each.repeat_interleave(group, 1)[:, :columns]
