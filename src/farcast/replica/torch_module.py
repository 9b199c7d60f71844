"""`TorchModule`: a live `torch.nn.Module`, on any device, overwritten in place.

Parameters and persistent buffers keep their objects and addresses. Bits are read and written
through an integer view, so that no float is ever converted and autograd sees nothing. On the
CPU other threads see each element change as a whole; that they see all of them change at once
is the job of the engine's gate, around `commit`.

On an accelerator the gate must also have waited for the kernels that read the weights; writes
have ended when `commit` returns, since it reads the tensors back. Tensors on a CUDA device are
compared, changed and hashed there.

Refuses modules whose tensors are not plain memory of one process (meta, sparse, quantised,
sharded), and never creates, resizes or replaces a tensor.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from farcast.delta import AnyBits, device_bits, held_bits, to_bits
from farcast.delta.device import to_device, to_host
from farcast.errors import TargetError, TensorMismatchError
from farcast.formats import canonical_names
from farcast.replica.base import Check
from farcast.replica.live import LiveTarget, Place
from farcast.replica.words import Positions, Words

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Slot(NamedTuple):
    """One tensor of the module: its place, and the bytes of memory it lies in."""

    tensor: torch.Tensor
    place: Place
    storage: int
    start: int
    end: int

    def overlaps(self, other: "_Slot") -> bool:
        return self.storage == other.storage and self.start < other.end and other.start < self.end

    def is_same(self, other: "_Slot") -> bool:
        strides = self.tensor.stride() == other.tensor.stride()
        return strides and self.place == other.place and self[2:] == other[2:]

    def inside(self, other: "_Slot") -> bool:
        return self.storage == other.storage and other.start <= self.start and self.end <= other.end


class TorchModule(LiveTarget):
    """A module as a target.

    Names are the module's own, without those of wrappers (`torch.compile`, DDP, FSDP,
    activation checkpointing); `names` maps those that differ to the names in checkpoints.
    `allow_missing` and `allow_unexpected` list checkpoint names, see `LiveTarget`.
    `check="all"` reads every tensor back at each commit instead of those that changed.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        names: Mapping[str, str] | None = None,
        allow_missing: Iterable[str] = (),
        allow_unexpected: Iterable[str] = (),
        check: Check = "changed",
    ) -> None:
        super().__init__(
            allow_missing=allow_missing, allow_unexpected=allow_unexpected, check=check
        )
        self._module = module
        self._names = dict(names or {})
        self._survey()

    @property
    def module(self) -> torch.nn.Module:
        return self._module

    def read(self, name: str) -> AnyBits:
        slot = self._slots.get(name)
        if slot is None:
            raise TargetError(f"The module has no tensor {name[:80]!r}; map its name with `names`.")
        return held_bits(slot.tensor.detach())

    def place_of(self, name: str) -> AnyBits | None:
        return device_bits(self._slots[name].tensor.new_empty(0)) if self.holds(name) else None

    # --- holes -------------------------------------------------------------------------------

    def _places(self) -> Mapping[str, Place]:
        return {name: slot.place for name, slot in self._slots.items()}

    def holds(self, name: str) -> bool:
        return name in self._slots

    def _peek(self, name: str, positions: Positions | None) -> Words:
        integers = _integers(self._slots[name].tensor)
        if _on_host(integers):
            flat = _flat(integers.numpy())
            return _unsigned(np.array(flat[:] if positions is None else flat[positions]))
        if positions is None:
            return _unsigned(to_host(integers.reshape(-1)))
        return _unsigned(to_host(integers[_index(integers, positions)]))

    def _poke(self, name: str, positions: Positions | None, words: Words) -> None:
        integers = _integers(self._slots[name].tensor)
        if _on_host(integers):
            array = integers.numpy()
            _flat(array)[slice(None) if positions is None else positions] = words.view(array.dtype)
            return
        signed = words if words.dtype == np.uint8 else words.view(f"i{words.itemsize}")
        values = to_device(np.ascontiguousarray(signed), integers.device)
        if positions is None:
            integers.copy_(values.reshape(integers.shape))
        else:
            integers[_index(integers, positions)] = values

    def _memory(self, name: str) -> torch.Tensor:
        return _integers(self._slots[name].tensor)

    def _identity(self) -> object:
        """Objects and addresses: a parameter that was replaced would not see our writes."""
        return {
            name: (id(slot.tensor), slot.tensor.data_ptr(), slot.place)
            for name, slot in self._collect().items()
        }

    def _inside(self, name: str) -> Collection[str]:
        slot = self._slots[name]
        return [
            other
            for other in self._groups[slot.storage]
            if other != name and slot.start < slot.end and slot.inside(self._slots[other])
        ]

    def _tied(self, name: str) -> Collection[str]:
        slot = self._slots[name]
        return [
            other
            for other in self._groups[slot.storage]
            if other != name and slot.is_same(self._slots[other])
        ]

    def _sharing(self, names: Collection[str]) -> Collection[str]:
        held = [name for name in names if name in self._slots]
        return set(names) | {
            other
            for name in held
            for other in self._groups[self._slots[name].storage]
            if self._slots[name].overlaps(self._slots[other])
        }

    # --- inside ------------------------------------------------------------------------------

    def _survey(self) -> None:
        self._slots = self._collect()
        self._groups: dict[int, list[str]] = {}
        for name, slot in self._slots.items():
            self._groups.setdefault(slot.storage, []).append(name)

    def _collect(self) -> dict[str, _Slot]:
        tensors = dict(_tensors(self._module))
        slots: dict[str, _Slot] = {}
        for own, name in canonical_names(tensors).items():
            final = self._names.get(name, name)
            if final in slots:
                raise TensorMismatchError(
                    f"Two tensors of the module would be {final[:80]!r}; give them distinct names."
                )
            slots[final] = _slot(final, tensors[own])
        return slots


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What a checkpoint of the module holds; every name of a tied tensor is there."""
    state: Mapping[str, Any] = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):  # else a module's own extra state
            yield name, value


def _slot(name: str, tensor: torch.Tensor) -> _Slot:
    # A wrapper class (DTensor, packed quantised tensors) handles its operations itself.
    plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if not plain or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "meta" if tensor.is_meta else type(tensor).__name__
        raise TensorMismatchError(
            f"{name[:80]!r} is not a plain tensor ({kind}, {tensor.layout}) and can't be written "
            "in place; materialise the module on one device first."
        )
    dtype = to_bits(torch.empty(0, dtype=tensor.dtype)).dtype
    shape = tuple(tensor.shape)
    if dtype == "F4":  # torch counts packed pairs, checkpoints count elements
        shape = (*shape[:-1], shape[-1] * 2)
    storage = tensor.untyped_storage()
    start = tensor.storage_offset() * tensor.element_size()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    extent = (last + 1) * tensor.element_size() if tensor.numel() else 0
    return _Slot(
        tensor=tensor,
        place=Place(dtype, shape),
        storage=storage.data_ptr() if extent else 0,
        start=start,
        end=start + extent,
    )


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's own memory as words, in the same strides; C128 gets a last axis of two."""
    if tensor.element_size() > 8:
        tensor = torch.view_as_real(tensor)
    return tensor.detach().view(_INTEGERS[tensor.element_size()])


def _on_host(tensor: torch.Tensor) -> bool:
    return bool(tensor.device.type == "cpu")


def _flat(array: np.ndarray[Any, Any]) -> Any:
    """All elements in C order, writable in place whatever the strides."""
    return array.reshape(-1) if array.flags.c_contiguous else array.flat


def _unsigned(array: np.ndarray[Any, Any]) -> Words:
    words: Words = array.view(f"u{array.itemsize}")
    return words


def _index(integers: torch.Tensor, positions: Positions) -> tuple[torch.Tensor, ...]:
    """C-order positions as coordinates, so that strided tensors are reached too."""
    coordinates = np.unravel_index(positions, tuple(integers.shape))
    return tuple(to_device(axis, integers.device) for axis in coordinates)
