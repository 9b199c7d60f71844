"""Versions of tensors on a device, from the trainer's to the replica's: only changes cross."""

import importlib.util
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from device_world import PLACES, Doors, doors, pretend  # noqa: E402
from farcast.delta import TensorBits, blocks, device, passes, to_bits, writing  # noqa: E402
from farcast.errors import PoisonError, TargetChangedError, TargetError  # noqa: E402
from farcast.publish import Publisher  # noqa: E402
from farcast.replica import Subscriber, TorchModule  # noqa: E402
from farcast.replica.widened import WidenedModule  # noqa: E402
from farcast.store import MemoryStore  # noqa: E402
from version_world import RUN, contents  # noqa: E402

__all__ = ["doors"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BLOCK = 1 << 15
CHANGED = 500
A_CHANGE = 8
"""Bytes of a change in bf16: class, rank and difference to the host; rank and difference back."""
CLASSES = 2 * (1 << 14)
"""Bytes of the sample that tells the classes of a dtype."""
REST = 4000
"""Bytes of digests, of the bounds of blocks, and of each tensor's first element."""

Bits = dict[str, TensorBits]


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_WORDS", BLOCK)
    pretend(monkeypatch)


def model(place: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(256, 400), nn.Linear(400, 100), nn.LayerNorm(100))
    return layers.to(torch.bfloat16).to(place)


def train(trained: nn.Module) -> None:
    """Change `CHANGED` words in place, as an optimizer does."""
    words = device.words_on_device(trained[0].weight)
    words[torch.randperm(words.numel(), device=words.device)[:CHANGED]] += 1


def on_host(trained: nn.Module) -> Bits:
    """Copies that lie in host memory for everybody."""
    return {name: to_bits(tensor).copied() for name, tensor in trained.state_dict().items()}


def crossed(counted: Doors) -> tuple[int, int]:
    """Bytes that went to the host and came from it since the last call."""
    both = counted.out, counted.back
    counted.out = counted.back = counted.most = counted.largest = 0
    return both


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("background", [False, True])
def test_from_trainer_to_replica_only_changes_cross(
    background: bool, place: str, doors: Doors
) -> None:
    store = MemoryStore()
    trained, served = model(place), model(place, seed=1)
    size = sum(2 * tensor.numel() for tensor in trained.parameters())
    replica = Subscriber(store, RUN, TorchModule(served))
    with Publisher(store, RUN, anchor_every=100) as publisher:
        for number in range(4):
            train(trained)
            if background:
                ref = publisher.publish_async(trained.state_dict(), number).result()
            else:
                ref = publisher.publish(trained.state_dict(), number)
            assert doors.most <= max(2 * BLOCK, CLASSES)  # an anchor goes block by block
            out, back = crossed(doors)
            if number:
                assert out <= A_CHANGE * CHANGED + CLASSES + REST < size / 6
                assert back <= REST
            assert replica.sync() == ref
            assert number or 0 < doors.largest <= 2 * BLOCK
            out, back = crossed(doors)
            assert out <= REST
            assert back <= (A_CHANGE * CHANGED + REST if number else size)
            assert replica.target.verify() == ref.root
            after = trained.state_dict()
            assert all(torch.equal(t, after[name]) for name, t in served.state_dict().items())


@pytest.mark.parametrize("place", PLACES)
def test_a_publisher_started_again_moves_its_baseline_to_the_device(
    place: str, doors: Doors
) -> None:
    store, trained = MemoryStore(), model(place)
    Publisher(store, RUN).publish(trained.state_dict(), 0)
    publisher = Publisher(store, RUN)
    for number in (1, 2):
        train(trained)
        crossed(doors)
        ref = publisher.publish(trained.state_dict(), number)
    out, back = crossed(doors)
    assert out <= A_CHANGE * CHANGED + CLASSES + REST
    assert back <= REST
    served = TorchModule(model(place, seed=1))
    assert Subscriber(store, RUN, served).sync() == ref


@pytest.mark.parametrize("place", PLACES)
def test_objects_and_manifests_are_those_of_tensors_in_host_memory(place: str) -> None:
    """Deltas, squashed ones, anchors, dense changes, a rollback, and a publisher started again."""
    stores = MemoryStore(), MemoryStore()

    def publishers() -> list[Publisher]:
        return [Publisher(s, RUN, writer="w", squash=2, anchor_every=3) for s in stores]

    trained, pair = model(place), publishers()
    for number in range(7):
        train(trained)
        if number == 3:
            trained[1].weight.data += 0.01
        if number == 5:
            pair = publishers()
        on_device, on_the_host = pair
        if number % 2:
            ref = on_device.publish_async(trained.state_dict(), number).result()
        else:
            ref = on_device.publish(trained.state_dict(), number)
        assert on_the_host.publish(on_host(trained), number) == ref
        if number == 4:
            assert on_device.rollback(2) == on_the_host.rollback(2)
    first, second = map(contents, stores)
    assert first == second


@pytest.mark.parametrize("place", PLACES)
def test_a_formats_line_on_a_device_serves_the_same(place: str) -> None:
    stores = MemoryStore(), MemoryStore()
    formats = ["bf16", "fp8_block"]
    on_device, other = (Publisher(s, RUN, writer="w", formats=formats) for s in stores)
    masters = {"model.layers.0.mlp.up_proj.weight": torch.randn(256, 256, device=place)}
    for number in range(3):
        on_device.publish(masters, number)
        other.publish({name: t.detach().cpu().clone() for name, t in masters.items()}, number)
        masters = {name: t * 1.001 for name, t in masters.items()}
    first, second = map(contents, stores)
    assert first == second


def test_a_tensor_without_a_finite_value_is_refused_there(doors: Doors) -> None:
    publisher, trained = Publisher(MemoryStore(), RUN), model("cpu")
    publisher.publish(trained.state_dict(), 0)
    trained[1].weight.data[:] = torch.nan
    with pytest.raises(PoisonError, match=r"'1\.weight'"):
        publisher.publish(trained.state_dict(), 1)
    assert doors.most <= max(2 * BLOCK, 2 << 16)


@pytest.mark.parametrize("dense", [False, True])
def test_a_commit_that_fails_gives_the_old_words_back(
    dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, trained, served = MemoryStore(), model("cpu"), model("cpu", seed=1)
    publisher, target = Publisher(store, RUN), TorchModule(served)
    replica = Subscriber(store, RUN, target)
    publisher.publish(trained.state_dict(), 0)
    first = replica.sync()
    kept = on_host(served)
    train(trained)
    if dense:
        trained[0].weight.data += 1
    trained[1].bias.data += 1
    publisher.publish(trained.state_dict(), 1)
    with monkeypatch.context() as broken:
        answers = iter([False])
        broken.setattr(target, "_refresh", lambda: next(answers, True))
        with pytest.raises(TargetError, match="did not confirm"):
            replica.sync()
    assert target.ref == first
    assert on_host(served) == kept
    staged = replica.stage()
    assert staged is not None
    device.words_on_device(served[0].weight)[:] += 2
    with pytest.raises(TargetChangedError, match="Somebody else"):
        replica.commit(staged)
    assert replica.sync().version == 1
    assert on_host(served) == on_host(trained)


class Strided(nn.Module):
    """Parameters that have no row of words in their memory."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(300, 200, device=place).bfloat16().t())
        self.z = nn.Parameter(torch.randn(40, 30, device=place, dtype=torch.complex128).t())
        self.s = nn.Parameter(torch.tensor(1.5, device=place))


@pytest.mark.parametrize("place", PLACES)
def test_strided_parameters_keep_their_strides(place: str) -> None:
    store, served, trained = MemoryStore(), Strided(place), Strided(place)
    publisher, replica = Publisher(store, RUN), Subscriber(store, RUN, TorchModule(served))
    for number in range(3):
        trained.w.data[3, number] += 1
        trained.z.data[number, 3] += 1
        trained.s.data += 1
        if number == 2:
            trained.w.data += 1
        ref = publisher.publish(trained.state_dict(), number)
        assert replica.sync() == ref
        assert served.w.stride() == (1, 200)
        assert on_host(served) == on_host(trained)


@pytest.mark.parametrize("place", PLACES)
def test_a_widened_module_goes_through_the_host(place: str) -> None:
    store, trained = MemoryStore(), model(place)
    served = model(place, seed=1).float()
    publisher, replica = Publisher(store, RUN), Subscriber(store, RUN, WidenedModule(served))
    for number in range(3):
        train(trained)
        ref = publisher.publish(trained.state_dict(), number)
        assert replica.sync() == ref
        assert all(
            torch.equal(tensor.bfloat16(), trained.state_dict()[name])
            for name, tensor in served.state_dict().items()
        )


def test_a_module_written_in_inference_mode() -> None:
    store, trained = MemoryStore(), model("cpu")
    with torch.inference_mode():
        served = model("cpu", seed=1)
    publisher, replica = Publisher(store, RUN), Subscriber(store, RUN, TorchModule(served))
    for number in range(4):
        train(trained)
        with torch.inference_mode(number % 2 == 1):
            ref = publisher.publish_async(trained.state_dict(), number).result()
        assert replica.sync() == ref


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(INTERPRETED, reason="this is what runs there")
def test_triton_kernels_do_the_same_in_their_interpreter() -> None:
    """The interpreter is switched on before Triton is imported, so it takes its own process."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__, "-k", "triton_passes"],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "1 passed" in result.stdout


@pytest.mark.skipif(not INTERPRETED, reason="runs in the test above")
def test_triton_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those over words; digests take minutes there, and have a test of their own."""
    from farcast.delta import triton_kernels

    names = ("tile_counts", "tile_ranks", "tile_select")
    kernels = {name: staticmethod(getattr(triton_kernels, name)) for name in names}
    chosen = type("Passes", (passes.TorchPasses,), kernels)
    monkeypatch.setattr(passes, "passes_of", lambda _: chosen)
    monkeypatch.setattr(writing, "SMALL_WORDS", 100)
    stores = MemoryStore(), MemoryStore()
    on_device, on_the_host = (Publisher(s, RUN, writer="w") for s in stores)
    trained = nn.Linear(64, 16).to(torch.bfloat16)
    served = nn.Linear(64, 16).to(torch.bfloat16)
    replica = Subscriber(stores[0], RUN, TorchModule(served))
    for number in range(2):
        device.words_on_device(trained.weight)[::100] += 1
        ref = on_device.publish(trained.state_dict(), number)
        assert on_the_host.publish(on_host(trained), number) == ref
        assert replica.sync() == ref
    first, second = map(contents, stores)
    assert first == second
