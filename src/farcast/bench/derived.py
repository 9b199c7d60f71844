"""Quantised versions derived from recorded ones, by simple deterministic quantisers. Pure.

    fp8-e4m3   codes in blocks of 128 x 128, each with an F32 scale = largest magnitude / 448
    int4       groups of 64 along a row with a BF16 scale = largest magnitude / 7, codes
               round(w / scale) + 8, two in a byte, low half first, in U8 tensors
    mxfp4      groups of 32 along a row with a power of two (E8M0) as scale, e2m1 codes

Rounding is to the nearest, ties to even. Every matrix whose rows hold whole groups is quantised
(embeddings too), everything else stays as it is. They are derived from the served bf16 words
rather than from the masters, so that both sides can be recomputed from the recording; a trainer
that quantises its masters crosses a few more boundaries.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from farcast.bench.data import Change
from farcast.delta import TensorBits, words_of

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]
Quantised = dict[str, TensorBits]

FP8_BLOCK = 128
INT4_GROUP = 64
MX_GROUP = 32
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E8M0_BIAS = 127


def floats_of(bits: TensorBits) -> Floats | None:
    """The numbers of a bf16, fp16 or fp32 tensor; None for other dtypes."""
    words = words_of(bits)
    if bits.dtype == "BF16":
        return (words.astype(np.uint32) << 16).view(np.float32).reshape(bits.shape)
    if bits.dtype in ("F16", "F32"):
        numbers: Floats = words.view(f"<f{words.itemsize}").astype(np.float32)
        return numbers.reshape(bits.shape)
    return None


def to_bf16(numbers: Floats) -> npt.NDArray[np.uint16]:
    """Rounded to the nearest, ties to even. Finite numbers only."""
    raw = np.ascontiguousarray(numbers).view(np.uint32)
    return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)


def e4m3_values() -> Floats:
    """The magnitudes of e4m3 (finite, no infinities) in the order of their codes 0 .. 126."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, (code & 7) / 8
    normal = np.ldexp(1 + mantissa, exponent - 7)
    return np.where(exponent == 0, np.ldexp(mantissa, -6), normal).astype(np.float32)


def nearest(numbers: Floats, magnitudes: Floats, sign_bit: int) -> Codes:
    """Codes of the nearest magnitudes, ties to the even code, too large ones to the largest."""
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    size = np.abs(numbers)
    code = np.searchsorted(middles, size)
    tie = size == middles[np.minimum(code, middles.size - 1)]
    code += tie & (code & 1 == 1)
    return (code | np.where(np.signbit(numbers), sign_bit, 0)).astype(np.uint8)


def fp8(name: str, matrix: Floats) -> Quantised:
    rows, columns = matrix.shape
    tall, wide = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
    padded = np.zeros((tall * FP8_BLOCK, wide * FP8_BLOCK), np.float32)
    padded[:rows, :columns] = matrix
    blocks = padded.reshape(tall, FP8_BLOCK, wide, FP8_BLOCK)
    scale = _nonzero(np.abs(blocks).max(axis=(1, 3)) / np.float32(448))
    scaled = (blocks / scale[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    small = np.asarray(scaled, np.float32)
    codes = nearest(small, e4m3_values(), 0x80)
    return {
        name: TensorBits("F8_E4M3", (rows, columns), codes.reshape(-1)),
        f"{name}_scale_inv": TensorBits("F32", (tall, wide), _raw(scale)),
    }


def int4(name: str, matrix: Floats) -> Quantised:
    groups = matrix.reshape(-1, INT4_GROUP)
    half = to_bf16(np.abs(groups).max(axis=1) / np.float32(7))
    scale = _nonzero((half.astype(np.uint32) << 16).view(np.float32))
    codes = np.clip(np.rint(groups / scale[:, None]), -8, 7).astype(np.int8) + 8
    rows, columns = matrix.shape
    return {
        name: TensorBits("U8", (rows, columns // 2), _packed(codes.astype(np.uint8))),
        f"{name}_scale": TensorBits("BF16", (rows, columns // INT4_GROUP), _raw(half)),
    }


def mxfp4(name: str, matrix: Floats) -> Quantised:
    groups = matrix.reshape(-1, MX_GROUP)
    largest = np.abs(groups).max(axis=1)
    exponent = np.where(largest > 0, np.frexp(largest)[1] - 1 - 2, -_E8M0_BIAS)
    exponent = np.clip(exponent, -_E8M0_BIAS, 127)
    codes = nearest(np.ldexp(groups, -exponent[:, None]), _E2M1, 8)
    rows, columns = matrix.shape
    scale = (exponent + _E8M0_BIAS).astype(np.uint8)
    return {
        name: TensorBits("F4", (rows, columns), _packed(codes)),
        f"{name}_scale": TensorBits("F8_E8M0", (rows, columns // MX_GROUP), scale),
    }


QUANTISERS: dict[str, tuple[int, Callable[[str, Floats], Quantised]]] = {
    "fp8-e4m3": (1, fp8),
    "int4": (INT4_GROUP, int4),
    "mxfp4": (MX_GROUP, mxfp4),
}
"""By name: the group that a row must hold in whole numbers, and the quantiser."""


def derive(change: Change, kind: str) -> Change:
    """The same change between quantised versions."""
    base, packed = _quantised(change.base, kind)
    target, _ = _quantised(change.target, kind)
    return Change(
        data=f"{change.data} as {kind}", hop=change.hop, base=base, target=target, packed=packed
    )


def _quantised(
    tensors: Mapping[str, TensorBits], kind: str
) -> tuple[dict[str, TensorBits], frozenset[str]]:
    group, quantiser = QUANTISERS[kind]
    out: dict[str, TensorBits] = {}
    packed = set()
    for name, bits in tensors.items():
        numbers = floats_of(bits) if len(bits.shape) == 2 else None
        if numbers is None or not numbers.size or numbers.shape[1] % group:
            out[name] = bits
            continue
        out.update(quantiser(name, numbers))
        if kind == "int4":
            packed.add(name)
    return out, frozenset(packed)


def _packed(codes: Codes) -> Codes:
    flat = codes.reshape(-1)
    packed: Codes = flat[0::2] | (flat[1::2] << np.uint8(4))
    return packed


def _nonzero(scale: Floats) -> Floats:
    """A block of zeros has no scale; any will do."""
    return np.where(scale > 0, scale, np.float32(1))


def _raw(values: npt.NDArray[np.float32] | npt.NDArray[np.uint16]) -> Codes:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
