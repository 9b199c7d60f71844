import numpy as np
import pytest

from farcast import Publisher, Subscriber
from farcast.delta import to_bits
from farcast.errors import TensorMismatchError
from farcast.store import open_store

torch = pytest.importorskip("torch")

from farcast.replica.widened import WidenedModule  # noqa: E402


def served(seed: int) -> dict[str, "torch.Tensor"]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "0.weight": torch.randn(7, 5, generator=generator).to(torch.bfloat16),
        "0.bias": torch.randn(7, generator=generator).to(torch.bfloat16),
    }


def wide_module() -> "torch.nn.Module":
    return torch.nn.Sequential(torch.nn.Linear(5, 7)).to(torch.bfloat16).to(torch.float32)


def test_float32_module_follows_bf16_versions_bit_for_bit() -> None:
    store = open_store("memory://")
    publisher = Publisher(store, "run")
    target = WidenedModule(wide_module())
    subscriber = Subscriber(store, "run", target)
    tensors = served(0)
    tensors["0.weight"].view(torch.int16)[0, :3] = torch.tensor([0x7F81, -0x8000, 1]).to(
        torch.int16
    )
    for step in range(3):
        tensors["0.bias"][step] += 1
        ref = publisher.publish(tensors, step)
        assert subscriber.sync() == ref
        for name, tensor in tensors.items():
            assert target.read(name) == to_bits(tensor)
            wide = dict(target.module.named_parameters())[name].detach().numpy().view(np.uint32)
            assert np.array_equal(
                wide.reshape(-1), to_bits(tensor).data.view(np.uint16).astype(np.uint32) << 16
            )


def test_values_that_are_no_bf16_ones_are_refused() -> None:
    target = WidenedModule(torch.nn.Sequential(torch.nn.Linear(5, 7)))
    with pytest.raises(TensorMismatchError, match="no bf16"):
        target.read("0.weight")
