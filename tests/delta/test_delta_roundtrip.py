"""apply(base, encode(base, target)) is target, bit for bit, whatever the dtype, shape and bits."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farcast.delta import Patch, TensorBits, apply, blocks, encode, encode_bits, to_bits
from farcast.delta.bits import BITS_PER_ELEMENT
from farcast.delta.container import MAX_BLOCK_WORDS
from farcast.errors import FormatError

DTYPES = sorted(BITS_PER_ELEMENT)


def bits_of(dtype: str, words: int, data: bytes) -> TensorBits:
    shape = (words * 8 // BITS_PER_ELEMENT[dtype],)
    return TensorBits(dtype, shape, np.frombuffer(data, np.uint8))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[TensorBits, TensorBits]:
    """Two tensors of one dtype that differ in a drawn share of their bytes."""
    dtype = draw(st.sampled_from(DTYPES))
    size = draw(st.integers(0, 40)) * 16
    seed, share = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([0, 0.01, 0.2, 0.9, 1]))
    chance = np.random.default_rng(seed)
    top = draw(st.sampled_from([2, 64, 256]))
    base = chance.integers(0, top, size, dtype=np.uint8)
    step = chance.integers(0, draw(st.sampled_from([2, 256])), size, dtype=np.uint8)
    target = base + np.where(chance.random(size) < share, step, 0).astype(np.uint8)
    return bits_of(dtype, size, base.tobytes()), bits_of(dtype, size, target.tobytes())


def applied(base: TensorBits, target: TensorBits) -> int:
    data = encode_bits({"w": base}, {"w": target}).data
    patch = Patch.open(data)
    if base == target:
        assert not patch.entries
        return len(data)
    buffer = base.data.copy()
    changed = patch.apply_into("w", buffer)
    assert buffer.tobytes() == target.data.tobytes()
    assert changed == patch.entries["w"].changed > 0
    return len(data)


@settings(max_examples=300, deadline=None)
@given(pairs())
def test_every_change_comes_back(pair: tuple[TensorBits, TensorBits]) -> None:
    base, target = pair
    size = applied(base, target)
    assert size <= target.data.size + 1024
    anchor = Patch.open(encode_bits({}, {"w": target}).data)
    assert anchor.full("w") == target


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_009_every_bit_pattern_of_16_bits_and_every_step(dtype: str) -> None:
    every = np.arange(65536, dtype="<u2")
    for step in (1, 255, 256, 32768, 65535):
        base = bits_of(dtype, every.nbytes, every.tobytes())
        target = bits_of(dtype, every.nbytes, (every + np.uint16(step)).astype("<u2").tobytes())
        applied(base, target)


@pytest.mark.parametrize("share", [0.02, 1])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_steps_of_every_size(width: int, share: float) -> None:
    """Up to half the way round, where up and down are the same."""
    chance = np.random.default_rng(width)
    base = np.frombuffer(chance.bytes(2000 * width), f"<u{width}")
    step = np.uint64(1) << chance.integers(0, 8 * width, base.size).astype(np.uint64)
    step -= chance.integers(0, 2, base.size).astype(np.uint64)
    step[chance.random(base.size) >= share] = 0
    target = base + step.astype(base.dtype)
    dtype = f"U{8 * width}"
    applied(*(TensorBits(dtype, base.shape, words.view(np.uint8)) for words in (base, target)))


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3"])
def test_any_share_of_a_large_tensor(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks as large as users have them, one or two, with more changes than a common table is
    fitted to or fewer."""
    monkeypatch.setattr(blocks, "BLOCK_WORDS", MAX_BLOCK_WORDS)
    chance = np.random.default_rng(3)
    for words in (3 << 17, 3 << 19):
        width = BITS_PER_ELEMENT[dtype] // 8
        base = chance.integers(0, 256, words * width, np.uint8)
        for share in (1e-5, 1e-3, 0.02, 0.1, 0.2, 0.24, 0.3, 0.6, 1):
            target = base.copy()
            target[::width] += chance.random(words) < share
            data = base.tobytes(), target.tobytes()
            applied(bits_of(dtype, words * width, data[0]), bits_of(dtype, words * width, data[1]))


