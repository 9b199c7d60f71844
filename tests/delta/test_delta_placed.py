"""Tensors on a device give the bytes that they give in host memory, and become the same bits."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from device_world import PLACES, Doors, doors, pretend  # noqa: E402
from farcast import delta  # noqa: E402
from farcast.delta import Patch, TensorBits, blocks, device, encode_bits, held_bits, to_bits  # noqa: E402
from farcast.delta.placed import DeviceBits  # noqa: E402
from farcast.errors import FormatError, IntegrityError  # noqa: E402

__all__ = ["doors"]

Bits = dict[str, TensorBits]
SHARES = (0, 0.01, 0.25, 1)
DTYPES = ("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "U8", "I32", "I64", "C128", "F4", "BOOL")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "PIECE_EVENTS", 5000)
    monkeypatch.setattr(device, "PIECE_WORDS", 1 << 16)
    pretend(monkeypatch)


def changed(bits: TensorBits, share: float, chance: np.random.Generator) -> TensorBits:
    """Small steps up and down, as an optimiser makes them."""
    words = np.array(delta.words_of(bits))
    at = chance.random(words.size) < share
    steps = chance.choice([1, 1, 1, -1, -1, 5], words.size).astype(words.dtype)
    words[at] += steps[at]
    return TensorBits(bits.dtype, bits.shape, words.view(np.uint8))


def tensors(dtype: str, size: int, chance: np.random.Generator) -> TensorBits:
    width = delta.word_bytes(dtype)
    shape = (size * 2,) if dtype == "F4" else (size // 2 if dtype == "C128" else size,)
    if dtype in ("BF16", "F32"):
        values = chance.standard_normal(size).astype("<f4")
        data = (
            values.view(np.uint8) if dtype == "F32" else values.view("<u2")[1::2].copy().view("u1")
        )
    else:
        data = chance.integers(0, 2 if dtype == "BOOL" else 17, size * width, dtype=np.uint8)
    return TensorBits(dtype, shape, data)


def placed(bits: Bits, place: str) -> dict[str, DeviceBits]:
    like = DeviceBits.of(torch.empty(0, device=place))
    return {name: like.place(tensor) for name, tensor in bits.items()}


def there_and_back(base: Bits, target: Bits, place: str, **how: Any) -> bytes:
    """Bytes as on the host, and from either side's bits the other's."""
    encoded = encode_bits(base, target, **how)
    before, after = placed(base, place), placed(target, place)
    assert encode_bits(before, after, **how) == encoded
    assert all(before[name].digest() == base[name].digest() for name in base)
    patch = Patch.open(encoded.data)
    for name in patch.entries:
        made = patch.turned(name, before.get(name, next(iter(after.values()))))
        assert isinstance(made, DeviceBits)
        assert to_bits(made) == target[name]
        if name in base and base[name].shape == target[name].shape:
            assert to_bits(before[name]) == base[name]
            applied = patch.change_bits(name, before[name])
            assert applied.changed == patch.entries[name].changed
            assert to_bits(before[name]) == target[name]
            applied.undo()
            assert to_bits(before[name]) == base[name]
    return encoded.data


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("share", SHARES)
def test_the_bytes_are_those_of_the_host(share: float, place: str) -> None:
    chance = np.random.default_rng(int(share * 10000))
    base = {dtype: tensors(dtype, 6_000, chance) for dtype in DTYPES}
    target = {name: changed(bits, share, chance) for name, bits in base.items()}
    there_and_back(base, target, place, shards=2)


@pytest.mark.parametrize("place", PLACES)
def test_blocks_at_the_edge_of_dense(place: str) -> None:
    """A quarter of a block, more or less, and where the last words tip the scales."""
    chance = np.random.default_rng(4)
    base = {f"t{i}": tensors("BF16", size, chance) for i, size in enumerate((640, 641, 100))}
    for more in (-1, 0, 1, 64, 65):
        for late in (False, True):
            target = {}
            for name, bits in base.items():
                words = np.array(delta.words_of(bits))
                number = max(0, min(words.size, words.size // 4 + more))
                words[words.size - number if late else 0 :][:number] += 1
                target[name] = TensorBits(bits.dtype, bits.shape, words.view(np.uint8))
            there_and_back(base, target, place)


@pytest.mark.parametrize("place", PLACES)
def test_small_targets_new_tensors_and_removed_ones(place: str) -> None:
    chance = np.random.default_rng(5)
    base = {dtype: tensors(dtype, 300, chance) for dtype in DTYPES}
    target = {name: changed(bits, 0.1, chance) for name, bits in base.items()}
    there_and_back(base, target, place)
    del target["BF16"]
    target["new"] = tensors("BF16", 90_000, chance)
    target["F32"] = tensors("F32", 400, chance)
    target["empty"] = TensorBits("F16", (0, 4), np.empty(0, np.uint8))
    there_and_back(base, target, place)
    there_and_back({}, target, place)


def test_sides_may_lie_apart() -> None:
    chance = np.random.default_rng(6)
    base = {"w": tensors("BF16", 70_000, chance)}
    target = {"w": changed(base["w"], 0.01, chance)}
    data = encode_bits(base, target).data
    assert encode_bits(base, placed(target, "cpu")).data == data
    assert encode_bits(placed(base, "cpu"), target).data == data


def test_threads_do_not_matter() -> None:
    chance = np.random.default_rng(7)
    base = {f"t{i}": tensors("BF16", 40_000, chance) for i in range(4)}
    target = {name: changed(bits, 0.02, chance) for name, bits in base.items()}
    one, two = placed(base, "cpu"), placed(target, "cpu")
    assert encode_bits(one, two, threads=2).data == encode_bits(base, target).data


@pytest.mark.parametrize("place", PLACES)
def test_torch_tensors_stay_where_they_are(place: str) -> None:
    base = {"w": torch.randn(300, 300, device=place).bfloat16(), "b": torch.randn(7, device=place)}
    target = {name: (tensor * 1.01).t() for name, tensor in base.items()}
    target["extra"] = torch.ones(4, device=place)
    patch = delta.encode(base, target)
    made = delta.apply(base, patch)
    for name, tensor in target.items():
        assert made[name].device.type == place
        assert torch.equal(made[name], tensor)


def test_another_base_is_refused_and_left_alone() -> None:
    chance = np.random.default_rng(8)
    base = {"w": tensors("BF16", 70_000, chance)}
    patch = Patch.open(encode_bits(base, {"w": changed(base["w"], 0.01, chance)}).data)
    other = changed(base["w"], 0.001, chance)
    for wrong in (other, TensorBits("BF16", (70_000,), np.zeros(140_000, np.uint8))):
        (held,) = placed({"w": wrong}, "cpu").values()
        with pytest.raises(IntegrityError):
            patch.change_bits("w", held)
        assert to_bits(held) == wrong
        with pytest.raises(IntegrityError):
            patch.turned("w", held)
    with pytest.raises(FormatError, match="wrong size"):
        patch.change_bits("w", held_bits(torch.zeros(3)))


@pytest.mark.parametrize("place", PLACES)
def test_only_changes_cross(place: str, doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a tensor: of a quarter of a million words of which 500 changed, 500 words and the like.

    A sample of 16,384 words tells the classes; a block's changes end at two numbers of eight bytes.
    """
    monkeypatch.setattr(blocks, "BLOCK_WORDS", 1 << 16)
    size, number = 1 << 18, 500
    old = (torch.randn(size) * 0.02).bfloat16().to(place)
    new = old.clone()
    at = torch.randperm(size, device=place)[:number]
    device.words_on_device(new)[at] += 1
    data = delta.encode({"w": old}, {"w": new})
    assert doors.out <= 8 * number + 2 * (1 << 14) + 1000
    assert doors.most <= 2 * (1 << 14)
    doors.out = doors.back = doors.most = 0
    made = delta.apply({"w": old}, data)
    assert doors.out <= 1000
    assert doors.back <= 12 * number + 30 * 8
    assert torch.equal(made["w"], new)


@pytest.mark.parametrize("place", PLACES)
def test_a_dense_block_crosses_alone(
    place: str, doors: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = 1 << 15
    monkeypatch.setattr(blocks, "BLOCK_WORDS", block)
    old = (torch.randn(16 * block) * 0.02).bfloat16().to(place)
    new = old.clone()
    words = device.words_on_device(new)
    words[3 * block : 4 * block] += 1
    words[5] += 1
    data = delta.encode({"w": old}, {"w": new})
    assert doors.out <= 2 * 2 * block + 2 * (1 << 14) + 1000
    assert doors.most <= 2 * block
    doors.out = doors.most = 0
    assert torch.equal(delta.apply({"w": old}, data)["w"], new)
    assert doors.out <= 2 * block + 1000
