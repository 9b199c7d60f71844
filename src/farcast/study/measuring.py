"""What a step of masters does to one served format: weights, scales and bytes."""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch

from farcast.delta import all_bits, encode_bits
from farcast.formats import Recipe, parse_recipe
from farcast.formats.deriving import derive, unpacked
from farcast.study.cells import Tensors, cell_widths, chance, is_scale

Served = dict[str, torch.Tensor]


class Counts(NamedTuple):
    """Weights and scales, and how many of each have other bits."""

    weights: int
    changed: int
    scales: int
    scales_changed: int

    @property
    def fraction(self) -> float:
        return self.changed / max(self.weights, 1)

    @property
    def scale_fraction(self) -> float | None:
        return self.scales_changed / self.scales if self.scales else None


class Line:
    """One recipe along a run: each version's served tensors follow from the one before."""

    def __init__(self, recipe: str, masters: Tensors) -> None:
        self.recipe: Recipe = parse_recipe(recipe)
        self.served: Served = derive(masters, self.recipe)

    def advance(self, masters: Tensors) -> Served:
        """The next version's tensors; returns those of the one before."""
        before = self.served
        self.served = derive(masters, self.recipe, previous=before)
        return before


def moved_words(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Where elements have other bits."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[old.element_size()]
    return old.view(kind) != new.view(kind)


def counts_of(old: Served, new: Served, recipe: Recipe) -> Counts:
    """Of codes, one by one, and of scales."""
    weights = changed = scales = scales_changed = 0
    before = unpacked(old, recipe)
    for name, codes in unpacked(new, recipe).items():
        if name.endswith(".weight_shape"):
            continue
        count = int(moved_words(before[name], codes).count_nonzero())
        if is_scale(name):
            scales += codes.numel()
            scales_changed += count
        else:
            weights += codes.numel()
            changed += count
    return Counts(weights, changed, scales, scales_changed)


def delta_bytes(old: Served, new: Served) -> int:
    """The delta from `old` to `new`; of nothing, the anchor."""
    return len(encode_bits(all_bits(old), all_bits(new)).data)


def full_bytes(served: Served) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in served.values())


class Law:
    """Chances that weights leave the cells of `served`."""

    def __init__(self, served: Served, recipe: Recipe) -> None:
        self._widths = dict(cell_widths(served, recipe))

    def fraction(
        self, steps: Mapping[str, torch.Tensor] | None, names: Collection[str] | None = None
    ) -> float | None:
        """The mean over the weights of `names`, or over all; None without steps."""
        if steps is None:
            return None
        total, count = 0.0, 0
        for name, width in self._widths.items():
            if names is None or name in names:
                found = chance(steps[name].view(width.shape), width)
                total += float(found.sum(dtype=torch.float64))
                count += width.numel()
        return total / max(count, 1)


class Bin(NamedTuple):
    """Weights of one exponent: how many, how many changed, and the sums of both chances."""

    exponent: int
    weights: int
    changed: int
    told: float
    actual: float


def by_exponent(
    old: Served, new: Served, told: Mapping[str, torch.Tensor], moved: Mapping[str, torch.Tensor]
) -> Iterator[Bin]:
    """bf16 weights by the exponent of the old value, as a power of two; zeros come last, at
    -127."""
    sums = torch.zeros(4, 256, dtype=torch.float64)
    for name, tensor in old.items():
        words = tensor.reshape(-1).view(torch.int16).int()
        exponent = ((words >> 7) & 0xFF).long()
        width = dict(cell_widths({name: tensor}, parse_recipe("bf16")))[name].reshape(-1)
        columns = (
            torch.ones(words.numel(), dtype=torch.float64),
            moved_words(tensor, new[name]).reshape(-1).double(),
            chance(told[name].reshape(-1), width).double(),
            chance(moved[name].reshape(-1), width).double(),
        )
        for row, column in zip(sums, columns, strict=True):
            row += torch.bincount(exponent, weights=column, minlength=256)
    for field in range(255, -1, -1):
        weights, changed, guess, actual = (float(row[field]) for row in sums)
        if weights:
            yield Bin(field - 127, int(weights), int(changed), guess, actual)
