"""Optimizers as directions: what a step of rate 1 takes off each master, given the gradients.

The rate only scales it, so one pass over recorded gradients serves every rate. Without weight
decay, as the trainer's default is.

    adamw   bias-corrected m / (sqrt(v) + eps), Loshchilov and Hutter (arXiv:1711.05101)
    muon    Newton-Schulz of Nesterov momentum, Jordan et al. 2024; for matrices of hidden layers,
            AdamW for the rest. torch computes it in bf16; here it is float32, since processors
            without bf16 instructions need ten times as long for it
    sgd     momentum 0.9, as `torch.optim.SGD`
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Literal

import torch

from farcast.config import TrainConfig

OptimizerKind = Literal["adamw", "muon", "muon_unscaled", "sgd"]
OPTIMIZERS: tuple[OptimizerKind, ...] = ("adamw", "muon", "muon_unscaled", "sgd")

EPSILON = 1e-8
SGD_MOMENTUM = 0.9
_NS_STEPS = 5
_NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NS_EPSILON = 1e-7

Tensors = dict[str, torch.Tensor]
Rule = Callable[[str, torch.Tensor], torch.Tensor]


def directions_of(kind: OptimizerKind, config: TrainConfig, hidden: Collection[str]) -> Rule:
    """A function that takes each tensor's name and next gradient, in order of steps, and gives the
    direction. Of both scales of Muon it gives the RMS-matched; see `scale_of`."""
    adamw = _AdamW(config.beta1, config.beta2)
    if kind == "adamw":
        return adamw
    if kind == "sgd":
        return _Momentum()
    muon = _Muon(config.muon_momentum)
    return lambda name, gradient: (muon if name in hidden else adamw)(name, gradient)


def scale_of(kind: OptimizerKind, name: str, shape: torch.Size, hidden: Collection[str]) -> float:
    """What a direction is multiplied by: Muon's own scale, sqrt(max(1, rows / columns)), is smaller
    than the one that matches AdamW's RMS, 0.2 sqrt(max(rows, columns))."""
    if kind != "muon_unscaled" or name not in hidden:
        return 1.0
    rows, columns = shape
    return math.sqrt(max(1.0, rows / columns)) / (0.2 * math.sqrt(max(rows, columns)))


class _AdamW:
    def __init__(self, beta1: float, beta2: float) -> None:
        self._betas = (beta1, beta2)
        self._state: dict[str, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def __call__(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros_like
        first, second, steps = self._state.get(name) or (zeros(gradient), zeros(gradient), 0)
        beta1, beta2 = self._betas
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        self._state[name] = (first, second, steps + 1)
        return adamw_direction(first, second, steps + 1, self._betas)


def adamw_direction(
    first: torch.Tensor, second: torch.Tensor, steps: int, betas: tuple[float, float]
) -> torch.Tensor:
    """From AdamW's moments after `steps` steps."""
    beta1, beta2 = betas
    root = (second / (1 - beta2**steps)).sqrt_().add_(EPSILON)
    return (first / (1 - beta1**steps)).div_(root)


class _Muon:
    def __init__(self, momentum: float) -> None:
        self._momentum = momentum
        self._buffers: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.setdefault(name, torch.zeros_like(gradient))
        buffer.lerp_(gradient, 1 - self._momentum)
        update = gradient.lerp(buffer, self._momentum)
        return orthogonal(update).mul_(0.2 * math.sqrt(max(update.shape)))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Nearly the orthogonal factor of a matrix, by five quintic Newton-Schulz steps."""
    a, b, c = _NS_COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=_NS_EPSILON)
    for _ in range(_NS_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).contiguous()


class _Momentum:
    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        held = self._buffers.get(name)
        if held is None:
            self._buffers[name] = gradient.clone()
        else:
            held.mul_(SGD_MOMENTUM).add_(gradient)
        return self._buffers[name].clone()


def rates(lr: float, warmup: int, step: int) -> float:
    """The rate of a step, from 1, under linear warm-up, as the trainer's optimizer has it."""
    return lr * (min(1.0, step / warmup) if warmup else 1.0)


def kind_of(name: str, tensor: torch.Tensor) -> str:
    """embedding, norm, attention or mlp."""
    if tensor.ndim != 2:
        return "norm"
    if "embed" in name or "lm_head" in name or "wte" in name:
        return "embedding"
    return "attention" if "attn" in name or "attention" in name else "mlp"


def layer_of(name: str) -> int | None:
    """The first number in a tensor's path."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def sorted_layers(names: Mapping[str, object]) -> list[int]:
    """Numbers of the layers that the names are of."""
    return sorted({layer for name in names if (layer := layer_of(name)) is not None})
