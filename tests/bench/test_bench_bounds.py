"""The bounds are those of the definition, on cases small enough to count by hand."""

import math

import numpy as np
import pytest
from recordings import random_change

from farcast.bench.bounds import bounds_of
from farcast.bench.codings import FarcastAlone
from farcast.bench.data import Change
from farcast.bench.peers import peers
from farcast.delta import TensorBits


def bf16(*words: int) -> dict[str, TensorBits]:
    return {"w": TensorBits("BF16", (len(words),), np.array(words, "<u2").view(np.uint8))}


def entropy(chance: float) -> float:
    return -(chance * math.log2(chance) + (1 - chance) * math.log2(1 - chance))


def test_bounds_of_eight_words() -> None:
    """Four words of exponent 1, one of which changes by +1; four of exponent 2, of which two
    change, by +1 and by -1. Values take 0 and 2 bits."""
    base = bf16(0x0081, 0x0082, 0x0083, 0x0084, 0x0101, 0x0102, 0x0103, 0x0104)
    target = bf16(0x0082, 0x0082, 0x0083, 0x0084, 0x0102, 0x0101, 0x0103, 0x0104)
    bounds = bounds_of(Change(data="x", hop="0-1", base=base, target=target))
    assert (bounds.elements, bounds.changed) == (8, 3)
    assert bounds.conditioned == pytest.approx(4 * entropy(1 / 4) + 4 * entropy(2 / 4) + 2)
    assert bounds.independent == pytest.approx(8 * entropy(3 / 8) + 2)


def test_a_negative_number_that_grows_moves_down() -> None:
    """+1 and -1 ulp away from zero: on one side of it two values, so one bit each."""
    base, target = bf16(0x0081, 0x8081, 0x0082, 0x0083), bf16(0x0082, 0x8082, 0x0082, 0x0083)
    bounds = bounds_of(Change(data="x", hop="0-1", base=base, target=target))
    assert bounds.conditioned == pytest.approx(4 * entropy(2 / 4) + 2)


def test_packed_codes_are_two_elements_each_and_their_own_context() -> None:
    """Codes 1 1 2 2; one of the ones becomes 3."""
    base = {"w": TensorBits("U8", (2,), np.array([0x11, 0x22], np.uint8))}
    target = {"w": TensorBits("U8", (2,), np.array([0x13, 0x22], np.uint8))}
    change = Change(data="x", hop="0-1", base=base, target=target, packed=frozenset({"w"}))
    bounds = bounds_of(change)
    assert (bounds.elements, bounds.changed) == (4, 1)
    assert bounds.conditioned == pytest.approx(2 * entropy(1 / 2))
    assert bounds.independent == pytest.approx(4 * entropy(1 / 4))


def test_nothing_changed_is_nothing() -> None:
    base = bf16(1, 2, 3)
    assert bounds_of(Change(data="x", hop="0-1", base=base, target=base)) == (3, 0, 0.0, 0.0)


def test_an_anchor_costs_its_exponents_and_the_raw_bits_beside_them() -> None:
    target = bf16(0x0080, 0x0080, 0x0100, 0x0180)
    bounds = bounds_of(Change(data="x", hop="whole", base={}, target=target))
    assert bounds.conditioned == pytest.approx(4 * 8 + 4 * 1.5)


def test_no_coding_is_below_the_bound_of_its_own_data() -> None:
    change = random_change(3, ("BF16", "F8_E4M3"), (512, 256), 0.01)
    bound = bounds_of(change).conditioned
    for coding in (FarcastAlone(change), *peers()):
        assert 8 * coding.encode(change).nbytes > bound
