"""Lists come in key order from servers that sort by key and from those that sort by folder."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcast.store import ObjectInfo
from farcast.store.listing import early_offset, in_key_order

KEYS = st.sets(
    st.lists(st.text("ab0-.+", min_size=1, max_size=3), min_size=1, max_size=3).map("/".join),
    max_size=12,
)


def tree_path(key: str) -> list[str]:
    return key.split("/")


def by_key(keys: set[str]) -> list[str]:
    return sorted(keys)


def by_folder(keys: set[str]) -> list[str]:
    return sorted(keys, key=tree_path)


@pytest.mark.parametrize("order", [by_key, by_folder])
@given(keys=KEYS)
def test_either_order_becomes_key_order(
    order: Callable[[set[str]], list[str]], keys: set[str]
) -> None:
    listing = (ObjectInfo(f"p/{key}", 1, 0.0) for key in order(keys))
    assert [info.key for info in in_key_order(listing, "p/")] == [f"p/{k}" for k in sorted(keys)]


@given(keys=KEYS, after=st.sampled_from(["a", "a-b", "ab/a", "a.b0/x", "b+", "ab0-/a"]))
def test_an_early_offset_loses_nothing(keys: set[str], after: str) -> None:
    """A tree skips what sorts up to the offset, and the whole folder that the offset names."""
    wanted = {key for key in keys if key > after}
    offset = early_offset("", after)
    if offset is None:
        return
    assert wanted <= {key for key in keys if key > offset}
    path = tree_path(offset)
    assert wanted <= {k for k in keys if tree_path(k) > path and tree_path(k)[0] != offset}


def test_flat_names_are_not_held_back() -> None:
    taken: list[str] = []

    def listing() -> Iterator[ObjectInfo]:
        for number in range(1000):
            taken.append(str(number))
            yield ObjectInfo(f"versions/{number:012d}.json", 1, 0.0)

    next(in_key_order(listing(), "versions/"))
    assert len(taken) <= 2


def test_an_offset_elsewhere_starts_from_the_beginning() -> None:
    assert early_offset("versions/", "objects/1") is None
    assert early_offset("versions/", "versions/000000000012.json") == "versions/00000000001"
