"""Whatever the bytes, reading gives the writer's tensor, or one typed error and no wrong bit.

The trailing digest is computed anew after each mutation, so that the parser and the kernels are
what is attacked. With the digest of the new bits left as it was, no mutation can pass as another
tensor. Guard bytes around the buffer show a write out of range.
"""

import numpy as np
import pytest
from forging import base_bits, pair_of, reheadered, sealed, target_bits, valid
from hypothesis import given, settings
from hypothesis import strategies as st

from farcast.delta import Patch, encode_bits
from farcast.errors import FormatError, IntegrityError

GUARD = 256


def read(data: bytes) -> None:
    """Apply to a guarded copy of the base; a success must be the target."""
    base = base_bits().data
    arena = np.full(base.size + 2 * GUARD, 0xA5, np.uint8)
    buffer = arena[GUARD:-GUARD]
    buffer[:] = base
    try:
        patch = Patch.open(data)
        for name, entry in patch.entries.items():
            if entry.dtype == "BF16" and entry.shape == base_bits().shape:
                patch.apply_into(name, buffer)
                assert buffer.tobytes() == target_bits().data.tobytes()
    except (FormatError, IntegrityError):
        pass
    assert (arena[:GUARD] == 0xA5).all()
    assert (arena[-GUARD:] == 0xA5).all()


mutations = st.lists(
    st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4
)


@settings(max_examples=600, deadline=None)
@given(mutations)
def test_mutated_bytes(changes: list[tuple[int, int]]) -> None:
    body = bytearray(valid()[:-32])
    for place, value in changes:
        body[place % len(body)] = value
    read(sealed(bytes(body)))


@settings(max_examples=600, deadline=None)
@given(mutations, st.integers(0, 8))
def test_mutated_blobs(changes: list[tuple[int, int]], cut: int) -> None:
    """Only the coded blocks: what the kernels read."""
    data = valid()
    size = Patch.open(data)._rows["w"].size
    body = bytearray(data[:-32])
    for place, value in changes:
        body[len(body) - size + place % size] = value
    if cut:
        del body[-cut:]

        def shorten(header: list) -> None:
            header[2][0][-1] -= cut

        read(reheadered(shorten, bytes(body) + bytes(32)))
    else:
        read(sealed(bytes(body)))


@pytest.mark.parametrize("kind", ["sparse", "dense", "codes", "noise"])
@settings(max_examples=300, deadline=None)
@given(changes=mutations)
def test_mutated_blocks_of_every_kind(kind: str, changes: list[tuple[int, int]]) -> None:
    """The target, or an error and the base."""
    base, target = pair_of(kind)
    data = encode_bits({"w": base}, {"w": target}).data
    start, end = Patch.open(data)._spans["w"]
    body = bytearray(data[:-32])
    for place, value in changes:
        body[start + place % (end - start)] = value
    arena = np.full(base.data.size + 2 * GUARD, 0xA5, np.uint8)
    buffer = arena[GUARD:-GUARD]
    buffer[:] = base.data
    expected = base
    try:
        patch = Patch.open(sealed(bytes(body)))
        if patch.entries["w"].kind == "full":
            assert patch.full("w") == target
        else:
            patch.apply_into("w", buffer)
            expected = target
    except (FormatError, IntegrityError):
        pass
    assert buffer.tobytes() == expected.data.tobytes()
    assert (arena[:GUARD] == 0xA5).all()
    assert (arena[-GUARD:] == 0xA5).all()


@settings(max_examples=300, deadline=None)
@given(st.binary(min_size=5, max_size=66))
def test_mutated_tables(table: bytes) -> None:
    def change(header: list) -> None:
        header[1] = [table]

    read(reheadered(change))