def test_zero_dimensions_and_nothing_at_all() -> None:
    base = {"scalar": np.float32(1.0), "empty": np.empty((0, 3)), "same": np.ones(4)}
    target = {"scalar": np.float32(2.0), "empty": np.empty((0, 3)), "same": np.ones(4)}
    out = apply(base, encode(base, target))
    assert out["scalar"].shape == ()
    assert out["scalar"] == 2.0
    assert out["empty"].shape == (0, 3)
    assert apply({}, encode({}, {})) == {}
    assert apply({}, encode({}, target))["empty"].shape == (0, 3)


def test_case_033_layouts_and_byte_orders_are_the_same_bits() -> None:
    """Case 033."""
    w = np.arange(24, dtype=np.float32).reshape(4, 6)
    wide, big = np.broadcast_to(w[0], (3, 6)), w.astype(">f4")
    for view in (w.T, w[:, ::2], np.asfortranarray(w), wide, w[::-1], big):
        out = apply({}, encode({}, {"w": view}))["w"]
        assert out.tobytes() == np.ascontiguousarray(view).astype("<f4").tobytes()
        zero = np.zeros(view.shape, np.float32)
        assert apply({"w": zero}, encode({"w": zero}, {"w": view}))["w"].tolist() == view.tolist()


@pytest.mark.parametrize("name", ["x" * 1025, "half of a pair \ud800", 5, None])
def test_a_name_that_no_reader_takes_is_not_written(name: Any) -> None:
    tensor = np.ones(3, np.float32)
    for base, target in (({}, {name: tensor}), ({name: tensor}, {})):
        with pytest.raises(FormatError, match="rename it"):
            encode(base, target)
    longest = {"x" * 1024: tensor}
    assert apply({}, encode({}, longest)).keys() == longest.keys()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_a_torch_tensor_without_bits_is_refused() -> None:
    torch = pytest.importorskip("torch")
    pieces = [torch.zeros(2), torch.zeros(3)]
    for tensor in (torch.zeros(3, device="meta"), torch.nested.nested_tensor(pieces)):
        with pytest.raises(FormatError):
            encode({}, {"x": tensor})


def test_unaligned_and_read_only_memory() -> None:
    raw = bytearray(range(1, 202))
    base = TensorBits("BF16", (100,), np.frombuffer(memoryview(raw)[1:], np.uint8))
    target = TensorBits("BF16", (100,), np.frombuffer(bytes(200), np.uint8))
    applied(base, target)
    applied(target, base)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (np.array([0x3F80], "<u2"), np.array([0x4080], "<u2")),
        (np.array([0x3F800000], "<u4"), np.array([0x40000000], "<u4")),
        (np.array([1], "<i8"), np.array([2**32 + 1], "<i8")),
    ],
)
def test_case_007_a_change_in_any_byte_is_a_change(old: np.ndarray, new: np.ndarray) -> None:
    """Case 007."""
    assert apply({"w": old}, encode({"w": old}, {"w": new}))["w"].tolist() == new.tolist()


def test_case_005_an_anchor_is_whole() -> None:
    """Case 005."""
    anchor = encode({}, {"a": np.arange(9), "b": np.arange(5.0)})
    out = apply({}, anchor)
    assert out["a"].tolist() == list(range(9))
    assert out["b"].tolist() == list(range(5))


