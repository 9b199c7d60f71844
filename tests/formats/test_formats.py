import numpy as np
import pytest

from farcast.delta import to_bits
from farcast.errors import TensorMismatchError
from farcast.formats import bf16_bits, canonical_names, served_bf16


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("_orig_mod.module.a.w", "a.w"),
        ("layers.0._orig_mod.w", "layers.0.w"),
        ("layers.0._checkpoint_wrapped_module.w", "layers.0.w"),
        ("_fsdp_wrapped_module.x", "x"),
        ("module.a.w", "a.w"),
        ("module._orig_mod.a.w", "a.w"),
        ("module_list.0.w", "module_list.0.w"),
        ("layers.0.module.w", "layers.0.module.w"),
    ],
)
def test_case_093_wrappers_leave_no_trace_in_names(name: str, canonical: str) -> None:
    assert canonical_names([name]) == {name: canonical}


def test_case_093_a_layer_called_module_keeps_its_name() -> None:
    names = ["module.w", "head.w", "module_list.0.w"]
    assert canonical_names(names) == {name: name for name in names}


def test_a_layer_called_module_keeps_its_name_under_a_wrapper_too() -> None:
    wrapped = {"_orig_mod.module.w": "module.w", "_orig_mod.head.w": "head.w"}
    assert canonical_names(wrapped) == wrapped


def test_case_093_names_that_fall_together_are_refused() -> None:
    with pytest.raises(TensorMismatchError, match=r"'a\._orig_mod\.w'"):
        canonical_names(["a.w", "a._orig_mod.w"])


def test_bf16_rounds_as_torch_does_on_every_kind_of_float() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    halves = (np.arange(65536, dtype=np.uint32) << 16) | 0x8000
    edges = np.array([0, 0x80000000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 1, 0x7FFF], np.uint32)
    values = np.concatenate([words, halves, edges]).view(np.float32)
    nan = np.isnan(values)
    served = to_bits(served_bf16(torch.from_numpy(values))).data.view(np.uint16)
    own = bf16_bits(values).data.view(np.uint16)
    assert np.array_equal(own[~nan], served[~nan])
    assert np.isnan((own[nan].astype(np.uint32) << 16).view(np.float32)).all()
