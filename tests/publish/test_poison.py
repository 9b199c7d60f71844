"""Case 077: weights that turned to NaN are not broadcast; NaN among others is nobody's business."""

from typing import Any

import numpy as np
import pytest

from farcast.errors import PoisonError
from farcast.publish import Publisher
from farcast.store import MemoryStore
from version_world import RUN, bits_of, keys, rebuilt, tensors

torch = pytest.importorskip("torch")

FLOATS = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
]


def full(value: float, dtype: Any, count: int = 6) -> Any:
    if dtype in (torch.float8_e5m2, torch.float8_e4m3fn):
        return torch.full((count,), value).to(dtype)
    return torch.full((count,), value, dtype=dtype)


def started() -> tuple[MemoryStore, Publisher]:
    store = MemoryStore()
    publisher = Publisher(store, RUN)
    publisher.publish({"good": tensors()["a"], "w": full(1.0, torch.float32)}, step=0)
    return store, publisher


@pytest.mark.parametrize("dtype", FLOATS)
def test_case_077_a_tensor_that_turned_to_nan_is_refused_by_name(dtype: Any) -> None:
    store = MemoryStore()
    publisher = Publisher(store, RUN)
    publisher.publish({"good": tensors()["a"], "layers.3.bad": full(1.0, dtype)}, step=0)
    before = keys(store)
    with pytest.raises(PoisonError, match=r"'layers\.3\.bad'"):
        publisher.publish({"good": tensors()["a"], "layers.3.bad": full(np.nan, dtype)}, step=1)
    assert keys(store) == before
    fine = {"good": tensors()["a"], "layers.3.bad": full(2.0, dtype)}
    assert publisher.publish(fine, step=2).version == 1
    assert rebuilt(store, 1) == bits_of(fine)


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_infinity_everywhere_is_refused_too(value: float) -> None:
    _, publisher = started()
    with pytest.raises(PoisonError, match="'w'"):
        publisher.publish({"good": tensors()["a"], "w": full(value, torch.float32)}, step=1)


def test_a_job_raises_it_as_well() -> None:
    _, publisher = started()
    job = publisher.publish_async({"w": full(np.nan, torch.float32)}, step=1)
    with pytest.raises(PoisonError, match="'w'"):
        job.result()


def test_it_can_be_meant() -> None:
    store, publisher = started()
    values = {"w": full(np.nan, torch.float32)}
    publisher.publish(values, step=1, allow_poison=True)
    assert rebuilt(store, 1) == bits_of(values)
    # It did not turn: it was so before.
    publisher.publish({**values, "x": tensors()["a"]}, step=2)


@pytest.mark.parametrize("last", [0, 5, 70_000])
def test_one_finite_value_is_enough(last: int) -> None:
    store, publisher = started()
    value = full(np.nan, torch.float32, 70_001)
    value[last] = 0.0
    publisher.publish({"w": full(1.0, torch.float32, 70_001)}, step=1)
    publisher.publish({"w": value}, step=2)
    assert rebuilt(store, 2) == bits_of({"w": value})


@pytest.mark.parametrize(
    "values",
    [
        {"w": np.array([np.nan], np.float32)},
        {"w": np.full(5, -1, np.int32)},
        {"w": np.full(5, 255, np.uint8)},
        {"new": np.full(5, -np.inf, np.float32)},
        {"w": np.zeros((0, 3), np.float32)},
        {"w": np.array([np.nan, 1.0], np.float32)},
    ],
)
def test_what_is_legal(values: dict[str, Any]) -> None:
    store, publisher = started()
    publisher.publish({"w": np.ones_like(next(iter(values.values())))}, step=1)
    publisher.publish(values, step=2)
    assert rebuilt(store, 2) == bits_of(values)


def test_many_are_counted() -> None:
    publisher = Publisher(MemoryStore(), RUN)
    publisher.publish({f"w{i}": np.ones(3) for i in range(9)}, step=0)
    with pytest.raises(PoisonError, match="'w0', 'w1', 'w2' and 6 more"):
        publisher.publish({f"w{i}": np.full(3, np.nan) for i in range(9)}, step=1)
