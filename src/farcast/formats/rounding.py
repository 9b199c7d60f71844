"""Values to codes: to the nearest, ties to even, or sticky. Needs torch. Pure.

A code's value is a number on the element's grid; all arithmetic on it is exact. Sticky rounding
keeps the code that was served before while the value is less than `threshold` of a step away from
it, where the step is the one to the neighbour on the value's side. At 0.5 that is the nearest code
again, ties included, because a value on the border is not kept.

Elementwise on the tensor's own device: the same bits for any number of threads.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from farcast.formats.recipes import Element

E2M1_MAX = 6.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_BORDERS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_SIGN4 = 8


@dataclass(frozen=True)
class Grid:
    """The numbers an element can be. `nearest` takes float32 and gives codes, clamped to the
    largest; `values` is its inverse, in float32; `down` and `up` give the neighbours' values in
    float64, the code's own where there is none."""

    nearest: Callable[[torch.Tensor], torch.Tensor]
    values: Callable[[torch.Tensor], torch.Tensor]
    neighbours: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    largest: float
    """The largest value that scales are made for (see `scales`)."""


def rounded(
    element: Element, values: torch.Tensor, before: torch.Tensor | None, threshold: float
) -> torch.Tensor:
    """Codes of float32 `values`; `before` are those served last, None for none."""
    grid = GRIDS[element]
    codes = grid.nearest(values)
    if before is None or threshold == 0.5:
        return codes
    # Few codes move, and only those have to be looked at.
    moved = (_words(codes) != _words(before)).nonzero(as_tuple=True)
    old = before[moved]
    kept = grid.values(old).double()
    down, up = grid.neighbours(old)
    off = values[moved].double() - kept
    step = torch.where(off < 0, kept - down, up - kept)
    # Beyond the last code there is no step: it stays where rounding stays at it too, and gives way
    # to the infinity of elements that have one.
    last = (step == 0) & grid.values(codes[moved]).isfinite()
    near = (off.abs() < threshold * step) | last | (off == 0)
    _words(codes)[moved] = torch.where(near, _words(old), _words(codes)[moved])
    return codes


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Codes as integers, a view."""
    return codes.view({1: torch.uint8, 2: torch.int16}[codes.element_size()])


def _float_codes(dtype: torch.dtype, word: torch.dtype) -> Grid:
    limit = torch.finfo(dtype).max

    def nearest(values: torch.Tensor) -> torch.Tensor:
        if dtype == torch.float8_e4m3fn:  # has no infinity: what is too large would become NaN
            values = values.clamp(-limit, limit)
        return values.to(dtype)

    def neighbours(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bits = codes.view(word).int()
        top = torch.tensor(limit, dtype=dtype, device=codes.device).view(word).int()
        sign = 1 << (8 * codes.element_size() - 1)
        magnitude = bits & (sign - 1)
        order = torch.where((bits & sign) != 0, -magnitude, magnitude)

        def at(place: torch.Tensor) -> torch.Tensor:
            place = place.clamp(-top, top)
            raw = torch.where(place < 0, -place | sign, place)
            if word == torch.int16:
                raw = torch.where(raw >= sign, raw - 2 * sign, raw)
            return raw.to(word).view(dtype).double()

        return at(order - 1), at(order + 1)

    return Grid(nearest, lambda codes: codes.float(), neighbours, limit)


def _integers(low: int, high: int, largest: float) -> Grid:
    def nearest(values: torch.Tensor) -> torch.Tensor:
        return values.clamp(low, high).round().to(torch.int8)

    def neighbours(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        exact = codes.double()
        return (exact - 1).clamp(min=low), (exact + 1).clamp(max=high)

    return Grid(nearest, lambda codes: codes.float(), neighbours, largest)


def _e2m1() -> Grid:
    """Codes 0 to 15 in uint8: bit 3 is the sign, the others count the magnitudes upwards."""

    def nearest(values: torch.Tensor) -> torch.Tensor:
        size = values.abs()
        code = torch.zeros_like(values, dtype=torch.uint8)
        for index, border in enumerate(_E2M1_BORDERS):
            # A tie goes to the even code: upwards from an odd one.
            code += (size >= border if index % 2 else size > border).to(torch.uint8)
        return torch.where(values < 0, code | _SIGN4, code)

    def table(codes: torch.Tensor) -> torch.Tensor:
        signed = (*_E2M1, *(-value for value in _E2M1))
        return torch.tensor(signed, dtype=torch.float32, device=codes.device)

    def values(codes: torch.Tensor) -> torch.Tensor:
        return table(codes)[codes.long()]

    def neighbours(codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = (codes & 7).long()
        order = torch.where((codes & _SIGN4) != 0, -size, size)

        def at(place: torch.Tensor) -> torch.Tensor:
            place = place.clamp(-7, 7)
            return table(codes)[torch.where(place < 0, _SIGN4 - place, place)].double()

        return at(order - 1), at(order + 1)

    return Grid(nearest, values, neighbours, E2M1_MAX)


GRIDS: dict[Element, Grid] = {
    "bf16": _float_codes(torch.bfloat16, torch.int16),
    "fp16": _float_codes(torch.float16, torch.int16),
    "e4m3": _float_codes(torch.float8_e4m3fn, torch.uint8),
    # Scales of integers are made for the middle of the range [-128, 127], as compressed-tensors
    # makes them: the largest weight lands on 127.5 and the clamp.
    "int8": _integers(-128, 127, 127.5),
    "int4": _integers(-8, 7, 7.5),
    "e2m1": _e2m1(),
}
