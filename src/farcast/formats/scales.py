"""Scales from the largest magnitudes of what shares one. Needs torch. Pure.

    exact   the largest magnitude lands on the largest value of the element, as compressed-tensors
            and torchao compute it: amax / 448 (e4m3), 127.5 (int8), 7.5 (int4), all in float32;
            where that is 0, the epsilon of the scale's dtype
    pow2    the exact scale rounded up to a power of two
    nvfp4   e4m3(global * amax / 6) with global = 448 * 6 / amax of the whole tensor
    mxfp4   2^(e - 2), where e is the exponent of amax after adding an eighth of its power of two

A scale that moves requantises everything under it. With a bound B it is kept while it is at least
the exact one, so that nothing is clipped, and at most B times that. One that has to move goes to
sqrt(B) times the exact one, the middle of the room it then has, if its dtype can say so.
"""

import math
from typing import NamedTuple

import torch

from farcast.formats.recipes import Recipe
from farcast.formats.rounding import E2M1_MAX, GRIDS

E4M3_MAX = 448.0
_E4M3_EPSILON = 0.125
_E8M0_BIAS = 127
_ROUND_UP = 1 << 21
"""Added to float32 bits: a mantissa of 1.75 and more carries into the exponent."""


class Scales(NamedTuple):
    """As served, and as float32 numbers that codes are multiplied by."""

    served: torch.Tensor
    numbers: torch.Tensor


def block_scales(recipe: Recipe, amax: torch.Tensor, before: torch.Tensor | None) -> Scales:
    """Scales for float32 magnitudes `amax`; `before` are those served last, None for none."""
    element = recipe.layout.element
    dtype = torch.bfloat16 if element == "int4" else torch.float32
    exact = _divided(amax, GRIDS[element].largest)
    if recipe.pow2:
        exact = _up_to_pow2(exact)
    exact = _without_zeros(exact.to(dtype), torch.finfo(dtype).eps)
    middle = exact if recipe.pow2 else (exact.float() * math.sqrt(recipe.bound)).to(dtype)
    served = _kept(exact, before, recipe.bound, middle)
    return Scales(served, served.float())


def nvfp4_global(recipe: Recipe, amax: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """The global scale [1] for the largest magnitude of a tensor; it divides, so one that is too
    small leaves room."""
    tiny = torch.finfo(torch.float32).tiny
    divided = amax.clamp(min=tiny).reciprocal() * (E4M3_MAX * E2M1_MAX)
    exact = torch.where(divided.isinf(), torch.ones_like(divided), divided).reshape(1)
    if recipe.bound == 1.0 or before is None:
        return exact if recipe.bound == 1.0 else _divided(exact, math.sqrt(recipe.bound))
    fits = (before <= exact) & (before * recipe.bound >= exact)
    return torch.where(fits, before, _divided(exact, math.sqrt(recipe.bound)))


def nvfp4_scales(
    recipe: Recipe, amax: torch.Tensor, over: torch.Tensor, before: torch.Tensor | None
) -> Scales:
    """e4m3 scales under the global scale `over` [1]; the number is the quotient of both."""
    wide = (over * _divided(amax, E2M1_MAX)).clamp(max=E4M3_MAX)
    exact = _without_zeros(wide.to(torch.float8_e4m3fn).float(), _E4M3_EPSILON)
    middle = (exact * math.sqrt(recipe.bound)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()
    served = _kept(exact, None if before is None else before.float(), recipe.bound, middle)
    served = served.to(torch.float8_e4m3fn)
    return Scales(served, served.float() / over)


def mxfp4_scales(recipe: Recipe, amax: torch.Tensor, before: torch.Tensor | None) -> Scales:
    """Scales as biased exponents in uint8."""
    exponent = ((amax.view(torch.int32) + _ROUND_UP) >> 23) - 2
    exact = exponent.clamp(0, 254)
    if before is not None and recipe.bound > 1.0:
        room = math.floor(math.log2(recipe.bound))
        old = before.int()
        exact = torch.where((old >= exact) & (old <= exact + room), old, exact)
    return Scales(exact.to(torch.uint8), mxfp4_numbers(exact))


def mxfp4_numbers(exponents: torch.Tensor) -> torch.Tensor:
    """2^(exponent - 127) in float32, subnormal at exponent 0."""
    one = torch.ones_like(exponents, dtype=torch.float32)
    return torch.ldexp(one, exponents.int() - _E8M0_BIAS)


def _divided(values: torch.Tensor, by: float) -> torch.Tensor:
    # By a tensor on the same device: some devices multiply by the reciprocal of a plain number,
    # which is not the same in the last bit.
    return values / torch.full_like(values, by)


def _without_zeros(scales: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.where(scales == 0, torch.full_like(scales, epsilon), scales)


def _up_to_pow2(scales: torch.Tensor) -> torch.Tensor:
    """The next power of two, by the bits; what is subnormal becomes the smallest normal number."""
    bits = scales.view(torch.int32)
    exponent = (bits + 0x7F_FFFF) >> 23
    return torch.where(bits == 0, bits, exponent.clamp(1, 254) << 23).view(torch.float32)


def _kept(
    exact: torch.Tensor, before: torch.Tensor | None, bound: float, middle: torch.Tensor
) -> torch.Tensor:
    """`before` where it is within the bound, else `middle` if that is, else `exact`."""
    if bound == 1.0:
        return exact
    wide = exact.float()
    limit = wide * bound

    def within(scale: torch.Tensor) -> torch.Tensor:
        return (scale.float() >= wide) & (scale.float() <= limit)

    fresh = torch.where(within(middle), middle, exact)
    return fresh if before is None else torch.where(within(before), before, fresh)
