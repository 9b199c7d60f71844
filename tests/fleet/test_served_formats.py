"""A replica's folder in a quantised format is a checkpoint that stock engines load, and generates
what one generates that was loaded from a full checkpoint of the library that defines the format."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file

from farcast.cli.main import app
from farcast.cli.options import ReachOptions
from farcast.delta import to_bits
from farcast.errors import ConfigError
from farcast.fleet.assets import put_assets
from farcast.fleet.connecting import Reach
from farcast.fleet.replica_process import follow
from farcast.fleet.signals import StopRequest
from farcast.lineage import RunRecord
from farcast.publish import Publisher
from farcast.store import open_store
from farcast.store.archive import Archive
from version_world import RUN

sys.path.append(str(Path(__file__).parents[1] / "formats"))
from kept_libraries import compressed

FORMATS = ("bf16", "fp8_block", "fp8_channel", "int8", "int4_g32", "nvfp4", "mxfp4")
SCHEMES = {
    "fp8_channel": ("FP8_DYNAMIC", "float-quantized"),
    "int8": ("W8A8", "int-quantized"),
    "int4_g32": ("W4A16", "pack-quantized"),
    "nvfp4": ("NVFP4A16", "nvfp4-pack-quantized"),
    "mxfp4": ("MXFP4A16", "mxfp4-pack-quantized"),
}
PROMPT = torch.tensor([[3, 14, 15, 92, 65]])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small decoder in high precision, as a folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def masters(base: Path, step: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    return {
        name: tensor.float() + step * 0.01 * torch.randn(tensor.shape, generator=random)
        for name, tensor in sorted(load_file(base / "model.safetensors").items())
    }


@pytest.fixture(scope="module")
def url(base: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    url = (tmp_path_factory.mktemp("run") / "store").as_uri()
    archive = Archive(open_store(url), RUN)
    assets = put_assets(archive, base)
    archive.create_run(RunRecord(run_id=RUN, created="2026-01-01T00:00:00Z", assets=assets))
    with Publisher(open_store(url), RUN, formats=FORMATS) as publisher:
        for step in range(3):
            publisher.publish(masters(base, step), step)
    return url


def followed(url: str, folder: Path, served_format: str | None) -> Path:
    reach = Reach(store_url=url, served_format=served_format)
    follow(reach, folder, "r1", once=True, overwrite=False, stop=StopRequest())
    return folder


def full_checkpoint(base: Path, folder: Path, format_name: str) -> Path:
    """What a quantiser would have saved of the newest masters."""
    folder.mkdir()
    config = json.loads((base / "config.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in masters(base, 2).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor.bfloat16()
            continue
        for leaf, stored in compressed(format_name, tensor).items():
            if format_name == "fp8_block":
                leaf = leaf.replace("weight_scale", "weight_scale_inv")
            tensors[f"{name.removesuffix('weight')}{leaf}"] = stored
    if format_name == "fp8_block":
        from transformers import FineGrainedFP8Config

        skipped = ["lm_head"]
        config["quantization_config"] = FineGrainedFP8Config(
            modules_to_not_convert=skipped
        ).to_dict()
    else:
        config["quantization_config"] = scheme(format_name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def scheme(format_name: str) -> dict[str, Any]:
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    preset, container = SCHEMES[format_name]
    made = preset_name_to_scheme(preset, ["Linear"])
    if format_name == "int4_g32":
        made.weights.group_size = 32
    told = QuantizationConfig(
        config_groups={"group_0": made},
        format=container,
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    dumped: dict[str, Any] = told.model_dump(mode="json")
    return dumped | {"quant_method": "compressed-tensors"}


def generated(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens, and the logits of the prompt."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        tokens = model.generate(PROMPT, max_new_tokens=16, do_sample=False)
        return tokens, model(PROMPT).logits


@pytest.mark.parametrize("format_name", FORMATS[1:])
def test_a_followed_folder_generates_like_a_full_quantised_checkpoint(
    base: Path, url: str, tmp_path: Path, format_name: str
) -> None:
    replica = followed(url, tmp_path / "replica", format_name)
    full = full_checkpoint(base, tmp_path / "full", format_name)
    held, expected = (load_file(folder / "model.safetensors") for folder in (replica, full))
    if format_name == "nvfp4":  # its global scales are shared by what engines fuse
        held, expected = (
            {name: t for name, t in tensors.items() if "o_proj" in name or "down_proj" in name}
            for tensors in (held, expected)
        )
    assert held.keys() == expected.keys()
    assert all(to_bits(held[name]) == to_bits(expected[name]) for name in held)
    tokens, logits = generated(replica)
    if format_name != "nvfp4":
        tokens_full, logits_full = generated(full)
        assert torch.equal(tokens, tokens_full)
        assert torch.equal(logits, logits_full)
    _, exact = generated(followed(url, tmp_path / "bf16", None))
    assert not torch.equal(logits, exact)
    off = (logits - exact).float().norm() / exact.float().norm()
    assert float(off) < (0.5 if "8" in format_name else 0.9)


def test_inspect_and_plan_show_the_formats(url: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = typer.main.get_command(app)
    command(["inspect", "--store", url, "--json", str(out)], standalone_mode=False)
    lines = json.loads(out.read_text())["versions"]
    assert set(lines[2]["formats"]) == set(FORMATS)
    sizes = {}
    for name in ("bf16", "int4_g32"):
        told = ["plan", "--store", url, "--format", name, "--json", str(out)]
        command(told, standalone_mode=False)
        found = json.loads(out.read_text())
        assert found["want"]["root"] == lines[2]["formats"][name]
        sizes[name] = found["bytes_full"]
    assert sizes["int4_g32"] < sizes["bf16"] / 2


def test_a_folder_changes_its_format_when_told_and_keeps_it_over_a_restart(
    url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "replica"
    for served_format in ("int8", "int8", None, "fp8_block"):
        followed(url, folder, served_format)
        entry = json.loads((folder / "config.json").read_text()).get("quantization_config")
        names = load_file(folder / "model.safetensors").keys()
        assert (entry is None) == (served_format is None)
        assert any(name.endswith("_scale_inv") for name in names) == (served_format == "fp8_block")
    with pytest.raises(ConfigError, match="no served format"):
        ReachOptions(url, None, None, None, None, None, served_format="fp9").read()
