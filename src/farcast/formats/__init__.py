"""What is served, derived from master weights, and what tensors are called. Pure."""

from farcast.formats.names import canonical_names
from farcast.formats.served import bf16_bits, served_bf16

__all__ = ["bf16_bits", "canonical_names", "served_bf16"]
