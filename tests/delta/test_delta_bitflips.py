"""Every single bit of a small file of every kind of block, flipped: refused.

Once as it would happen on a disk or a line, where the digest of the file tells. And once with that
digest made anew, as who holds the bucket could: then nothing but the writer's tensor may come out.
"""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from blake3 import blake3
from forging import base_bits, pair_of, sealed

from farcast.delta import Patch, TensorBits, blocks, encode_bits, writing
from farcast.errors import FormatError, IntegrityError

Pair = tuple[TensorBits | None, TensorBits]


def same() -> Pair:
    """One block of three changes."""
    words = base_bits().data.copy().view("<u2")
    words[200] += 1
    return base_bits(), TensorBits("BF16", words.shape, words.view(np.uint8))


def whole() -> Pair:
    """Floats of few exponents."""
    words = (0x3F800000 + np.arange(256, dtype="<u4") * 0x1011).astype("<u4")
    return None, TensorBits("F32", words.shape, words.view(np.uint8))


def raw() -> Pair:
    noise = np.frombuffer(blake3(b"raw").digest(length=200), np.uint8)
    return None, TensorBits("BF16", (100,), noise)


FILES: dict[str, tuple[Callable[[], Pair], set[int]]] = {
    "sparse": (lambda: pair_of("sparse"), {0}),
    "same": (same, {0, blocks.SAME}),
    "dense": (lambda: pair_of("dense"), {0, blocks.DENSE}),
    "codes": (lambda: pair_of("codes"), {0}),
    "whole": (whole, {blocks.PLANES}),
    "raw": (raw, {blocks.RAW}),
}


def written(kind: str) -> tuple[bytes, Pair]:
    """A file that has the blocks that it is named after."""
    make, kinds = FILES[kind]
    base, target = make()
    data = encode_bits({} if base is None else {"w": base}, {"w": target}).data
    patch = Patch.open(data)
    blob = patch._blob("w", patch.entries["w"])
    assert {blob.kind(index) for index in range(len(blob.spans))} == kinds
    return data, (base, target)


def flips(data: bytes, end: int) -> Iterator[bytes]:
    flipped = bytearray(data)
    for bit in range(8 * end):
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)
        flipped[bit // 8] ^= 1 << bit % 8


def refused(data: bytes) -> bool:
    try:
        Patch.open(data)
    except (FormatError, IntegrityError):
        return True
    return False


def in_planes() -> tuple[bytes, Pair]:
    """A small update: one coding for the whole tensor."""
    base, target = pair_of("sparse")
    with pytest.MonkeyPatch.context() as change:
        change.setattr(writing, "SMALL_WORDS", 1 << 16)
        data = encode_bits({"w": base}, {"w": target}).data
    assert Patch.open(data)._rows["w"].coding == "planes"
    return data, (base, target)


def file_of(kind: str) -> tuple[bytes, Pair]:
    return in_planes() if kind == "planes" else written(kind)


@pytest.mark.parametrize("kind", [*FILES, "planes"])
def test_case_043_every_flipped_bit_is_refused_before_anything_is_read(kind: str) -> None:
    data, _ = file_of(kind)
    assert not refused(data)
    assert all(map(refused, flips(data, len(data))))


@pytest.mark.parametrize("kind", [*FILES, "planes"])
def test_case_043_every_flipped_bit_under_a_new_digest_gives_no_other_tensor(kind: str) -> None:
    data, (base, target) = file_of(kind)
    body = data[:-32]
    accepted = 0
    buffer = np.empty(target.nbytes, np.uint8)
    before = np.zeros(target.nbytes, np.uint8) if base is None else base.data
    for flipped in flips(body, len(body)):
        buffer[:] = before
        try:
            patch = Patch.open(sealed(flipped))
            for name, entry in patch.entries.items():
                if (name, entry.dtype, entry.shape) == ("w", target.dtype, target.shape):
                    patch.apply_into(name, buffer)
                    accepted += 1
                    assert np.array_equal(buffer, target.data)
        except (FormatError, IntegrityError):
            assert np.array_equal(buffer, before)
    assert accepted <= 64  # bits that say nothing: of counts that only bound, or a frame's flags
