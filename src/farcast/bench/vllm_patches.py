"""Loaded in vLLM's workers by the benchmark: vLLM's own sparse loader, to compare with."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from farcast.engines.vllm_plugin.residents import resident_of
from farcast.engines.vllm_plugin.worker import FarcastWorker
from farcast.engines.words_file import Change, read_words


class PatchWorker(FarcastWorker):
    """farcast's extension, and two calls that change the weights in vLLM's own way."""

    def bench_patches(self, words: str) -> dict[str, Any]:
        """Apply a file of words; returns the seconds that applying took."""
        return self._load(words, new=True)

    def bench_unpatch(self, words: str) -> dict[str, Any]:
        """Apply the old words of that file again."""
        return self._load(words, new=False)

    def _load(self, words: str, *, new: bool) -> dict[str, Any]:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.checkpoint_weight_patch import (
            CheckpointWeightPatch,
            load_checkpoint_weight_patches,
        )

        worker: Any = self
        model = worker.model_runner.get_model()
        shapes = resident_of(model).places
        path = Path(words)
        digest = blake3(path.read_bytes()).hexdigest()
        patches = [
            CheckpointWeightPatch(
                name=change.name,
                shape=shapes[change.name].shape,
                dtype=torch.bfloat16,
                values=_values(change, new=new),
                indices=torch.from_numpy(change.positions.astype(np.int64)),
            )
            for change in read_words(path, digest)
        ]
        began = time.perf_counter()
        with set_current_vllm_config(worker.vllm_config):
            load_checkpoint_weight_patches(model, patches)
        return {"seconds": time.perf_counter() - began}


def _values(change: Change, *, new: bool) -> torch.Tensor:
    words = change.new if new else change.old
    return torch.from_numpy(words.view(np.int16).copy()).view(torch.bfloat16)
