"""What a tensor and a version *are*: BLAKE3 digests of bits. Pure.

    tensor digest = BLAKE3-256(raw bits, little endian, C order)
    root          = BLAKE3-256("farcast root 1\\n" then, for each name in byte order of its UTF-8,
                    len(name) u32 | name | len(dtype) u8 | dtype | ndim u8 | dims u64... | digest)

All integers little endian. The root does not depend on the order in which tensors come,
nor on how they are split over objects.
"""

import struct
from collections.abc import Mapping

from blake3 import blake3

from farcast.delta.bits import AnyBits
from farcast.types import TensorEntry

ROOT_DOMAIN = b"farcast root 1\n"


def tensor_digest(bits: AnyBits, *, threads: int = 1) -> str:
    """BLAKE3 of the raw bits as 64 hex digits."""
    return bits.digest(threads=threads)


def entry_of(bits: AnyBits, *, threads: int = 1) -> TensorEntry:
    return TensorEntry(bits.dtype, bits.shape, tensor_digest(bits, threads=threads))


def root_of(entries: Mapping[str, TensorEntry]) -> str:
    """The root over all tensors, as 64 hex digits."""
    hasher = blake3(ROOT_DOMAIN)
    for name, entry in sorted((name.encode(), entry) for name, entry in entries.items()):
        dtype = entry.dtype.encode()
        hasher.update(struct.pack("<I", len(name)) + name)
        hasher.update(struct.pack("<B", len(dtype)) + dtype)
        hasher.update(struct.pack(f"<B{len(entry.shape)}Q", len(entry.shape), *entry.shape))
        hasher.update(bytes.fromhex(entry.digest))
    return hasher.hexdigest()
