"""The MIT package `fireworks-delta-compression` as itself, where it is installed.

It is measured here and used nowhere else: its format arc_v3 is a pickle, which the package loads
again when it decodes. In this benchmark it reads only what it wrote itself a moment before. Never
give it bytes from a store.

It works on torch tensors and returns a new one, whose copy into place is counted. arc_v3 tries
several transforms in threads of its own and keeps what is ready in time, so its sizes may differ
from run to run.
"""

import importlib.util
import warnings
from typing import Any

from farcast.bench.codings import Buffers, Coding, Encoded
from farcast.bench.data import Change
from farcast.delta import TensorBits, from_bits, to_bits

PACKAGE = "fireworks_delta_compression"
FORMATS = ("arc_v2", "arc_v3")


class Fireworks(Coding):
    """One format of the package. Bytes and 4-bit codes are given as bytes."""

    origin = "package fireworks-delta-compression"

    def __init__(self, version: str) -> None:
        import fireworks_delta_compression as package
        import torch

        torch.set_num_threads(1)
        # Its decoder lets torch view read-only bytes, and never writes there.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        self.name = f"Fireworks {version} (their package)"
        self.own_threads = version == "arc_v3"
        self._version = version
        self._package = package
        self._like = torch.empty(0)

    def encode(self, change: Change) -> Encoded:
        blobs: dict[str, tuple[TensorBits, Any, Any]] = {}
        for name, new in change.target.items():
            packed, checksum = self._package.delta_compress(
                src=self._tensor(change.base[name]),
                dst=self._tensor(new),
                compression_format=self._version,
            )
            blobs[name] = (new, packed, checksum)
        return Encoded(blobs, sum(packed.numel() for _, packed, _ in blobs.values()))

    def decode(self, encoded: Encoded, buffers: Buffers) -> None:
        for name, (kind, packed, checksum) in encoded.payload.items():
            made = self._package.delta_decompress(
                src=self._tensor(TensorBits(kind.dtype, kind.shape, buffers[name])),
                compressed_diff=packed,
                checksum=checksum,
                compression_format=self._version,
            )
            buffers[name][:] = to_bits(made).data

    def _tensor(self, bits: TensorBits) -> Any:
        plain = bits.dtype in ("BF16", "F16", "F32")
        shown = bits if plain else TensorBits("U8", (bits.data.size,), bits.data)
        return from_bits(shown, self._like)


def fireworks() -> list[Coding]:
    """Both formats, or nothing where the package or torch is absent."""
    if not all(importlib.util.find_spec(name) for name in (PACKAGE, "torch", "zstd")):
        return []
    return [Fireworks(version) for version in FORMATS]
