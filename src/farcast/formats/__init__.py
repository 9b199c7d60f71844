"""What is served, derived from master weights, and what tensors are called. Pure.

Everything named here loads without torch; `farcast.formats.deriving`, the arithmetic, needs it.
"""

from farcast.formats.checkpoint import checkpoint_config, quantization_config
from farcast.formats.names import canonical_names
from farcast.formats.precision import RULES, PrecisionRule
from farcast.formats.recipes import FORMATS, Recipe, bits_per_weight, parse_recipe
from farcast.formats.served import bf16_bits, served_bf16

__all__ = [
    "FORMATS",
    "RULES",
    "PrecisionRule",
    "Recipe",
    "bf16_bits",
    "bits_per_weight",
    "canonical_names",
    "checkpoint_config",
    "parse_recipe",
    "quantization_config",
    "served_bf16",
]
