"""A policy whose parameters are DTensors, sharded over ranks by FSDP2; what differs from plain
tensors stands here. Gathers nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def shard(module: Any) -> Any:
    """Shard a causal language model over all ranks by rows, layer by layer; in place."""
    from torch.distributed.fsdp import fully_shard

    for name, part in list(module.named_modules()):
        if isinstance(part, torch.nn.ModuleList) and not _inside_list(module, name):
            for layer in part:
                fully_shard(layer)
    fully_shard(module)
    return module


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this rank holds only a part of it."""
    return isinstance(tensor, DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_like(master: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """`part`, this rank's rows, as a tensor sharded like `master`; a plain one for a plain one, and
    for a scalar such as a step count."""
    if not isinstance(master, DTensor) or part.shape != local(master).shape:
        return part
    return DTensor.from_local(
        part,
        master.device_mesh,
        master.placements,
        run_check=False,
        shape=master.shape,
        stride=master.stride(),
    )


def average_plain(grads: Sequence[torch.Tensor | None]) -> None:
    """Average over ranks the gradients that FSDP does not: those of plain parameters beside
    sharded ones."""
    for grad in grads:
        if grad is not None and not is_sharded(grad):
            dist.all_reduce(grad)
            grad /= dist.get_world_size()


def clip_gradients(masters: Sequence[torch.Tensor], limit: float) -> float:
    """Scale all gradients so that their norm is at most `limit`; returns the norm before.

    Of sharded ones each rank adds up its rows' squares, and one sum of numbers is shared.
    """
    grads = [m.grad for m in masters if m.grad is not None]
    shards = [grad for grad in grads if is_sharded(grad)]
    if not shards:
        return float(torch.nn.utils.clip_grad_norm_(masters, limit))
    squares = torch.stack([local(grad).square().sum() for grad in shards]).sum()
    dist.all_reduce(squares, group=shards[0].device_mesh.get_group())
    plain = [grad.square().sum() for grad in grads if not is_sharded(grad)]
    norm = torch.stack([squares, *plain]).sum().sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        local(grad).mul_(scale)
    return float(norm)


def _inside_list(module: Any, name: str) -> bool:
    """Whether a module list stands in another one, whose layers are sharded whole."""
    parents = name.split(".")[:-1]
    paths = [".".join(parents[: i + 1]) for i in range(len(parents))]
    return any(isinstance(module.get_submodule(path), torch.nn.ModuleList) for path in paths)
