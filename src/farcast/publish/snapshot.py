"""From what a trainer hands over to bits in host memory that do not change any more.

The optimizer writes into the same tensors as soon as `publish_async` returns, and a generator
may fill one buffer again and again. So each tensor is copied as it is drawn, into buffers that
are used again for the next version, and copies from a device are awaited before anybody reads
them. Refuses to write into what it was given.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from farcast.delta import TensorBits, to_bits

Bits = dict[str, TensorBits]


class DeviceCopies(Protocol):
    """Copies from devices to host memory that run side by side."""

    def start(self, name: str, tensor: Any, spare: TensorBits | None) -> None:
        """Begin to copy, into the memory of `spare` if it fits."""
        ...

    def wait(self) -> Bits:
        """The bits by name, once every copy that was started has ended."""
        ...


class TorchCopies:
    """Copies of torch tensors into page-locked memory, awaited once for all of them."""

    def __init__(self) -> None:
        self._hosts: dict[str, Any] = {}
        self._devices: set[Any] = set()

    def start(self, name: str, tensor: Any, spare: TensorBits | None) -> None:
        torch = sys.modules["torch"]
        source = tensor.detach()
        size = source.numel() * source.element_size()
        kept = _reusable(spare, size)
        if kept is None:
            pinned = source.device.type == "cuda"
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        else:
            memory = torch.from_numpy(kept)
        host = memory.view(source.dtype).view(source.shape)
        self._devices.add(source.device)
        self._hosts[name] = host.copy_(source, non_blocking=True)

    def wait(self) -> Bits:
        torch = sys.modules["torch"]
        for device in self._devices:
            torch.accelerator.synchronize(device)
        return {name: to_bits(host) for name, host in self._hosts.items()}


def snapshot(
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    spare: Mapping[str, TensorBits],
    *,
    new_copies: Callable[[], DeviceCopies] = TorchCopies,
) -> Bits:
    """Bits of all tensors by name, in buffers of their own: those of `spare` where they fit."""
    copies: DeviceCopies | None = None
    taken: Bits = {}
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    for name, tensor in pairs:
        if not on_device(tensor):
            taken[name] = copied(to_bits(tensor), spare.get(name))
            continue
        copies = new_copies() if copies is None else copies
        copies.start(name, tensor, spare.get(name))
    if copies is not None:
        taken.update(copies.wait())
    return taken


def views(tensors: Mapping[str, Any]) -> Bits:
    """Bits of host tensors by name, sharing memory with them where their layout allows."""
    return {name: to_bits(tensor) for name, tensor in tensors.items()}


def on_device(tensor: Any) -> bool:
    """Whether a tensor's values lie outside host memory, so that reading them is a copy."""
    device = getattr(tensor, "device", None)
    return getattr(device, "type", device) not in (None, "cpu")


def copied(bits: TensorBits, spare: TensorBits | None) -> TensorBits:
    """A copy of `bits`, in the memory of `spare` if it fits."""
    data = _reusable(spare, bits.data.nbytes)
    if data is None:
        data = np.array(bits.data)
    else:
        np.copyto(data, bits.data)
    return TensorBits(dtype=bits.dtype, shape=bits.shape, data=data)


def _reusable(spare: TensorBits | None, size: int) -> NDArray[np.uint8] | None:
    """The memory of `spare`, if it holds exactly `size` bytes and may be written."""
    if spare is None or spare.data.nbytes != size or not spare.data.flags.writeable:
        return None
    return spare.data
