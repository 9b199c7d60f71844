"""Publishing behind the trainer's back: snapshots that hold still, one version at a time."""

import logging
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from farcast.delta import AnyBits, TensorBits, to_bits
from farcast.errors import StoreUnavailableError
from farcast.publish import Publisher
from farcast.publish.snapshot import Snapshots, TorchCopies
from farcast.store import MemoryStore
from farcast.store.testing import Delay, Fail, FaultStore, LoseReply, Rule
from version_world import RUN, bits_of, copied, plain, rebuilt, tensors

torch = pytest.importorskip("torch")


def test_case_087_the_trainer_may_go_on_at_once() -> None:
    """Case 087: 50 times with a slow store."""
    store = FaultStore()
    store.add(Rule(Delay(0.002), verb="put", times=None))
    wanted: list[Any] = []
    with Publisher(store, RUN, anchor_every=10) as publisher:
        values = tensors()
        weights = {name: torch.from_numpy(value.copy()) for name, value in values.items()}
        for step in range(50):
            weights["a"].fill_(step)
            weights["b"].fill_(step)
            wanted.append(bits_of(copied({n: t.numpy() for n, t in weights.items()})))
            job = publisher.publish_async(weights, step=step)
            weights["a"].fill_(99)
            weights["b"].fill_(99)
        assert job.result().version == 49
        assert job.done()
    for version in range(50):
        assert rebuilt(store.inner, version) == wanted[version]


@pytest.mark.parametrize("background", [True, False])
def test_case_087_a_generator_may_fill_one_buffer_again_and_again(background: bool) -> None:
    store = MemoryStore()
    buffer = np.zeros(8, np.float32)

    def walk(step: int) -> Iterator[tuple[str, Any]]:
        for index in range(4):
            buffer[:] = 10 * step + index
            yield f"w{index}", buffer

    with Publisher(store, RUN) as publisher:
        for step in range(3):
            if background:
                publisher.publish_async(walk(step), step=step)
            else:
                publisher.publish(walk(step), step=step)
            buffer[:] = -1
    for version in range(3):
        assert rebuilt(store, version) == bits_of(
            {f"w{i}": np.full(8, 10 * version + i, np.float32) for i in range(4)}
        )


def test_versions_keep_their_order_and_waiting_is_counted() -> None:
    store = FaultStore()
    store.add(Rule(Delay(0.05), verb="put", prefix="objects/", times=None))
    with Publisher(store, RUN, anchor_every=100) as publisher:
        jobs = [publisher.publish_async(tensors(step), step=step) for step in range(4)]
        assert publisher.publish(tensors(4), step=4).version == 4
        assert [job.result().version for job in jobs] == [0, 1, 2, 3]
        assert jobs[0].report().waited_seconds < 0.04
        assert all(job.report().waited_seconds > 0.03 for job in jobs[1:])


def test_one_version_is_on_its_way_at_a_time() -> None:
    busy = threading.Lock()

    class Watched(MemoryStore):
        def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
            if key.startswith("versions/"):
                assert busy.acquire(blocking=False)
                time.sleep(0.01)
                busy.release()
            super().put(key, data, if_absent=if_absent)

    store = Watched()
    with Publisher(store, RUN) as publisher:
        for step in range(5):
            publisher.publish_async(tensors(step), step=step)
    assert rebuilt(store, 4) == bits_of(tensors(4))


@pytest.mark.parametrize("fault", [Fail(), LoseReply()])
@pytest.mark.parametrize("prefix", ["objects/", "versions/"])
def test_a_failed_job_leaves_its_changes_to_the_next(fault: Any, prefix: str) -> None:
    store = FaultStore()
    with Publisher(store, RUN) as publisher:
        publisher.publish_async(tensors(0), step=0).result()
        publisher.publish_async(tensors(1), step=1).result()
        store.add(Rule(fault, verb="put", prefix=prefix))
        failed = publisher.publish_async(tensors(2), step=2)
        ref = publisher.publish_async(tensors(3), step=3).result()
        with pytest.raises(StoreUnavailableError):
            failed.result()
    assert rebuilt(store, ref.version) == bits_of(tensors(3))


