"""Exact deltas between versions of served tensors. Pure: bytes in, values out.

`encode(base, target) -> bytes` and `apply(base, patch) -> dict` work on mappings of arrays;
`encode_bits` and `Patch` are what the layers above use.
"""

from farcast.delta.bits import (
    AnyBits,
    TensorBits,
    Words,
    all_bits,
    device_bits,
    from_bits,
    held_bits,
    nbytes_of,
    to_bits,
    word_bytes,
    words_of,
)
from farcast.delta.identity import entry_of, root_of, tensor_digest
from farcast.delta.patch import Patch, PatchEntry, apply, encode, encode_bits
from farcast.delta.squash import squash, squash_bits
from farcast.delta.writing import EncodedDelta

__all__ = [
    "AnyBits",
    "EncodedDelta",
    "Patch",
    "PatchEntry",
    "TensorBits",
    "Words",
    "all_bits",
    "apply",
    "device_bits",
    "encode",
    "encode_bits",
    "entry_of",
    "from_bits",
    "held_bits",
    "nbytes_of",
    "root_of",
    "squash",
    "squash_bits",
    "tensor_digest",
    "to_bits",
    "word_bytes",
    "words_of",
]
