"""Learning from a model's own loader where checkpoint tensors lie in its memory.

The loader is run once with tensors that have a shape but no data. Every copy it would make is
caught: the two views that take part in it, as offset and strides, are the map. So there is no
table of models here; whatever a model's `load_weights` does with slices is understood, and what
it does otherwise (converting, packing, computing) is reported as opaque with the reason.

Nothing is written: copies and fills into the model are caught, not done.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from farcast.engines.blocks import Block, block_of
from farcast.replica import Place

_COPY = torch.ops.aten.copy_.default


class Trace(NamedTuple):
    """What the loader does with each tensor; `memories` are the model's storages, as flat words."""

    memories: list[torch.Tensor]
    blocks: dict[str, tuple[Block, ...]]
    opaque: dict[str, str]
    skipped: tuple[str, ...]


class _Recorder(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
    """Catches what would change the model. `sources` are the tensors that are loaded, by the
    identity of their storage."""

    def __init__(self, memories: Mapping[int, int], sources: Mapping[int, str]) -> None:
        super().__init__()
        self._memories = memories
        self._sources = sources
        self.loading = ""
        self.blocks: dict[str, list[Block]] = {}
        self.opaque: dict[str, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # the signature is torch's
        target = args[0] if args and isinstance(args[0], torch.Tensor) else None
        mutates = func._schema.is_mutable
        if not mutates or target is None or target.is_meta:
            return func(*args, **(kwargs or {}))
        memory = self._memories.get(target.untyped_storage().data_ptr())
        if memory is None:
            return func(*args, **(kwargs or {}))
        if func is _COPY:
            self._record(memory, target, args[1])
        return target

    def _record(self, memory: int, target: torch.Tensor, source: torch.Tensor) -> None:
        name = self._sources.get(source.untyped_storage()._cdata) if source.is_meta else None
        if name is None:
            self.opaque[self.loading] = "its loader computes what it stores"
            return
        if source.dtype != target.dtype:
            self.opaque[name] = f"it is converted from {source.dtype} to {target.dtype}"
            return
        sizes = torch.broadcast_shapes(source.shape, target.shape)
        block = block_of(
            memory,
            sizes,
            (source.storage_offset(), source.expand(sizes).stride()),
            (target.storage_offset(), target.stride()),
        )
        if block is None:
            self.opaque[name] = "one element of it is written to several places by one copy"
        else:
            self.blocks.setdefault(name, []).append(block)


def trace(model: Any, places: Mapping[str, Place], dtypes: Mapping[str, torch.dtype]) -> Trace:
    """Run `model.load_weights` over tensors like `places`. A tensor that the loader refuses is
    opaque, with the loader's own words. `dtypes` are torch's for the names in `places`."""
    memories, by_address = _memories(model)
    shells = {
        name: torch.empty(_torch_shape(place), dtype=dtypes[place.dtype], device="meta")
        for name, place in places.items()
    }
    names = {shell.untyped_storage()._cdata: name for name, shell in shells.items()}
    recorder = _Recorder(by_address, names)
    with torch.no_grad(), recorder:
        for name, shell in shells.items():
            recorder.loading = name
            try:
                model.load_weights([(name, shell)])
            except Exception as error:  # noqa: BLE001 - loaders raise whatever they like
                recorder.opaque[name] = f"its loader said {type(error).__name__}: {error}"[:200]
    return _finished(memories, places, recorder)


def _finished(
    memories: list[torch.Tensor], places: Mapping[str, Place], recorder: _Recorder
) -> Trace:
    opaque = dict(recorder.opaque)
    for name in list(recorder.blocks):
        if name in opaque:
            del recorder.blocks[name]
    skipped = [name for name in places if name not in recorder.blocks and name not in opaque]
    blocks = {name: tuple(found) for name, found in recorder.blocks.items()}
    return Trace(memories, blocks, opaque, tuple(skipped))


def _memories(model: Any) -> tuple[list[torch.Tensor], dict[int, int]]:
    """Every storage of the model's parameters and buffers, once, as flat words."""
    flat: list[torch.Tensor] = []
    numbers: dict[int, int] = {}
    for tensor in _tensors(model):
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in numbers:
            numbers[storage.data_ptr()] = len(flat)
            flat.append(_words(tensor))
    return flat, numbers


def _tensors(model: Any) -> Iterator[torch.Tensor]:
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.layout == torch.strided and not tensor.is_meta and tensor.element_size() <= 8:
            yield tensor.data


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _words(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    integer = _INTEGERS[tensor.element_size()]
    whole = torch.empty(0, dtype=integer, device=tensor.device)
    return whole.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))


def _torch_shape(place: Place) -> Sequence[int]:
    if place.dtype == "F4":  # torch counts packed pairs
        return (*place.shape[:-1], place.shape[-1] // 2)
    return place.shape
