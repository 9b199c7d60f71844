"""Derived versions are what their quantisers say, the same every time."""

import numpy as np
import pytest
from recordings import served, weights

from farcast.bench.data import Change
from farcast.bench.derived import (
    QUANTISERS,
    derive,
    e4m3_values,
    floats_of,
    fp8,
    int4,
    mxfp4,
    nearest,
    to_bf16,
)
from farcast.bench.synthetic import synthetic
from farcast.delta import words_of


def change() -> Change:
    base = {name: served(value) for name, value in weights(np.random.default_rng(6)).items()}
    return synthetic(base, 0.05)


def matrix() -> np.ndarray:
    return np.random.default_rng(7).normal(0, 0.02, (96, 192)).astype(np.float32)


def test_e4m3_agrees_with_torch_on_every_code_and_rounding() -> None:
    torch = pytest.importorskip("torch")
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(e4m3_values(), codes)
    middles = (codes[1:] + codes[:-1]) / 2
    numbers = np.concatenate([codes, -codes, middles, -middles, np.nextafter(middles, 0)])
    numbers = numbers.astype(np.float32)
    expected = torch.from_numpy(numbers).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(nearest(numbers, e4m3_values(), 0x80), expected)


def test_bf16_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    numbers = np.concatenate([matrix().reshape(-1), np.float32([0, -0.0, 1e-40, 3e38])])
    expected = torch.from_numpy(numbers).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(to_bf16(numbers), expected)


def test_each_quantiser_stays_within_half_a_step() -> None:
    numbers = matrix()
    codes, scale = fp8("w", numbers).values()
    signed = np.concatenate([e4m3_values(), [0], -e4m3_values(), [0]])
    wide = np.repeat(np.repeat(scale.data.view("<f4").reshape(scale.shape), 128, 0), 128, 1)
    back = signed[codes.data].reshape(96, 192) * wide[:96, :192]
    assert np.abs(back - numbers).max() <= np.abs(numbers).max() / 448 * 16

    codes, scale = int4("w", numbers).values()
    step = (words_of(scale).astype(np.uint32) << 16).view(np.float32)
    back = (_unpacked(codes.data).astype(np.float32) - 8).reshape(-1, 64) * step[:, None]
    assert (np.abs(back - numbers.reshape(-1, 64)) <= 0.52 * step[:, None]).all()

    codes, scale = mxfp4("w", numbers).values()
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    step = np.ldexp(1.0, scale.data.astype(int) - 127)
    back = e2m1[_unpacked(codes.data)].reshape(-1, 32) * step[:, None]
    assert (np.abs(back - numbers.reshape(-1, 32)) <= 2 * step[:, None]).all()


def _unpacked(data: np.ndarray) -> np.ndarray:
    return np.stack((data & 15, data >> 4), axis=-1).reshape(-1)


def test_zeros_are_quantised_too() -> None:
    for kind, (_, quantiser) in QUANTISERS.items():
        once = quantiser("w", np.zeros((64, 128), np.float32))
        assert once == quantiser("w", np.zeros((64, 128), np.float32)), kind


@pytest.mark.parametrize("kind", QUANTISERS)
def test_only_fitting_matrices_are_quantised(kind: str) -> None:
    source = change()
    made = derive(source, kind)
    assert made.base["norm"] == source.base["norm"]
    assert made.base["embed"].dtype != "BF16"
    assert (made.base["odd"].dtype == "BF16") is (kind != "fp8-e4m3")
    assert made.base.keys() == made.target.keys()
    assert derive(source, kind).target == made.target


@pytest.mark.parametrize("density", [0.001, 0.05, 0.5, 1.0])
def test_a_synthetic_change_has_its_density(density: float) -> None:
    base = {"w": served(np.random.default_rng(8).normal(0, 0.02, (600, 500)).astype(np.float32))}
    made = synthetic(base, density)
    moved = np.mean(words_of(made.target["w"]) != words_of(base["w"]))
    assert moved == pytest.approx(density, rel=0.15)
    assert made.target == synthetic(base, density).target
    numbers = floats_of(made.target["w"])
    assert numbers is not None
    assert np.isfinite(numbers).all()
