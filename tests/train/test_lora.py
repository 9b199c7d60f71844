"""Adapters: what is published is right, and publishing touches nothing (case 021)."""

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.models import tiny_module  # noqa: E402
from tests.train_world import RUN, TrainWorld, trajectory  # noqa: E402

from farcast import Publisher  # noqa: E402
from farcast.config import LoraConfig  # noqa: E402
from farcast.errors import ConfigError  # noqa: E402
from farcast.formats import served_bf16  # noqa: E402
from farcast.store import open_store  # noqa: E402
from farcast.store.archive import Archive  # noqa: E402
from farcast.train.lora import LoraLinear, adapter_tensors, add_lora, merged_tensors  # noqa: E402
from farcast.train.objectives import objective_of  # noqa: E402
from farcast.train.policy import Policy  # noqa: E402
from farcast.train.update import update  # noqa: E402
from farcast.types import VersionRef  # noqa: E402

CONFIG = LoraConfig(rank=4, targets=("q_proj", "up_proj"))
NAME = "model.layers.0.mlp.up_proj.weight"


def adapted(*, trained: bool = False) -> Any:
    module = add_lora(tiny_module(), CONFIG, seed=1)
    if trained:
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for layer in module.modules():
                if isinstance(layer, LoraLinear):
                    values = torch.randn(layer.lora_B.weight.shape, generator=generator)
                    layer.lora_B.weight.copy_(served_bf16(0.02 * values))
    return module


def bits(module: Any) -> dict[str, bytes]:
    return {n: p.detach().view(torch.uint8).numpy().tobytes() for n, p in module.named_parameters()}


def logits(module: Any) -> Any:
    with torch.no_grad():
        return module(input_ids=torch.arange(3, 20)[None]).logits


def test_fresh_adapters_change_nothing_and_only_they_train() -> None:
    plain, module = tiny_module(), adapted()
    assert torch.equal(logits(plain), logits(module))
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert trained
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    expected = {name: served_bf16(p) for name, p in plain.named_parameters()}
    merged = merged_tensors(module)
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], expected[name]) for name in expected)


def test_merged_tensors_compute_what_base_and_adapter_compute() -> None:
    module = adapted(trained=True)
    plain = tiny_module()
    with torch.no_grad():
        for name, tensor in merged_tensors(module).items():
            plain.get_parameter(name).copy_(tensor)
    assert not torch.allclose(logits(tiny_module()), logits(module), atol=1e-3)
    assert torch.allclose(logits(plain), logits(module), atol=5e-2)
    layer = module.get_submodule(NAME.removesuffix(".weight"))
    by_hand = layer.base_layer.weight + (16 / 4) * layer.lora_B.weight @ layer.lora_A.weight
    assert torch.equal(merged_tensors(module)[NAME], served_bf16(by_hand))


@pytest.mark.parametrize("tensors", [merged_tensors, adapter_tensors])
def test_case_021_fifty_publishes_leave_the_base_alone_and_are_empty(tensors: Any) -> None:
    """Case 021."""
    module = adapted(trained=True)
    before = bits(module)
    store = open_store("memory://")
    with Publisher(store, RUN, repeats=False, anchor_every=100) as publisher:
        for step in range(50):
            publisher.publish(tensors(module), step)
    assert bits(module) == before
    archive = Archive(store, RUN)
    for version in range(1, 50):
        (delta,) = archive.manifest(version).deltas
        assert delta.objects == ()
        assert archive.manifest(version).root == archive.manifest(0).root


def test_adapters_are_small_and_have_the_names_of_peft() -> None:
    module = adapted(trained=True)
    tensors = adapter_tensors(module)
    assert f"base_model.model.{NAME.removesuffix('weight')}lora_A.weight" in tensors
    assert len(tensors) == 2 * 2 * 4  # A and B of two layers in each of four blocks
    assert sum(t.numel() for t in tensors.values()) < 0.05 * sum(
        p.numel() for p in module.parameters()
    )


def test_training_adapters_moves_merged_weights_only_where_they_are(tmp_path: Path) -> None:
    config = TrainWorld(tmp_path, learning_rate=1e-2).config
    policy = Policy(adapted(), config)
    base = {n: b for n, b in bits(policy.module).items() if "lora" not in n}
    before = policy.served()
    rng = random.Random(0)
    ref = VersionRef(RUN, 0, "0" * 64)
    group = [trajectory("g", i, ref, reward=float(i % 2), rng=rng) for i in range(4)]
    for step in (1, 2):  # B is zero at first, so A moves from the second step on
        update(policy, [group], objective_of(config), config, version=0, step=step)
    after = policy.served()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all("q_proj" in name or "up_proj" in name for name in moved)
    assert {n: b for n, b in bits(policy.module).items() if "lora" not in n} == base
    fresh = Policy(adapted(), config)
    fresh.restore(policy.state())
    assert all(torch.equal(after[name], tensor) for name, tensor in fresh.served().items())


def test_what_cannot_be_adapted_is_said() -> None:
    with pytest.raises(ConfigError, match="No linear layer is called nothing"):
        add_lora(tiny_module(), LoraConfig(targets=("nothing",)), seed=0)


def test_layers_of_peft_are_understood() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        tiny_module(), peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "up_proj"])
    )
    plain = tiny_module()
    merged = merged_tensors(model)
    assert merged.keys() == dict(plain.named_parameters()).keys()
    assert set(adapter_tensors(model)) == set(peft.get_peft_model_state_dict(model))
    model.merge_adapter()
    with pytest.raises(ConfigError, match="unmerge it first"):
        merged_tensors(model)
    model.unmerge_adapter()
    copying = peft.get_peft_model(
        tiny_module(),
        peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"]),
    )
    with pytest.raises(ConfigError, match="trained copy of a whole layer"):
        merged_tensors(copying)
