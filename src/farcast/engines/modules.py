"""Modules to compute with: which dtype, and from which folder.

The *served* tensors are bf16 wherever the run is. What a processor computes with is its own
affair: a CPU without bf16 instructions is 8 times slower in bf16 than in float32, so there a
module holds the served bf16 values widened to float32, which loses nothing and can be undone.
"""

from pathlib import Path
from typing import Any

import torch

from farcast.errors import ConfigError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


def compute_dtype(device: str = "cpu") -> torch.dtype:
    """bf16 on accelerators, float32 on CPUs."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def check_folder(folder: Path) -> None:
    """Raise `ConfigError` unless this is a Hugging Face folder with weights and tokenizer."""
    if not folder.is_dir():
        raise ConfigError(
            f"There is no model folder {folder}; name a local Hugging Face folder, "
            "or smollm2, or tiny."
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json; name a whole Hugging Face model folder.")
    if not any(next(folder.glob(pattern), None) for pattern in WEIGHT_FILES):
        raise ConfigError(f"{folder} has no *.safetensors; farcast reads no other weights.")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"{folder} has no tokenizer.json; save the model's tokenizer there too.")


def load_module(folder: Path, device: str = "cpu") -> Any:
    """The causal language model of a folder, with its weights rounded to bf16 (what is served)
    and held in this device's compute dtype."""
    from transformers import AutoModelForCausalLM

    check_folder(folder)
    try:
        module, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"The model in {folder} cannot be loaded ({type(error).__name__}); "
            "check that transformers loads it and that its files are whole."
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would leave them at random
        raise ConfigError(
            f"The files in {folder} lack {len(missing)} weights of the model (for one, "
            f"{missing[0][:80]!r}); copy the whole model there."
        )
    return module.to(device=device, dtype=compute_dtype(device))


def empty_module(folder: Path, device: str = "cpu") -> Any:
    """The model that a folder's config.json describes, with arbitrary weights: they come as a
    version. The global random state is left alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.random.fork_rng(devices=[]):
            module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"No model can be built from {folder} ({type(error).__name__}); "
            "the run's config.json must be of a causal language model that transformers knows."
        ) from error
    return module.to(device=device, dtype=compute_dtype(device))
