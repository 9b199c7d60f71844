"""The inputs of the golden files, from integer arithmetic alone. `python golden_inputs.py` writes
the files anew; a change of their bytes is a change of the format."""

from pathlib import Path

import numpy as np

from farcast.delta import TensorBits, encode_bits

FOLDER = Path(__file__).parent / "golden"


def mixed(count: int, dtype: str, seed: int) -> np.ndarray:
    """Words of a bell-shaped exponent, by a multiplicative hash."""
    i = np.arange(count, dtype=np.uint64) + np.uint64(seed << 20)
    hashed = (i * np.uint64(0x9E3779B97F4A7C15)) ^ (i * np.uint64(0xC2B2AE3D27D4EB4F) >> 29)
    bell = sum(((hashed >> s) & 255).astype(np.int64) for s in (8, 24, 40))
    value = (bell - 382) * 16 + ((hashed >> 52) & 15).astype(np.int64)
    floats = value.astype(np.float32) / np.float32(65536)
    if dtype == "F32":
        return floats.view("<u4")
    return (floats.view("<u4") >> np.uint32(16)).astype("<u2")


def bits(words: np.ndarray, dtype: str) -> TensorBits:
    return TensorBits(dtype, words.shape, words.view(np.uint8))


def stepped(words: np.ndarray, every: int, step: int) -> np.ndarray:
    out = words.copy()
    out[::every] += np.asarray(step, words.dtype)
    return out


def files() -> dict[str, bytes]:
    large = mixed(70_000, "BF16", 1)
    other = mixed(2_000, "F32", 2)
    codes = (np.arange(600) * 7 % 251).astype(np.uint8)
    base = {
        "codes": bits(codes, "U8"),
        "gone": bits(codes[:9], "I8"),
        "head": bits(other, "F32"),
        "same": bits(codes[:5], "U8"),
        "weight": bits(large, "BF16"),
    }
    target = {
        "codes": bits(stepped(codes, 41, 1), "U8"),
        "head": bits(stepped(other, 3, 70_000), "F32"),
        "new": bits(codes[:30], "F8_E4M3"),
        "same": bits(codes[:5], "U8"),
        "weight": bits(stepped(large, 97, 1), "BF16"),
    }
    small = {name: target[name] for name in ("codes", "same")}
    return {
        "anchor-v1.far": encode_bits({}, {"head": target["head"], **small}).data,
        "delta-v1.far": encode_bits(base, target).data,
        "small-v1.far": encode_bits({"codes": base["codes"], "same": base["same"]}, small).data,
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, data in files().items():
        (FOLDER / name).write_bytes(data)
