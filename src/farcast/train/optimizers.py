"""Optimizers over fp32 masters, behind one face: AdamW for everything, or Muon for the matrices
of hidden layers and AdamW for the rest.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) makes each matrix's update nearly
orthogonal. Its step is scaled by 0.2 sqrt(max(rows, columns)), which gives it the RMS of an AdamW
step (Moonlight, Liu et al. 2025, arXiv:2502.16982, section 2.2), so AdamW's learning rate and
weight decay serve both. Embeddings and output heads are matrices too, but of rows that are seldom
touched together: they stay with AdamW, as in both sources.

Refuses a checkpoint that another optimizer wrote.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from farcast.config import TrainConfig
from farcast.errors import FormatError, MissingDependencyError


class Optimizer:
    """Steps over `masters`; `hidden[i]` says that the i-th is a matrix of a hidden layer."""

    def __init__(
        self, masters: Sequence[torch.Tensor], hidden: Sequence[bool], config: TrainConfig
    ) -> None:
        self._config = config
        self._parts: list[torch.optim.Optimizer] = []
        self._owner: dict[torch.Tensor, torch.optim.Optimizer] = {}
        use_muon = config.optimizer == "muon"
        matrices = [m for m, inner in zip(masters, hidden, strict=True) if use_muon and inner]
        rest = [m for m, inner in zip(masters, hidden, strict=True) if not (use_muon and inner)]
        if matrices:
            self._add(_muon(matrices, config), matrices)
        if rest:
            self._add(_adamw(rest, config), rest)

    def step(self, step: int) -> None:
        """One step (number `step`, from 1) along the masters' gradients."""
        warmup = self._config.warmup_steps
        rate = self._config.learning_rate * (min(1.0, step / warmup) if warmup else 1.0)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def state(self, master: torch.Tensor) -> dict[str, torch.Tensor]:
        """What is remembered about one master, for the checkpoint; empty before its first step."""
        return dict(self._owner[master].state.get(master, {}))

    def restore(self, master: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        """Put back what `state` gave; nothing, if it gave nothing."""
        owner = self._owner[master]
        if not state:
            owner.state.pop(master, None)
            return
        if set(state) != _KEYS[type(owner).__name__]:
            raise FormatError(
                f"The checkpoint was written by another optimizer than {self._config.optimizer}; "
                "resume with the optimizer that the run was started with."
            )
        owner.state[master] = {key: value.clone() for key, value in state.items()}

    def _add(self, part: torch.optim.Optimizer, masters: Sequence[torch.Tensor]) -> None:
        self._parts.append(part)
        self._owner.update(dict.fromkeys(masters, part))


_KEYS = {"AdamW": {"step", "exp_avg", "exp_avg_sq"}, "Muon": {"momentum_buffer"}}
STATE_KEYS = frozenset[str]().union(*_KEYS.values())
"""Every key that some optimizer's state has."""


def hidden_matrices(module: Any) -> set[str]:
    """Names of the parameters that Muon is for: matrices that are neither an embedding nor the
    output head, under every name that a tied one has."""
    outer = [module.get_input_embeddings(), module.get_output_embeddings()]
    kept = {id(p) for part in outer if part is not None for p in part.parameters()}
    return {name for name, p in module.named_parameters() if p.ndim == 2 and id(p) not in kept}


def _adamw(masters: Sequence[torch.Tensor], config: TrainConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        masters,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
    )


def _muon(masters: Sequence[torch.Tensor], config: TrainConfig) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        raise MissingDependencyError(
            f"torch {torch.__version__} has no Muon; install torch 2.9 or newer, or train with "
            "the optimizer adamw."
        )
    return torch.optim.Muon(
        masters,
        lr=config.learning_rate,
        momentum=config.muon_momentum,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
