"""Making the transfer engine known to vLLM, and keeping CPU weights where they can be written.

vLLM's interface for weight transfer has changed several times; what is needed is looked for
here, once, and a version that lacks it is named in the log instead of failing later.
"""

import inspect
import logging
from typing import Any

import torch

_LOG = logging.getLogger(__name__)

_NEEDED = ("init_transfer_engine", "start_weight_update", "receive_weights", "finish_weight_update")


def register(backend: str) -> None:
    """Register under `backend`; in a vLLM that cannot do it, say so and leave it as it is."""
    try:
        from vllm.distributed.weight_transfer import (
            WeightTransferEngine,
            WeightTransferEngineFactory,
        )
    except ImportError:
        _LOG.warning("This vLLM has no weight transfer engines; farcast needs 0.28 or newer.")
        return
    missing = [name for name in _NEEDED if not hasattr(WeightTransferEngine, name)]
    if missing or "model" not in inspect.signature(WeightTransferEngine.__init__).parameters:
        _LOG.warning(
            "The weight transfer interface of this vLLM lacks %s; farcast needs 0.28 or newer.",
            ", ".join(missing) or "the model",
        )
        return
    try:
        WeightTransferEngineFactory.register_engine(
            backend, "farcast.engines.vllm_plugin.transfer", "FarcastTransfer"
        )
    except ValueError:  # registered before: vLLM may load plug-ins twice in one process
        return
    _keep_cpu_weights(backend)


def _keep_cpu_weights(backend: str) -> None:
    """On CPUs, compute from the parameters themselves if `backend` is in use.

    vLLM's CPU backend packs the weights of linear layers for its kernels, empties the parameters
    and keeps a packed copy of a tied head that no write to the parameter reaches. In place
    there is then nothing to write to. Batches of 16 cost about a sixth of their speed.
    """
    from vllm.model_executor.layers import utils

    original = getattr(utils, "dispatch_cpu_unquantized_gemm", None)
    if original is None:
        return

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if _is_kept(backend, remove_weight):
            layer.cpu_linear = torch.nn.functional.linear
        else:
            original(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = dispatch


def _is_kept(backend: str, remove_weight: bool) -> bool:
    """Whether this layer computes from its parameter. With `{"farcast": {"pack_linear": true}}` in
    vLLM's additional configuration those are packed whose parameter vLLM empties: they are
    loaded whole then, and only copies beside a parameter must never be."""
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config()
    transfer = getattr(config, "weight_transfer_config", None)
    if getattr(transfer, "backend", None) != backend:
        return False
    own = (getattr(config, "additional_config", None) or {}).get("farcast", {})
    return not (remove_weight and own.get("pack_linear", False))