def test_a_failed_job_is_logged_without_foreign_text(caplog: pytest.LogCaptureFixture) -> None:
    """Case 103: nobody may ever ask for the result."""
    store = FaultStore()
    caplog.set_level(logging.DEBUG)
    with Publisher(store, RUN) as publisher:
        store.add(Rule(Fail(RuntimeError("SENTINELSECRET")), verb="put"))
        publisher.publish_async(tensors(), step=0)
    assert "Step 0 was not published: RuntimeError" in caplog.text
    assert "SENTINELSECRET" not in caplog.text


def test_a_failing_snapshot_gives_the_turn_back() -> None:
    store = MemoryStore()

    def broken() -> Iterator[tuple[str, Any]]:
        yield "a", np.zeros(3)
        raise RuntimeError("the trainer's own error")

    with Publisher(store, RUN) as publisher:
        with pytest.raises(RuntimeError, match="own error"):
            publisher.publish_async(broken(), step=0)
        assert publisher.publish(tensors(), step=0).version == 0


def test_mixed_use_shares_no_memory_between_versions() -> None:
    store = MemoryStore()
    rng = np.random.default_rng(3)
    values = tensors()
    wanted = []
    with Publisher(store, RUN, anchor_every=5) as publisher:
        for step in range(30):
            for value in values.values():
                value.flat[int(rng.integers(value.size))] = step
            wanted.append(bits_of(copied(values)))
            if rng.integers(2):
                publisher.publish(values, step=step)
            else:
                publisher.publish_async(values, step=step)
    for version in range(30):
        assert rebuilt(store, version) == wanted[version]


class FakeDeviceTensor:
    """Lies outside host memory as far as anybody can see."""

    device = SimpleNamespace(type="accelerator")

    def __init__(self, value: np.ndarray[Any, Any]) -> None:
        self.value = value


class FakeCopies:
    """Copies that fill their buffers only when they are awaited."""

    waits = 0

    def __init__(self) -> None:
        self.started: dict[str, tuple[np.ndarray[Any, Any], FakeDeviceTensor]] = {}

    def start(self, name: str, tensor: FakeDeviceTensor, spare: AnyBits | None) -> None:
        assert spare is None
        self.started[name] = np.full_like(tensor.value, 77), tensor

    def wait(self) -> dict[str, TensorBits]:
        FakeCopies.waits += 1
        for host, tensor in self.started.values():
            host[...] = tensor.value
        return {name: to_bits(host) for name, (host, _) in self.started.items()}


def test_case_089_copies_from_a_device_are_awaited_before_anybody_reads() -> None:
    """Case 089."""
    FakeCopies.waits = 0
    values = tensors()
    for _ in range(200):
        taken = Snapshots(FakeCopies).take(
            {"c": values["c"], **{n: FakeDeviceTensor(values[n]) for n in ("a", "b")}}
        )
        assert plain(taken) == bits_of(values)
    assert FakeCopies.waits == 200


def test_torch_copies_synchronise_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    synchronised: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronised.append)
    copies = TorchCopies()
    source = {
        "bf16": torch.randn(5, 3).to(torch.bfloat16).T,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "fp8": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
    }
    spare = to_bits(np.zeros(30, np.uint8))
    for name, tensor in source.items():
        copies.start(name, tensor, spare if name == "bf16" else None)
    found = copies.wait()
    assert synchronised == [torch.device("cpu")]
    assert np.shares_memory(found["bf16"].data, spare.data)
    assert plain(found) == bits_of(source)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_are_read_after_their_kernels() -> None:
    """Case 089 on a real device."""
    store = MemoryStore()
    with Publisher(store, RUN) as publisher:
        for step in range(200):
            value = torch.randn(64, 256, device="cuda").to(torch.bfloat16)
            publisher.publish_async({"w": value}, step=step)
            host = value.cpu()
            value.zero_()
            if step % 50 == 49:
                publisher.publish({"w": host}, step=step)
                assert rebuilt(store, step) == bits_of({"w": host})
