"""Served tensors from master weights. Pure and deterministic.

Today one format: bf16, rounded to nearest, ties to even, as `torch.Tensor.to(bfloat16)` does.
"""

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from farcast.delta import TensorBits

Floats = npt.NDArray[np.float32]

_QUIET_NAN = 0x7FC0


def bf16_bits(values: Floats) -> TensorBits:
    """float32 values as bfloat16 bits. Every NaN becomes the quiet one that torch writes."""
    words = np.ascontiguousarray(values, dtype=np.float32).reshape(-1).view(np.uint32)
    odd = (words >> 16) & 1
    rounded = ((words + (0x7FFF + odd)) >> 16).astype(np.uint16)
    is_nan = (words & 0x7FFFFFFF) > 0x7F800000
    rounded[is_nan] = _QUIET_NAN
    return TensorBits("BF16", tuple(values.shape), rounded.view(np.uint8))


def served_bf16(values: Any) -> Any:
    """A master tensor as it is served: a torch tensor in bfloat16, or `TensorBits` for numpy."""
    if type(values).__module__.split(".")[0] == "torch":
        import torch

        return values.detach().to(torch.bfloat16)
    return bf16_bits(cast(Floats, values))