def test_case_027_no_change_is_larger_than_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 027."""
    monkeypatch.setattr(blocks, "BLOCK_WORDS", 1 << 20)
    chance = np.random.default_rng(1)
    base, target = (chance.integers(0, 65536, 100_000).astype("<u2") for _ in range(2))
    assert len(encode({"w": base}, {"w": target})) <= base.nbytes + 1024
    one = np.zeros(1_000_000, np.uint16)
    changed = one.copy()
    changed[777_777] = 5
    assert len(encode({"w": one}, {"w": changed})) < 1024


def test_case_037_the_same_bytes_from_another_process() -> None:
    """Case 037."""
    code = (
        "import numpy as np; from farcast.delta import encode; a = np.arange(70000, dtype='<u2'); "
        "b = a.copy(); b[::97] += 1; print(encode({'x': a, 'w': b}, {'w': a, 'x': b}).hex())"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1] != b""


def test_kinds_and_removals() -> None:
    base = {"gone": np.ones(2), "reshaped": np.ones(4, np.float32), "stays": np.ones(3)}
    target = {"reshaped": np.ones((2, 2), np.float32), "stays": np.ones(3), "new": np.zeros(2)}
    patch = Patch.open(encode(base, target))
    assert patch.removed == ("gone",)
    assert {name: entry.kind for name, entry in patch.entries.items()} == {
        "new": "full",
        "reshaped": "full",
    }
    assert set(apply(base, encode(base, target))) == set(target)


def test_known_identities_are_not_hashed_again() -> None:
    base, target = {"w": to_bits(np.zeros(9))}, {"w": to_bits(np.ones(9))}
    known = encode_bits(base, target).entries
    again = encode_bits(base, target, target_entries=known)
    assert again.data == encode_bits(base, target).data


@settings(max_examples=100, deadline=None)
@given(pairs())
def test_undo_gives_back_the_base(pair: tuple[TensorBits, TensorBits]) -> None:
    base, target = pair
    patch = Patch.open(encode_bits({"w": base}, {"w": target}).data)
    for name in patch.entries:
        buffer = base.data.copy()
        applied = patch.change(name, buffer)
        assert buffer.tobytes() == target.data.tobytes()
        applied.undo()
        assert buffer.tobytes() == base.data.tobytes()


@settings(max_examples=60, deadline=None)
@given(pairs(), st.sampled_from([2, 4, 8]))
def test_a_rank_reads_only_its_rows(pair: tuple[TensorBits, TensorBits], shards: int) -> None:
    elements = pair[0].shape[0]
    if not elements or elements % shards:
        return
    base, target = (
        TensorBits(bits.dtype, (shards, elements // shards), bits.data) for bits in pair
    )
    patch = Patch.open(encode_bits({"w": base}, {"w": target}, shards=shards).data)
    share = base.data.size // shards
    for rank in range(shards if "w" in patch.entries else 0):
        if (base.data.size // shards) % (2 * patch._rows["w"].block):
            continue  # no equal blocks of an even number of words
        part = slice(rank * share, (rank + 1) * share)
        buffer = base.data[part].copy()
        applied = patch.change_rows("w", buffer, rank, rank + 1)
        assert buffer.tobytes() == target.data[part].tobytes()
        applied.undo()
        assert buffer.tobytes() == base.data[part].tobytes()


@settings(max_examples=60, deadline=None)
@given(st.lists(pairs(), min_size=1, max_size=6))
def test_the_same_bytes_on_any_number_of_threads(
    tensors: list[tuple[TensorBits, TensorBits]],
) -> None:
    base = {f"w{i}": pair[0] for i, pair in enumerate(tensors)}
    target = {f"w{i}": pair[1] for i, pair in enumerate(tensors)} | {"new": tensors[0][1]}
    one, two, five = (encode_bits(base, target, threads=n) for n in (1, 2, 5))
    assert one == two == five


def test_packed_codes_are_seen_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two codes in a byte, of which few move: gaps count codes of the same value."""
    monkeypatch.setattr(blocks, "BLOCK_WORDS", 1 << 20)
    chance = np.random.default_rng(3)
    codes = chance.binomial(15, 0.5, 1 << 16).astype(np.uint8)
    moved = codes.copy()
    moved[chance.random(codes.size) < np.where(codes > 9, 0.02, 0.001)] -= 1
    for dtype in ("F4", "U8", "I32"):
        base, target = (
            TensorBits(
                dtype,
                (1 << (16 if dtype == "F4" else 15 if dtype == "U8" else 13),),
                (c[::2] | c[1::2] << 4).astype(np.uint8),
            )
            for c in (codes, moved)
        )
        patch = Patch.open(encode_bits({"w": base}, {"w": target}).data)
        assert patch._rows["w"].coding == "codes"
        assert applied(base, target)


@pytest.mark.full
def test_more_than_two_to_the_31_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Untouched pages of a zeroed array take no memory, so 2 GiB are cheap to name."""
    monkeypatch.setattr(blocks, "BLOCK_WORDS", 1 << 20)
    size = 2**31 + 65
    base, target = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    target[[5, 2**31 - 1, 2**31, size - 1]] = 7
    buffer = base
    data = encode_bits(
        {"w": TensorBits("U8", (size,), base)}, {"w": TensorBits("U8", (size,), target)}
    ).data
    assert Patch.open(data).apply_into("w", buffer) == 4
    assert buffer[[5, 2**31 - 1, 2**31, size - 1]].tolist() == [7] * 4
