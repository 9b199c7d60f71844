"""What a served format is called and made of. Pure, and loads without torch.

A recipe is a format and the policies it is derived under. All of it decides bits, so all of it is
in its name, and the name is what manifests, stores and commands say:

    fp8_block                       the format, scales exact, codes rounded to nearest even
    fp8_block_pow2                  scales rounded up to powers of two
    int4_g32-scale1.5               a scale stays while the exact one is at most 1.5 times smaller
    bf16-round0.75                  a code stays until the master moved 0.75 of a step from it
    nvfp4-rule_mlp                  only the matrices that rule `mlp` names are quantised

Options come in the order rule, scale, round; what is default is left out, so equal recipes have
equal names.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from farcast.errors import ConfigError
from farcast.formats.precision import DEFAULT_RULE, RULES

Element = Literal["bf16", "fp16", "e4m3", "int8", "int4", "e2m1"]
"""What one weight becomes: its code."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a format does with a matrix [rows, columns]: one scale for `group` columns (None: all
    of them) of `block_rows` rows."""

    element: Element
    group: int | None = None
    block_rows: int = 1
    quantised: bool = True
    may_be_pow2: bool = False


_LAYOUTS: Mapping[str, Layout] = {
    "bf16": Layout(element="bf16", quantised=False),
    "fp16": Layout(element="fp16", quantised=False),
    "fp8_block": Layout(element="e4m3", group=128, block_rows=128, may_be_pow2=True),
    "fp8_channel": Layout(element="e4m3", may_be_pow2=True),
    "int8": Layout(element="int8", may_be_pow2=True),
    "int4_g32": Layout(element="int4", group=32, may_be_pow2=True),
    "int4_g128": Layout(element="int4", group=128, may_be_pow2=True),
    "nvfp4": Layout(element="e2m1", group=16),
    "mxfp4": Layout(element="e2m1", group=32),
}

FORMATS = tuple(_LAYOUTS)
"""The formats, without options."""

MAX_BOUND = 16.0
"""A scale 16 times too large leaves an int4 code one value; nobody wants more."""

MAX_THRESHOLD = 4.0

_POW2 = "_pow2"
_NUMBER = r"(\d{1,2}(?:\.\d{1,6})?)"
_OPTIONS = {
    "rule": re.compile(r"rule_([a-z0-9_]{1,40})"),
    "scale": re.compile(f"scale{_NUMBER}"),
    "round": re.compile(f"round{_NUMBER}"),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A format with its policies. Raises `ConfigError` for what does not go together.

    `bound` (1 to 16): a scale is kept while it is at least the exact one and at most `bound` times
    it; 1 is the exact scale. `threshold` (0.5 to 4): a code is kept while the master is less than
    `threshold` of the step to the neighbour away from it; 0.5 is rounding to nearest.
    """

    format: str
    pow2: bool = False
    rule: str = DEFAULT_RULE
    bound: float = 1.0
    threshold: float = 0.5

    def __post_init__(self) -> None:
        layout = _LAYOUTS.get(self.format)
        if layout is None:
            raise ConfigError(
                f"{self.format[:60]!r} is no served format; choose one of {', '.join(FORMATS)}."
            )
        if self.rule not in RULES:
            raise ConfigError(
                f"{self.rule[:60]!r} is no precision rule; choose one of {', '.join(RULES)}."
            )
        if self.pow2 and not layout.may_be_pow2:
            raise ConfigError(f"{self.format} has no scales that could be powers of two.")
        if not 1.0 <= self.bound <= MAX_BOUND or not 0.5 <= self.threshold <= MAX_THRESHOLD:
            raise ConfigError(
                f"Scale bounds are from 1 to {MAX_BOUND:g} and rounding thresholds from 0.5 to "
                f"{MAX_THRESHOLD:g}; {self.bound:g} and {self.threshold:g} are not both."
            )
        if not layout.quantised and (self.bound != 1.0 or self.rule != DEFAULT_RULE):
            raise ConfigError(f"{self.format} has no scales, and serves every tensor alike.")

    @property
    def layout(self) -> Layout:
        return _LAYOUTS[self.format]

    @property
    def sticky(self) -> bool:
        """Whether the last version's served tensors enter into the next one's."""
        return self.bound != 1.0 or self.threshold != 0.5

    @property
    def name(self) -> str:
        """The one name of this recipe; `parse_recipe` reads it."""
        parts = [self.format + (_POW2 if self.pow2 else "")]
        if self.rule != DEFAULT_RULE:
            parts.append(f"rule_{self.rule}")
        if self.bound != 1.0:
            parts.append(f"scale{_plain(self.bound)}")
        if self.threshold != 0.5:
            parts.append(f"round{_plain(self.threshold)}")
        return "-".join(parts)

    def __str__(self) -> str:
        return self.name


def parse_recipe(text: str) -> Recipe:
    """The recipe of that name. Raises `ConfigError`, also for another spelling of a name."""
    base, *options = text[:200].split("-")
    pow2 = base.endswith(_POW2)
    found: dict[str, str] = {}
    for option in options:
        for kind, pattern in _OPTIONS.items():
            match = pattern.fullmatch(option)
            if match:
                found[kind] = match[1]
                break
        else:
            raise ConfigError(
                f"{option[:60]!r} is no option of a served format; "
                "write rule_NAME, scaleBOUND or roundTHRESHOLD, as in int4_g32-scale1.5."
            )
    recipe = Recipe(
        format=base.removesuffix(_POW2),
        pow2=pow2,
        rule=found.get("rule", DEFAULT_RULE),
        bound=float(found.get("scale", "1")),
        threshold=float(found.get("round", "0.5")),
    )
    if recipe.name != text:
        raise ConfigError(f"{text[:200]!r} is not how that format is written: {recipe.name!r} is.")
    return recipe


def bits_per_weight(recipe: Recipe, columns: int) -> float:
    """Served bits of one quantised weight, its share of the scales included, in a matrix of
    `columns` columns whose blocks are full. Per-tensor values are left out."""
    layout = recipe.layout
    code = {"bf16": 16, "fp16": 16, "e4m3": 8, "int8": 8, "int4": 4, "e2m1": 4}[layout.element]
    if not layout.quantised:
        return float(code)
    group = columns if layout.group is None else layout.group
    scale = {"int4": 16, "e2m1": 8}.get(layout.element, 32)
    return code + scale / (group * layout.block_rows)


def _plain(number: float) -> str:
    if not math.isclose(number, round(number, 6), rel_tol=0, abs_tol=0):
        raise ConfigError(f"{number} has more than six decimals; write fewer.")
    return f"{number:.6f}".rstrip("0").rstrip(".")
