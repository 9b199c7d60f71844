"""What a vLLM process holds on a device is hashed there, in checkpoint order."""

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from device_world import PLACES, Doors, doors, pretend  # noqa: E402
from farcast.delta import held_bits  # noqa: E402
from farcast.engines.vllm_plugin.resident import Resident  # noqa: E402
from farcast.replica import Place  # noqa: E402

__all__ = ["doors"]

SHAPES = {"q": (6, 40), "k": (3, 40), "right": (5, 20)}


class Fused(torch.nn.Module):
    """Rows of two tensors in one, and half of the columns of a third."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(9, 40, dtype=torch.bfloat16, device=place))
        self.part = torch.nn.Parameter(torch.zeros(5, 50, dtype=torch.bfloat16, device=place))

    def load_weights(self, weights: Iterator[tuple[str, "torch.Tensor"]]) -> None:
        for name, tensor in weights:
            homes = {"q": self.qk[:6], "k": self.qk[6:], "right": self.part[:, 30:]}
            homes[name].data.copy_(tensor)


@pytest.mark.parametrize("place", PLACES)
def test_blocks_are_hashed_where_they_lie(
    place: str, doors: Doors, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch)
    model = Fused(place)
    wanted = {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}
    model.load_weights(iter(wanted.items()))
    resident = Resident(model, 0, model.load_weights)
    resident.attach(
        {name: Place("BF16", shape) for name, shape in SHAPES.items()},
        {"BF16": torch.bfloat16},
    )
    found = resident.receipt(list(SHAPES)).digests
    assert doors.most <= 32
    assert found == {name: (held_bits(tensor).digest(),) for name, tensor in wanted.items()}
