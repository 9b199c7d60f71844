"""Whatever the memory of a tensor looks like, its bits are those of C order, little endian."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as shapes

from farcast.delta import apply, encode, to_bits
from farcast.delta.bits import _NUMPY, _TORCH

torch = pytest.importorskip("torch")


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Any dtype that numpy has, any shape (0-d and empty ones too), byte order and strides."""
    dtype = np.dtype(_NUMPY[draw(st.sampled_from(sorted(_NUMPY)))])
    shape = draw(shapes.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=7))
    chance = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = int(np.prod(shape))
    raw = chance.integers(0, 2 if dtype.kind == "b" else 256, size * dtype.itemsize, np.uint8)
    array = raw.view(dtype).reshape(shape)
    if draw(st.booleans()):
        array = array.astype(dtype.newbyteorder(">"))
    if draw(st.booleans()):
        array = array.T
    if array.ndim and draw(st.booleans()):
        step = draw(st.sampled_from([-2, -1, 2]))
        array = array[..., ::step]
    if draw(st.booleans()):
        array = np.broadcast_to(array, (3, *array.shape))
    return array


def canonical(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes()


@settings(max_examples=300, deadline=None)
@given(arrays(), st.integers(0, 2**32 - 1))
def test_any_array_comes_back(array: np.ndarray, seed: int) -> None:
    bits = to_bits(array)
    assert bits.shape == array.shape
    out = apply({}, encode({}, {"w": array}))["w"]
    assert out.shape == array.shape
    assert out.tobytes() == canonical(array)
    base = np.array(out)
    words = base.reshape(-1).view(np.uint8)
    if words.size and base.dtype.kind != "b":
        words[seed % words.size] ^= 1 + seed % 255
    changed = apply({"w": base}, encode({"w": base}, {"w": array}))["w"]
    assert changed.shape == array.shape
    assert changed.tobytes() == canonical(array)


@pytest.mark.parametrize("name", sorted(_TORCH))
def test_torch_tensors_of_every_dtype_in_any_memory(name: str) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    width = torch.empty(0, dtype=dtype).element_size()
    high = 2 if name == "bool" else 256
    raw = torch.arange(24 * width, dtype=torch.int64).mul(37).remainder(high).to(torch.uint8)
    whole = raw.view(dtype).reshape(4, 6)
    views = {
        "plain": whole,
        "turned": whole.t(),
        "strided": whole[:, ::2],
        "scalar": whole[1, 2],
        "empty": whole[:0],
        "wide": whole[0].expand(3, 6),
    }
    if name == "float4_e2m1fn_x2":  # two elements in a byte: no shape says that without a dimension
        del views["scalar"]
    for label, view in views.items():
        out = apply({}, encode({}, {"w": view}))["w"]
        rows = raw.reshape(4, 6, width)
        expected = {
            "plain": rows, "turned": rows.transpose(0, 1), "strided": rows[:, ::2],
            "scalar": rows[1, 2], "empty": rows[:0], "wide": rows[0].expand(3, 6, width),
        }[label]  # fmt: skip
        assert to_bits(out).data.tobytes() == expected.contiguous().numpy().tobytes(), label
        assert to_bits(view).data.tobytes() == expected.contiguous().numpy().tobytes(), label
