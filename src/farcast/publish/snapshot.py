"""From what a trainer hands over to bits that do not change any more.

The optimizer writes into the same tensors as soon as `publish_async` returns, and a generator
may fill one buffer again and again. So each tensor is copied as it is drawn, into buffers that
are used again for the next version. What lies on a CUDA device is copied there and never comes
to the host as a whole; copies from other devices go to host memory, and are awaited before anybody
reads them. Refuses to write into what it was given.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from farcast.delta import AnyBits, TensorBits, held_bits, to_bits
from farcast.delta.bits import on_device
from farcast.errors import TensorMismatchError
from farcast.formats import canonical_names

Bits = dict[str, AnyBits]


class DeviceCopies(Protocol):
    """Copies from devices to host memory that run side by side."""

    def start(self, name: str, tensor: Any, spare: AnyBits | None) -> None:
        """Begin to copy, into the memory of `spare` if it fits."""
        ...

    def wait(self) -> Mapping[str, TensorBits]:
        """The bits by name, once every copy that was started has ended."""
        ...


class TorchCopies:
    """Copies of torch tensors into host memory, awaited once for all of them."""

    def __init__(self) -> None:
        self._hosts: dict[str, Any] = {}
        self._devices: set[Any] = set()

    def start(self, name: str, tensor: Any, spare: AnyBits | None) -> None:
        torch = sys.modules["torch"]
        source = tensor.detach()
        size = source.numel() * source.element_size()
        kept = _reusable(spare, size)
        memory = torch.empty(size, dtype=torch.uint8) if kept is None else torch.from_numpy(kept)
        host = memory.view(source.dtype).view(source.shape)
        self._devices.add(source.device)
        self._hosts[name] = host.copy_(source, non_blocking=True)

    def wait(self) -> Mapping[str, TensorBits]:
        for device in self._devices:
            sys.modules["torch"].accelerator.synchronize(device)
        return {name: to_bits(host) for name, host in self._hosts.items()}


class Snapshots:
    """Takes snapshots, in buffers that were given back where these fit."""

    def __init__(self, new_copies: Callable[[], DeviceCopies] = TorchCopies) -> None:
        self._new_copies = new_copies
        self._spare: Mapping[str, AnyBits] = {}
        self._names: dict[str, str] = {}

    def take(self, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Bits:
        """Bits of all tensors by canonical name, in memory that nobody else knows."""
        # Emptied first: the buffers of a publish that failed are never used again, because an
        # interrupt may have left them in the baseline.
        spare, self._spare = self._spare, {}
        copies = self._new_copies()
        taken: dict[str, AnyBits | None] = {}
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        for name, tensor in pairs:
            if name in taken:
                raise TensorMismatchError(f"The tensor {name!r} is given twice; give it once.")
            buffer = spare.get(self._names.get(name, name))
            if comes_over(tensor):
                copies.start(name, tensor, buffer)
                taken[name] = None
            else:
                taken[name] = held_bits(tensor).copied(buffer)
        arrived = copies.wait()
        self._names = canonical_names(taken)
        return {
            self._names[name]: arrived[name] if bits is None else bits
            for name, bits in taken.items()
        }

    def give_back(self, bits: Mapping[str, AnyBits]) -> None:
        """Buffers for the next snapshot; the caller reads them no more."""
        self._spare = bits


def views(tensors: Mapping[str, Any]) -> Bits:
    """Bits by canonical name of tensors none of which `comes_over`, sharing their memory where the
    layout allows."""
    names = canonical_names(tensors)
    return {names[name]: held_bits(tensor) for name, tensor in tensors.items()}


def comes_over(tensor: Any) -> bool:
    """Whether a tensor lies on a device whose tensors are read through host memory. Other
    libraries' arrays are read through numpy's protocol, which waits by itself."""
    kind = getattr(getattr(tensor, "device", None), "type", None)
    return kind not in (None, "cpu") and not on_device(tensor)


def _reusable(spare: AnyBits | None, size: int) -> NDArray[np.uint8] | None:
    """The memory of `spare`, if it holds exactly `size` bytes in host memory and may be written."""
    if not isinstance(spare, TensorBits) or not size or spare.nbytes != size:
        return None
    return spare.data if spare.data.flags.writeable else None
