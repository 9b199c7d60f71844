"""The policy that is trained: a compute module, fp32 masters behind it, an optimizer over those.

The module holds exactly the served values, bf16 rounded from the masters, widened to what this
device computes with. So the trainer's forward pass uses the weights that replicas serve, and
what is published is read from the module itself.
"""

from collections.abc import Mapping
from typing import Any

import torch

from farcast.config import TrainConfig
from farcast.delta import entry_of, root_of, to_bits
from farcast.errors import FormatError
from farcast.formats import canonical_names, served_bf16
from farcast.train.lora import has_lora, merged_masters, merged_tensors
from farcast.train.optimizers import STATE_KEYS, Optimizer, hidden_matrices
from farcast.train.packing import Pack
from farcast.train.sharding import (
    average_plain,
    clip_gradients,
    is_sharded,
    local,
    placed_like,
)
from farcast.trajectory import Trajectory

MAX_REWARD = 1e15
"""Its square is far inside float32."""


class Policy:
    """`module` is changed in place by `step`; its parameters are the served values. Parameters
    that need no gradient keep their bits; adapters are served merged."""

    def __init__(self, module: Any, config: TrainConfig) -> None:
        self._module = module
        self._config = config
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._names = [canonical_names(named)[name] for name in named]
        self._params: list[torch.nn.Parameter] = list(named.values())
        self._buffers = _persistent_buffers(module)
        self._adapted = has_lora(module)
        self._sharded = any(is_sharded(param) for param in self._params)
        self._masters = [
            p.detach().to(torch.float32, copy=True).requires_grad_() for p in self._params
        ]
        hidden = hidden_matrices(module)
        self._optimizer = Optimizer(self._masters, [name in hidden for name in named], config)
        self._refresh()
        module.eval()  # no dropout: the log-probs must be those of the sampler
        self._vocabulary = int(module.get_input_embeddings().weight.shape[0])
        text = module.config.get_text_config()
        self._longest: int | None = getattr(text, "max_position_embeddings", None)

    @property
    def module(self) -> Any:
        return self._module

    def fits(self, trajectory: Trajectory) -> bool:
        """Whether this model can compute with it: it knows the token ids, has a place for each,
        and the reward is no number whose square is not finite. A worker with another model, or
        with a bug, must not bring down the trainer."""
        if self._longest is not None and len(trajectory.token_ids) > self._longest:
            return False
        return max(trajectory.token_ids) < self._vocabulary and abs(trajectory.reward) <= MAX_REWARD

    def logprobs(self, pack: Pack) -> torch.Tensor:
        """Log-probs [N] of the pack's targets at the temperature they were sampled with, and a
        graph behind them. A top_p below 1 is not repeated: the ratio then measures against the
        whole distribution, as is usual."""
        param = self._params[0]
        hidden = torch.zeros(pack.visible.shape, dtype=param.dtype)
        hidden.masked_fill_(~pack.visible, torch.finfo(param.dtype).min)
        logits = self._module(
            input_ids=pack.token_ids[None].to(param.device),
            attention_mask=hidden[None, None].to(param.device),
            position_ids=pack.positions[None].to(param.device),
            logits_to_keep=pack.predictors.to(param.device),
            use_cache=False,
        ).logits[0]
        return _target_logprobs(logits.float() / pack.temperature, pack.targets.to(param.device))

    def step(self, step: int) -> float:
        """One optimizer step (number `step`, from 1) over the gradients gathered in the module;
        returns their norm before clipping. A gradient that is not finite changes nothing."""
        for master, param in zip(self._masters, self._params, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
            param.grad = None
        if self._sharded:
            average_plain([master.grad for master in self._masters])
        norm = clip_gradients(self._masters, self._config.grad_clip)
        if norm == norm and norm != float("inf"):
            self._optimizer.step(step)
        self._optimizer.zero_grad()
        self._refresh()
        return norm

    def served(self) -> dict[str, torch.Tensor]:
        """The served tensors by canonical name, bf16; fresh copies where the module is wider."""
        if self._adapted:
            served = merged_tensors(self._module)
        else:
            tensors = zip(self._names, self._params, strict=True)
            served = {name: served_bf16(param) for name, param in tensors}
        return served | {name: buffer.detach() for name, buffer in self._buffers.items()}

    def masters(self) -> dict[str, Any]:
        """The float32 weights that served formats are derived from, by canonical name; buffers as
        bits, which are served as they are."""
        if self._adapted:
            masters = merged_masters(self._module)
        else:
            pairs = zip(self._names, self._masters, strict=True)
            masters = {name: master.detach() for name, master in pairs}
        return masters | {name: to_bits(buffer) for name, buffer in self._buffers.items()}

    def state(self) -> dict[str, torch.Tensor]:
        """Masters and optimizer moments as flat names, for the checkpoint: of sharded ones, what
        this rank holds."""
        tensors: dict[str, torch.Tensor] = {}
        for name, master in zip(self._names, self._masters, strict=True):
            tensors[f"master/{name}"] = local(master.detach())
            for key, value in self._optimizer.state(master).items():
                tensors[f"{key}/{name}"] = local(value)
        return tensors

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `state` gave. Raises `FormatError` when it is of another model."""
        expected = {
            f"master/{name}": local(m).shape
            for name, m in zip(self._names, self._masters, strict=True)
        }
        wrong = [
            k for k, shape in expected.items() if k not in tensors or tensors[k].shape != shape
        ]
        if wrong:
            raise FormatError(
                f"The checkpoint does not fit this model (for one, {wrong[0][:80]!r}); "
                "resume with the model, and on as many ranks, as the run was started with."
            )
        with torch.no_grad():
            for name, master in zip(self._names, self._masters, strict=True):
                local(master).copy_(tensors[f"master/{name}"])
                keys = [key for key in STATE_KEYS if f"{key}/{name}" in tensors]
                state = {key: placed_like(master, tensors[f"{key}/{name}"]) for key in keys}
                self._optimizer.restore(master, state)
        self._refresh()

    def _refresh(self) -> None:
        with torch.no_grad():
            for master, param in zip(self._masters, self._params, strict=True):
                param.copy_(served_bf16(master))


def served_root(served: Mapping[str, torch.Tensor]) -> str:
    """The root of served tensors, computed from their own bits."""
    return root_of({name: entry_of(to_bits(tensor)) for name, tensor in served.items()})


def _target_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[N, V], [N] -> [N]"""
    picked = logits.gather(-1, targets[:, None])[:, 0]
    return picked - logits.logsumexp(dim=-1)


def _persistent_buffers(module: Any) -> dict[str, torch.Tensor]:
    """Buffers that a checkpoint holds; published as they are."""
    kept = module.state_dict(keep_vars=True)
    found = {name: b for name, b in module.named_buffers() if name in kept}
    names = canonical_names(found)
    return {names[name]: buffer for name, buffer in found.items()}
