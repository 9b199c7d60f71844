"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): y = W x + (alpha / rank) B A x.

Only A [rank, in] and B [out, rank] train; W keeps its bits for the whole run. Two ways to publish:

    merged_tensors    W + (alpha / rank) B A under W's own name, so a replica needs to know nothing
    adapter_tensors   A and B alone, under PEFT's names, for replicas that hold W and adapters

Both make new tensors. Merging into W and taking it out again would not give W back (rounding), so
it is never done. Layers of PEFT are understood too, told by what they have. Refuses quantised
base weights, whose merged form is not theirs to decide.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from farcast.config import LoraConfig
from farcast.errors import ConfigError
from farcast.formats import served_bf16

PEFT_PREFIX = "base_model.model."


class LoraLinear(torch.nn.Module):  # type: ignore[misc]
    """A linear layer with an adapter beside it; its attributes are called as PEFT calls them."""

    def __init__(
        self, base: torch.nn.Linear, rank: int, alpha: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        weight = base.weight
        self.lora_A = torch.nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = torch.nn.Linear(rank, base.out_features, bias=False)
        self.lora_A.weight = torch.nn.Parameter(torch.empty(rank, base.in_features))
        torch.nn.init.kaiming_uniform_(self.lora_A.weight, math.sqrt(5), generator=generator)
        self.lora_B.weight = torch.nn.Parameter(torch.zeros(base.out_features, rank))
        self.lora_A.to(weight.device, weight.dtype)
        self.lora_B.to(weight.device, weight.dtype)
        self.scaling = alpha / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]"""
        return self.base_layer(x) + self.scaling * self.lora_B(self.lora_A(x))


class _Adapter(NamedTuple):
    """The active adapter of one layer."""

    down: torch.Tensor
    up: torch.Tensor
    scaling: float


def add_lora(module: Any, config: LoraConfig, *, seed: int) -> Any:
    """Freeze `module` and put adapters beside its linear layers whose name's last part is one of
    `config.targets`; in place. B is zero, so the module computes what it did before."""
    module.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    found = [
        (name, layer)
        for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear) and name.rpartition(".")[2] in config.targets
    ]
    if not found:
        raise ConfigError(
            f"No linear layer is called {' or '.join(config.targets)}; "
            "name some of the model's own in lora.targets."
        )
    for name, layer in found:
        parent, _, last = name.rpartition(".")
        adapted = LoraLinear(layer, config.rank, config.alpha, generator)
        setattr(module.get_submodule(parent), last, adapted)
    return module


def has_lora(module: Any) -> bool:
    """Whether some layer has an adapter."""
    return any(True for _ in _layers(module))


def merged_tensors(module: Any) -> dict[str, torch.Tensor]:
    """The served parameters by the names they have without adapters, in bf16; adapters are in
    their layer's weight."""
    return {name: served_bf16(tensor) for name, tensor in merged_masters(module).items()}


def merged_masters(module: Any) -> dict[str, torch.Tensor]:
    """The same before it is rounded: what was merged in float32, the others as they are."""
    layers = dict(_layers(module))
    _refuse_copies(module)
    out: dict[str, torch.Tensor] = {}
    for name, param in module.named_parameters():
        owner, _, rest = name.rpartition(".base_layer.")
        if owner in layers:
            plain = f"{owner}.{rest}"
            out[_unwrapped(plain)] = (
                _merged(param, layers[owner]) if rest == "weight" else param.detach()
            )
        elif not _is_adapter(name, layers):
            out[_unwrapped(name)] = param.detach()
    return out


def adapter_tensors(module: Any) -> dict[str, torch.Tensor]:
    """The active adapters alone, in bf16, called as in PEFT's `adapter_model.safetensors`."""
    out: dict[str, torch.Tensor] = {}
    for name, adapter in _layers(module):
        base = f"{PEFT_PREFIX}{_unwrapped(name)}"
        out[f"{base}.lora_A.weight"] = served_bf16(adapter.down)
        out[f"{base}.lora_B.weight"] = served_bf16(adapter.up)
    return out


def _merged(weight: torch.Tensor, adapter: _Adapter) -> torch.Tensor:
    """A new float32 tensor; `weight` is only read."""
    if not weight.is_floating_point():
        raise ConfigError(
            "A quantised base weight cannot be merged with its adapter; publish the adapters."
        )
    with torch.no_grad():
        change = adapter.up.float() @ adapter.down.float()
        return weight.float() + adapter.scaling * change


def _layers(module: Any) -> Iterator[tuple[str, _Adapter]]:
    for name, layer in module.named_modules():
        if all(hasattr(layer, part) for part in ("base_layer", "lora_A", "lora_B", "scaling")):
            adapter = _adapter(name, layer)
            if adapter is not None:
                yield name, adapter


def _adapter(name: str, layer: Any) -> _Adapter | None:
    """PEFT keeps several by name, of which some are active."""
    if not isinstance(layer.lora_A, torch.nn.ModuleDict):
        return _Adapter(layer.lora_A.weight, layer.lora_B.weight, layer.scaling)
    if getattr(layer, "merged", False):
        raise ConfigError(
            f"The adapter of {name[:80]!r} is merged into its base weight; unmerge it first: "
            "what is published would hold it twice."
        )
    active = [key for key in layer.active_adapters if key in layer.lora_A]
    if len(active) > 1:
        raise ConfigError(f"The layer {name[:80]!r} has several active adapters; activate one.")
    if not active:
        return None
    key = active[0]
    return _Adapter(layer.lora_A[key].weight, layer.lora_B[key].weight, layer.scaling[key])


def _refuse_copies(module: Any) -> None:
    """PEFT's `modules_to_save` trains whole copies of layers, under names of its own."""
    copied = [name for name, _ in module.named_parameters() if ".modules_to_save." in name]
    if copied:
        raise ConfigError(
            f"The parameter {copied[0][:80]!r} is a trained copy of a whole layer; "
            "leave modules_to_save out, or publish adapters."
        )


def _is_adapter(name: str, layers: dict[str, _Adapter]) -> bool:
    for part in (".lora_A.", ".lora_B."):
        owner, found, _ = name.rpartition(part)
        if found and owner in layers:
            return True
    return False


def _unwrapped(name: str) -> str:
    return name.removeprefix(PEFT_PREFIX)
