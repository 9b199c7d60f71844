"""What `/collective_rpc` can call in each of vLLM's worker processes.

Arguments and answers are JSON texts. An error of farcast's own comes back as an answer too,
with its class, so that the sidecar can tell a refusal from a crash.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from farcast.delta import TensorBits, from_bits
from farcast.engines.http_engine import Whole
from farcast.engines.vllm_plugin.resident import Load, Resident
from farcast.engines.vllm_plugin.residents import make_resident
from farcast.errors import FarcastError
from farcast.replica import Place


class FarcastWorker:
    """Mixed into vLLM's worker class; only names that start with `farcast_` are added."""

    def farcast_attach(self, places: str) -> Any:
        def attach(resident: Resident) -> Any:
            from vllm.config import set_current_vllm_config

            wanted = msgspec.json.decode(places, type=dict[str, Place])
            worker: Any = self
            with set_current_vllm_config(worker.vllm_config):
                dtypes = {place.dtype for place in wanted.values()}
                return resident.attach(wanted, {name: _torch_dtype(name) for name in dtypes})

        return self._farcast(attach)

    def farcast_stage(self, words: str, digest: str, label: str, whole: str) -> Any:
        rest = msgspec.json.decode(whole, type=Whole | None)
        return self._farcast(
            lambda resident: resident.begin_stage(Path(words), digest, label, rest)
        )

    def farcast_stage_state(self, label: str) -> Any:
        return self._farcast(lambda resident: resident.stage_state(label))

    def farcast_failure(self) -> Any:
        return self._farcast(lambda resident: resident.raise_failure())

    def farcast_undo(self, label: str) -> Any:
        return self._farcast(lambda resident: resident.undo(label))

    def farcast_drop(self, label: str) -> Any:
        return self._farcast(lambda resident: resident.drop(label))

    def farcast_receipt(self, names: str) -> Any:
        wanted = msgspec.json.decode(names, type=list[str])
        return self._farcast(lambda resident: resident.receipt(wanted))

    def _farcast(self, call: Callable[[Resident], Any]) -> dict[str, Any]:
        worker: Any = self
        member = int(worker.rank)
        try:
            model = worker.model_runner.get_model()
            resident = make_resident(model, member, loader_of(model, worker.vllm_config))
            answer = call(resident)
        except FarcastError as error:
            return {"member": member, "error": type(error).__name__, "message": str(error)}
        return {"member": member, "answer": msgspec.to_builtins(answer)}


def loader_of(model: Any, config: Any) -> Load:
    """vLLM's own way of loading whole tensors again: layer by layer, packed as at the start. What
    it is not given stays; a layer of which it is given a part needs all of it."""

    def load(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import reload

        with set_current_vllm_config(config), torch.no_grad():
            reload.initialize_layerwise_reload(model)
            model.load_weights(tensors)
            reload.finalize_layerwise_reload(model, config.model_config)

    return load


def _torch_dtype(name: str) -> torch.dtype:
    """torch's dtype for one that safetensors names."""
    empty = TensorBits(name, (0,), np.empty(0, np.uint8))
    dtype: torch.dtype = from_bits(empty, like=torch.empty(0)).dtype
    return dtype
