"""Loaded inside vLLM's workers: farcast's extension with faults that tests can ask for.

With `{"farcast": {"pack_linear": true}}` linear layers are packed on every CPU, in the way of
vLLM's CPU backend (which does it only where its kernels run): a copy is kept and the parameter
emptied.
"""

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers import utils

from farcast.engines.vllm_plugin.resident import Resident
from farcast.engines.vllm_plugin.residents import resident_of
from farcast.engines.vllm_plugin.worker import FarcastWorker
from farcast.errors import TargetError

_dispatch = utils.dispatch_cpu_unquantized_gemm


def _pack(layer: Any, remove_weight: bool) -> None:
    _dispatch(layer, remove_weight)
    own = (get_current_vllm_config().additional_config or {}).get("farcast", {})
    if remove_weight and own.get("pack_linear") and layer.weight.numel():
        packed = layer.weight.detach().t().contiguous()
        layer.cpu_linear = lambda x, _, bias: torch.nn.functional.linear(x, packed.t(), bias)
        empty = torch.empty(0, dtype=layer.weight.dtype)
        layer.weight = torch.nn.Parameter(empty, requires_grad=False)


utils.dispatch_cpu_unquantized_gemm = _pack


class FaultyWorker(FarcastWorker):
    def farcast_test_fail(self, write: str, member: str = "0") -> None:
        """The write of that number fails in that member, once."""
        worker: Any = self
        if worker.rank != int(member):
            return
        resident = self._resident()
        left = [int(write)]
        original = resident._exchange

        def exchange(change: Any) -> None:
            if left[0] == 0:
                resident._exchange = original  # type: ignore[method-assign]
                raise TargetError("A fault that a test asked for.")
            left[0] -= 1
            original(change)

        resident._exchange = exchange  # type: ignore[method-assign]

    def farcast_test_fail_load(self, _: str) -> None:
        """The next load of whole tensors is done and fails then."""
        resident = self._resident()
        original = resident._load

        def load(tensors: Any) -> None:
            resident._load = original
            original(tensors)
            raise TargetError("A fault that a test asked for.")

        resident._load = load

    def farcast_test_flip(self, name: str, position: str) -> None:
        """Somebody else changes one word of a live tensor; the same call changes it back."""
        resident = self._resident()
        traced = resident._trace
        assert traced is not None
        block = traced.blocks[name][0]
        traced.memories[block.memory][block.place + int(position)] ^= 2

    def farcast_test_ignore_writes(self, on: str) -> None:
        """A worker that says yes and does nothing."""
        resident = self._resident()
        if on == "on":
            resident._exchange = lambda _: None  # type: ignore[method-assign]
        else:
            del resident.__dict__["_exchange"]

    def _resident(self) -> Resident:
        worker: Any = self
        return resident_of(worker.model_runner.get_model())
