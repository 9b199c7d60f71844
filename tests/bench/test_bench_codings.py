"""Whatever a coding is compared for, it is exact: the decoded bits are the target's."""

import importlib.util
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import random_change

from farcast.bench.bounds import bounds_of
from farcast.bench.codings import Coding, Encoded, Farcast, FarcastAlone
from farcast.bench.data import Change
from farcast.bench.fireworks import PACKAGE, fireworks
from farcast.bench.measure import Buffers, Effort, measure
from farcast.bench.ordered import EXPONENTS, from_ordered, to_ordered
from farcast.bench.peers import IndexValue, peers
from farcast.delta import TensorBits, word_bytes
from farcast.errors import IntegrityError

DTYPES = ("BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "U8", "I32", "BOOL")


def decoded(coding: Coding, change: Change) -> None:
    buffers = Buffers(change)
    coding.decode(coding.encode(change), buffers.arrays)
    buffers.check(coding)


changes = st.builds(
    random_change,
    st.integers(0, 1 << 30),
    st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4).map(tuple),
    st.sampled_from([(2,), (0, 4), (1, 2), (7, 2), (64, 6), (3, 5, 4), (1, 70_000)]),
    st.sampled_from([0.0, 0.001, 0.05, 0.6, 1.0]),
)


@settings(max_examples=80, deadline=None)
@given(changes)
def test_every_peer_gives_back_the_target(change: Change) -> None:
    for coding in peers():
        decoded(coding, change)


@settings(max_examples=15, deadline=None)
@given(changes)
def test_farcast_gives_back_the_target(change: Change) -> None:
    decoded(Farcast(change), change)
    decoded(FarcastAlone(change), change)


@pytest.mark.skipif(
    not importlib.util.find_spec(PACKAGE), reason="fireworks-delta-compression is not installed"
)
def test_the_fireworks_package_gives_back_the_target() -> None:
    change = random_change(1, ("BF16", "F32", "F8_E4M3", "F4"), (64, 32), 0.05)
    for coding in fireworks():
        decoded(coding, change)


def test_codings_without_a_base_take_an_anchor() -> None:
    whole = random_change(2, DTYPES, (8, 4), 1.0).target
    change = Change(data="anchor", hop="whole", base={}, target=whole)
    anchors = [coding for coding in (Farcast(change), *peers()) if coding.anchors]
    assert len(anchors) >= 2
    for coding in anchors:
        decoded(coding, change)


def test_rows_that_are_skipped_far_apart_are_found_again() -> None:
    """More rows between two changes than a byte counts, as in a tall matrix."""
    base = {"tall": TensorBits("U8", (1000, 3), np.zeros(3000, np.uint8))}
    data = np.zeros(3000, np.uint8)
    data[[0, 2, 5, 2000, 2001, 2999]] = 7
    change = Change(
        data="x", hop="0-1", base=base, target={"tall": TensorBits("U8", (1000, 3), data)}
    )
    for coding in peers():
        decoded(coding, change)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ordered_integers_can_be_undone(dtype: str) -> None:
    width = word_bytes(dtype)
    words = np.frombuffer(np.random.default_rng(4).bytes(8 * 4096), f"<u{width}")
    assert np.array_equal(from_ordered(to_ordered(words, dtype), dtype), words)


@pytest.mark.parametrize("dtype", ["F16", "F32", "F64"])
def test_ordered_integers_keep_the_order_of_numbers(dtype: str) -> None:
    numbers = np.array([-math.inf, -1.5, -1e-7, -0.0, 0.0, 1e-7, 1.5, math.inf])
    words = numbers.astype(f"<f{word_bytes(dtype)}").view(f"<u{word_bytes(dtype)}")
    assert dtype in EXPONENTS
    ordered = to_ordered(words, dtype)
    assert (np.diff(ordered) > 0).all()
    assert ordered[4] - ordered[3] == 1


def test_a_coding_that_loses_a_bit_is_refused() -> None:
    class Lossy(IndexValue):
        def decode(self, encoded: Encoded, buffers: dict[str, np.ndarray]) -> None:  # type: ignore[override]
            super().decode(encoded, buffers)
            buffers["0.BF16"][3] ^= 1

    change = random_change(5, ("BF16",), (64, 8), 0.1)
    with pytest.raises(IntegrityError, match="decoded other bits"):
        measure(Lossy(), change, bounds_of(change), Effort(repetitions=1))
