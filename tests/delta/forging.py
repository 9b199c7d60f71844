"""Builds containers byte by byte with a valid digest, so that the parser behind it is reached."""

from collections.abc import Callable

import msgspec
import numpy as np
import zstandard
from blake3 import blake3

from farcast.delta import TensorBits, conditioned, encode_bits
from farcast.delta.container import MAGIC, PREFIX

WORDS = 300


def base_bits() -> TensorBits:
    words = (np.arange(WORDS, dtype=np.uint32) * 2654435761 >> 16).astype("<u2") & 0x3FFF
    return TensorBits("BF16", (WORDS,), words.astype("<u2").view(np.uint8))


def target_bits() -> TensorBits:
    words = base_bits().data.copy().view("<u2")
    words[::7] += 1
    words[::50] += 900
    return TensorBits("BF16", (WORDS,), words.view(np.uint8))


def valid() -> bytes:
    return encode_bits({"w": base_bits()}, {"w": target_bits()}).data


def pair_of(kind: str) -> tuple[TensorBits, TensorBits]:
    """Base and target that a writer codes in blocks of one kind."""
    words = base_bits().data.view("<u2")
    if kind == "sparse":
        return base_bits(), target_bits()
    if kind == "dense":
        moved = words + (np.arange(WORDS) % 3 * (np.arange(WORDS) % 5 - 2)).astype("<u2")
        return base_bits(), TensorBits("BF16", (WORDS,), moved.view(np.uint8))
    if kind == "codes":
        codes = (np.arange(WORDS) * 37 % 256).astype(np.uint8)
        moved = codes.copy()
        moved[::11] ^= 0x10
        return TensorBits("F4", (2 * WORDS,), codes), TensorBits("F4", (2 * WORDS,), moved)
    noise = np.frombuffer(blake3(b"noise").digest(length=2 * WORDS), np.uint8)
    return base_bits(), TensorBits("BF16", (WORDS,), noise)


def sealed(body: bytes) -> bytes:
    return body + blake3(body).digest()


def reheadered(change: Callable[[list], object], data: bytes | None = None) -> bytes:
    """A valid container whose header (as msgpack lists) went through `change`."""
    data = valid() if data is None else data
    _, _, packed = PREFIX.unpack_from(data)
    start = PREFIX.size
    header = msgspec.msgpack.decode(zstandard.decompress(data[start : start + packed]))
    changed = change(header)
    plain = msgspec.msgpack.encode(header if changed is None else changed)
    again = zstandard.compress(plain)
    prefix = PREFIX.pack(MAGIC, len(plain), len(again))
    return sealed(prefix + again + data[start + packed : -32])


class Bits:
    """Writes Rice and Golomb codes the slow way, as docs/format.md says."""

    def __init__(self) -> None:
        self.bits: list[int] = []

    def raw(self, value: int, count: int) -> "Bits":
        self.bits += [value >> i & 1 for i in range(count)]
        return self

    def rice(self, value: int, k: int) -> "Bits":
        if value >> k < 24:
            self.bits += [1] * (value >> k) + [0]
            return self.raw(value & ((1 << k) - 1), k)
        self.bits += [1] * 24
        length = max(1, value.bit_length())
        return self.raw(length - 1, 6).raw(value, length)

    def bytes(self) -> bytes:
        padded = self.bits + [0] * (-len(self.bits) % 8)
        rows = np.array(padded, np.uint8).reshape(-1, 8)
        return np.packbits(rows, axis=1, bitorder="little").tobytes()


PLAIN_TABLE = conditioned.Parameters(0, 0, np.array([[0, 31, 31, 0, 0]], np.uint8))
"""Gaps, then sizes less one, all in unary."""


def one_class(blob: bytes, *, changed: int, words: int = 100) -> bytes:
    """A container of one U16 tensor in blocks of 128, with one plain class and no parameters;
    `blob` is the one block that it has up to then, without its kind."""
    blob = b"\x00" + blob if words <= 128 else blob
    row = ["w", "U16", [words], "blocks", 128, changed, len(blob)]
    plain = msgspec.msgpack.encode([[], [PLAIN_TABLE.pack()], [row]])
    packed = zstandard.compress(plain)
    return sealed(PREFIX.pack(MAGIC, len(plain), len(packed)) + packed + bytes(32) + blob)
