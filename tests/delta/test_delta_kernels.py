"""The kernels that count 64 words at once, against words counted one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farcast.delta import blocks, kernels
from farcast.delta.conditioned import MAX_CLASSES

WIDTHS = {8: "<u1", 16: "<u2", 32: "<u4", 64: "<u8"}


def read_only(words: np.ndarray) -> np.ndarray:
    """As the library hands words to the kernels."""
    view = words.view()
    view.flags.writeable = False
    return view


def classes_one_by_one(words: np.ndarray, shift: int, first: int, last: int) -> np.ndarray:
    codes = (words.astype(np.uint64) >> np.uint64(shift)) & np.uint64(0xFF)
    return np.clip(codes.astype(np.int64) - first, 0, last)


def ranks_one_by_one(classes: np.ndarray) -> np.ndarray:
    """Of each word, how many of its class stand before it."""
    ranks = np.empty(classes.size, np.int64)
    for k in np.unique(classes):
        own = classes == k
        ranks[own] = np.arange(own.sum())
    return ranks


def test_the_numbers_of_all_classes_have_so_many_bits() -> None:
    assert (MAX_CLASSES - 1).bit_length() == kernels.CLASS_BITS


@pytest.mark.parametrize("bits", WIDTHS)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(0, 2 * kernels.CHUNK + 70),
    first=st.integers(0, 250),
    last=st.integers(0, MAX_CLASSES - 1),
    spread=st.sampled_from([1, 3, 40, 256]),
    share=st.sampled_from([0.0, 0.005, 0.1, 0.2]),
)
def test_changes_are_found_and_placed_as_if_one_by_one(
    bits: int, seed: int, size: int, first: int, last: int, spread: int, share: float
) -> None:
    chance = np.random.default_rng(seed)
    shift = {8: 0, 16: 7, 32: 23, 64: 52}[bits]
    codes = (first + chance.integers(-2, spread, size)).clip(0, 255).astype(np.uint64)
    low = chance.integers(0, 1 << shift, size, dtype=np.uint64)
    old = ((codes << np.uint64(shift)) | low).astype(WIDTHS[bits])
    places = np.flatnonzero(chance.random(size) < share)[: size // kernels.DENSE_FROM]
    steps = chance.integers(1, 1 << min(bits, 63), places.size, dtype=np.uint64)
    new = old.copy()
    new[places] += steps.astype(old.dtype)
    places = np.flatnonzero(old != new)

    arguments = (np.uint64(shift), np.uint8(255), np.uint8(first), np.uint8(last))
    room = (np.empty(size, np.uint8), np.empty(size, np.uint32), np.empty(size, np.uint64))
    sides = (read_only(old), read_only(new))
    found = kernels.find(*sides, bits, *arguments, *room)
    assert found == places.size
    kinds, ranks, changes = (events[:found] for events in room)
    classes = classes_one_by_one(old, shift, first, last)
    assert np.array_equal(kinds, classes[places])
    assert np.array_equal(ranks, ranks_one_by_one(classes)[places])
    assert np.array_equal(changes.astype(old.dtype), new[places] - old[places])

    order = np.argsort(kinds, kind="stable")
    bounds = np.searchsorted(kinds[order], np.arange(257)).astype(np.int64)
    told, chosen = np.empty(found, np.int64), blocks._chosen()
    assert kernels.place(sides[0], *arguments, bounds, ranks[order], chosen, told) == 0
    assert np.array_equal(told, places[order])

    if found:  # one more of the last event's class than there are words of it
        late = ranks[order].copy()
        late[-1] = (classes == kinds[order][-1]).sum()
        refused = kernels.place(sides[0], *arguments, bounds, late, chosen, told)
        assert refused == kernels.MALFORMED


@pytest.mark.parametrize("bits", WIDTHS)
def test_words_are_added_modulo_their_width(bits: int) -> None:
    words = np.array([0, 1, 2, (1 << bits) - 1], WIDTHS[bits])
    kernels.add(words, np.array([1, 3, 0]), np.array([2, 3, 2**64 - 1], np.uint64))
    assert words.tolist() == [(1 << bits) - 1, 3, 2, 2]
