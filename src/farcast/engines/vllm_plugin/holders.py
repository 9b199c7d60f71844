"""Which places of a model hold the memories that its weights were traced to.

Asked in every pause, so walking over the model is done once, and asking is a look into each place.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch


class _Holder(NamedTuple):
    """A parameter's or buffer's place in its module, and where its data and its storage began."""

    places: dict[str, torch.Tensor | None]
    name: str
    data: int
    storage: int


class Holders:
    """The places in `model` of the storages of `memories`."""

    def __init__(self, model: Any, memories: Sequence[torch.Tensor]) -> None:
        self._model = model
        self._storages = {memory.data_ptr() for memory in memories}
        self._holders = [holder for holder in _holders(model) if holder.storage in self._storages]
        self._modules = [
            (module._modules, name, child)
            for module in model.modules()
            for name, child in module._modules.items()
        ]

    def still_hold(self) -> bool:
        """Whether every memory is still a storage of the model's."""
        if all(places.get(name) is child for places, name, child in self._modules):
            held = {
                holder.storage
                for holder in self._holders
                if (tensor := holder.places.get(holder.name)) is not None
                and tensor.data_ptr() == holder.data
            }
            if held == self._storages:
                return True
        # Something is not where it was. It may have gone to another place of the model.
        return self._storages.issubset({holder.storage for holder in _holders(self._model)})


def _holders(model: Any) -> Iterator[_Holder]:
    for module in model.modules():
        for places in (module._parameters, module._buffers):
            for name, tensor in places.items():
                if tensor is not None and tensor.layout == torch.strided and not tensor.is_meta:
                    storage = tensor.untyped_storage().data_ptr()
                    yield _Holder(places, name, tensor.data_ptr(), storage)
