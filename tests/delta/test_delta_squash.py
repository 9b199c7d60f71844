"""squash(deltas, base) is encode(base, new), byte for byte; without a base, new bit for bit."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farcast.delta import (
    Patch,
    TensorBits,
    encode,
    encode_bits,
    entry_of,
    squash,
    squash_bits,
    writing,
)
from farcast.delta.bits import BITS_PER_ELEMENT
from farcast.errors import FormatError, IntegrityError

DTYPES = sorted(BITS_PER_ELEMENT)
Tensors = dict[str, TensorBits]


@pytest.fixture
def in_planes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as change:
        change.setattr(writing, "SMALL_WORDS", 1 << 16)
        yield


def tensor(chance: np.random.Generator) -> TensorBits:
    dtype = DTYPES[chance.integers(len(DTYPES))]
    size = int(chance.integers(0, 30)) * 16
    return TensorBits(
        dtype, (size * 8 // BITS_PER_ELEMENT[dtype],), chance.integers(0, 256, size, dtype=np.uint8)
    )


def moved(chance: np.random.Generator, bits: TensorBits) -> TensorBits:
    """Some bytes one up or down, so that changes of a chain also cancel."""
    step = chance.choice(np.array([1, 255], np.uint8), bits.data.size)
    some = chance.random(bits.data.size) < chance.choice([0.005, 0.05, 1.0])
    return TensorBits(bits.dtype, bits.shape, bits.data + np.where(some, step, 0).astype(np.uint8))


def next_version(chance: np.random.Generator, before: Tensors, first: Tensors) -> Tensors:
    """Tensors that stay, move, go back to the first version, change kind, go and come."""
    after = {}
    for name, bits in before.items():
        choice = chance.integers(10)
        if choice < 5:
            after[name] = moved(chance, bits)
        elif choice < 7:
            after[name] = bits
        elif choice == 7:
            after[name] = first.get(name, bits)
        elif choice == 8:
            after[name] = tensor(chance)
    if chance.random() < 0.5:
        after[f"w{chance.integers(8)}"] = tensor(chance)
    return after


def chain_of(seed: int, hops: int) -> tuple[list[Tensors], list[bytes]]:
    chance = np.random.default_rng(seed)
    versions = [{f"w{number}": tensor(chance) for number in range(4)}]
    for _ in range(hops):
        versions.append(next_version(chance, versions[-1], versions[0]))
    deltas = [encode(a, b) for a, b in pairwise(versions)]
    return versions, deltas


def applied(base: Tensors, data: bytes) -> Tensors:
    patch = Patch.open(data)
    out = {name: bits for name, bits in base.items() if name not in patch.removed}
    for name in patch.entries:
        bits = patch.turned(name, base.get(name))
        assert isinstance(bits, TensorBits)
        out[name] = bits
    return out


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.sampled_from([1, 2]))
def test_with_the_base_it_is_what_a_writer_of_both_versions_makes(
    seed: int, hops: int, threads: int
) -> None:
    versions, deltas = chain_of(seed, hops)
    made = squash(deltas, versions[0], threads=threads)
    assert made == encode(versions[0], versions[-1])
    assert applied(versions[0], made) == versions[-1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_from_nothing_on_no_base_is_needed(seed: int, hops: int) -> None:
    versions, deltas = chain_of(seed, hops)
    made = squash([encode({}, versions[0]), *deltas])
    assert applied({}, made) == versions[-1]
    assert {e.kind for e in Patch.open(made).entries.values()} <= {"full"}
    assert squash([encode({}, versions[0]), *deltas], {}) == encode({}, versions[-1])


@pytest.mark.usefixtures("in_planes")
@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_planes_add_up_without_a_base(seed: int, hops: int) -> None:
    versions, deltas = chain_of(seed, hops)
    made = squash(deltas)
    assert applied(versions[0], made) == versions[-1]
    assert squash(deltas, versions[0]) == encode(versions[0], versions[-1])


def test_blocks_want_their_base() -> None:
    chance = np.random.default_rng(1)
    words = chance.integers(0x3C00, 0x4000, 4000).astype("<u2")
    versions = [{"w": TensorBits("BF16", (4000,), words.view(np.uint8))}]
    for _ in range(2):
        words = words + (chance.random(4000) < 0.02).astype("<u2")
        versions.append({"w": TensorBits("BF16", (4000,), words.view(np.uint8))})
    deltas = [encode(a, b) for a, b in pairwise(versions)]
    with pytest.raises(FormatError, match="old weights"):
        squash(deltas)
    with pytest.raises((FormatError, IntegrityError)):
        squash(deltas, versions[1])
    assert len(squash(deltas, versions[0])) < sum(map(len, deltas))


def test_only_tensors_that_a_delta_names_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = np.random.default_rng(2)
    base = {
        name: TensorBits("U16", (600,), chance.integers(0, 9, 1200, dtype=np.uint8))
        for name in ("moves", "stays")
    }
    target = base | {"moves": moved(chance, base["moves"])}
    deltas, wanted = [encode(base, target)], encode(base, target)
    hashed: list[str] = []
    monkeypatch.setattr(writing, "entry_of", lambda *_, **__: hashed.append("one"))
    surveyed: list[int] = []
    survey = writing.survey
    monkeypatch.setattr(writing, "survey", lambda *a: (surveyed.append(1), survey(*a))[1])
    assert squash(deltas, base) == wanted
    assert len(surveyed) == -(-600 // 128)
    assert not hashed


def test_identities_that_are_known_come_back() -> None:
    versions, deltas = chain_of(5, 3)
    known = {name: entry_of(bits) for name, bits in versions[0].items()}
    patches = [Patch.open(data) for data in deltas]
    made = squash_bits(patches, versions[0], base_entries=known)
    assert made == encode_bits(versions[0], versions[-1], base_entries=known)


def test_no_delta_changes_nothing() -> None:
    base = {"w": np.arange(5)}
    assert squash([], base) == encode(base, base)
    assert Patch.open(squash([])).entries == {}
