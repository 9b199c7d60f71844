"""What tests of tensors on a device share: tensors that pass for such, and a count of what crosses.

Where there is a CUDA device the tests run there too; on the CPU the predicate is told that every
torch tensor lies on a device, and all of them go the whole way that CUDA tensors go.
"""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from farcast.delta import bits, device

PLACES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    ),
]


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every torch tensor lies on a device."""
    monkeypatch.setattr(bits, "on_device", lambda tensor: isinstance(tensor, torch.Tensor))


class Doors(TorchFunctionMode):
    """Counts the bytes that go to the host and come from it, the `most` and the `largest` at once,
    and refuses any other way there.

    A number alone may be read anywhere: what a kernel's size or a condition needs.
    """

    WAYS = ("cpu", "numpy", "tolist", "item", "__bool__", "__array__")
    ALONE = 8

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.out = self.back = self.most = self.largest = 0
        self._inside = threading.local()
        leave, come = device.to_host, device.to_device

        def to_host(tensor: torch.Tensor) -> Any:
            self.out += tensor.numel() * tensor.element_size()
            self.most = max(self.most, tensor.numel() * tensor.element_size())
            self._inside.yes = True
            try:
                return leave(tensor)
            finally:
                self._inside.yes = False

        def to_device(array: np.ndarray[Any, Any], place: Any) -> torch.Tensor:
            self.back += array.nbytes
            self.largest = max(self.largest, array.nbytes)
            return come(array, place)

        monkeypatch.setattr(device, "to_host", to_host)
        monkeypatch.setattr(device, "to_device", to_device)

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = getattr(func, "__name__", "")
        if name in self.WAYS and not getattr(self._inside, "yes", False):
            size = args[0].numel() * args[0].element_size()
            assert size <= self.ALONE, f"{name}() brings {size} bytes to the host"
        kinds = (*args[1:], *(kwargs or {}).values()) if name == "to" else ()
        assert "cpu" not in map(str, kinds) or args[0].device.type == "cpu"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def doors(monkeypatch: pytest.MonkeyPatch) -> Iterator[Doors]:
    with Doors(monkeypatch) as open_doors:
        yield open_doors
