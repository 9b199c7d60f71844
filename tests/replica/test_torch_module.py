"""A live module is overwritten in place, and only what a version says."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from replica_world import Box, World, blank, held, weights
from torch import nn

from farcast.delta import to_bits
from farcast.errors import IntegrityError, TargetChangedError, TensorMismatchError
from farcast.replica import TorchModule, torch_module
from version_world import bits_of


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4, dtype=torch.bfloat16)
        self.lm_head = nn.Linear(4, 10, bias=False, dtype=torch.bfloat16)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("head_rows", self.embed.weight.data[2:5])


def bf16(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32)).bfloat16()


def test_case_011_tied_weights_stay_one_tensor() -> None:
    world, model = World(), Tied()
    versions = [bf16(np.arange(40).reshape(10, 4) + v) for v in range(3)]
    subscriber = world.subscriber(TorchModule(model))
    parameter, address = model.embed.weight, model.embed.weight.data_ptr()
    for value in versions:
        world.publish({"embed.weight": value})
        subscriber.sync()
        assert model.embed.weight is parameter
        assert model.lm_head.weight is parameter
        assert parameter.data_ptr() == address
        assert len(list(model.named_parameters())) == 1
        assert torch.equal(parameter, value)
        assert torch.equal(model.head_rows, value[2:5])
        assert model.head_rows.data_ptr() == parameter[2:].data_ptr()


def test_case_011_a_version_that_names_both_aliases_must_agree_on_them() -> None:
    world, model = World(), Tied()
    both = bf16(np.ones((10, 4)))
    world.publish({"embed.weight": both, "lm_head.weight": both})
    subscriber = world.subscriber(TorchModule(model, allow_missing=["head_rows"]))
    first = subscriber.sync()
    world.publish({"embed.weight": both + 1, "lm_head.weight": both + 2})
    with pytest.raises(TensorMismatchError, match="are one tensor here, but differ"):
        subscriber.sync()
    assert subscriber.ref == first
    assert torch.equal(model.embed.weight, both)


def test_case_011_a_view_that_a_version_contradicts_is_undone() -> None:
    world, model = World(), Tied()
    values = bf16(np.ones((10, 4)))
    world.publish({"embed.weight": values, "head_rows": values[2:5]})
    subscriber = world.subscriber(TorchModule(model))
    first = subscriber.sync()
    world.publish({"embed.weight": values + 1, "head_rows": values[2:5]})
    with pytest.raises(IntegrityError, match="read back as other bits"):
        subscriber.sync()
    assert subscriber.ref == first
    assert torch.equal(model.embed.weight, values)


def test_case_013_unknown_names_are_refused_unless_allowed() -> None:
    world = World()
    world.publish({"x": np.ones(3, np.float32), "z": np.ones(2, np.float32)})
    module = Box({"y": np.zeros(3, np.float32), "z": np.zeros(2, np.float32)})
    with pytest.raises(TensorMismatchError, match=r"missing from the version: 'y'.*here: 'x'"):
        world.subscriber(TorchModule(module)).sync()
    assert not module.z.any()
    target = TorchModule(module, allow_missing=["y"], allow_unexpected=["x"])
    ref = world.subscriber(target).sync()
    assert module.z.all()
    assert not module.y.any()
    assert target.verify() == ref.root
    mapped = TorchModule(module, names={"y": "x"})
    world.subscriber(mapped).sync()
    assert module.y.all()


def test_case_013_a_skipped_tensor_may_change() -> None:
    world = World()
    module = Box({"z": np.zeros(2, np.float32)})
    subscriber = world.subscriber(TorchModule(module, allow_unexpected=["x"]))
    for version in range(3):
        both = np.arange(2000, dtype=np.float32)
        both[version] = -1
        world.publish({"x": both, "z": both[:2]})
        assert subscriber.sync() == world.refs[version]
        assert np.array_equal(module.z.numpy(), both[:2])


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Parameter(torch.zeros(4, 3))
        self.register_buffer("scale", torch.tensor(0.0188), persistent=False)
        self.register_buffer("view", self.conv.data.view(3, 4), persistent=False)


def test_case_015_state_outside_the_checkpoint_is_left_alone() -> None:
    world, module = World(), Stateful()
    subscriber = world.subscriber(TorchModule(module))
    for version in range(3):
        world.publish({"conv": np.full((4, 3), version + 0.5, np.float32)})
        subscriber.sync()
        assert module.scale.item() == pytest.approx(0.0188)
        assert module.view.data_ptr() == module.conv.data_ptr()
        assert torch.all(module.view == version + 0.5)


def test_case_023_padded_rows_survive_and_another_shape_is_refused() -> None:
    world = World()
    embed = np.random.default_rng(0).normal(size=(1000, 4)).astype(np.float32)
    module = Box({"embed": np.zeros((1000, 4), np.float32)})
    subscriber = world.subscriber(TorchModule(module))
    world.publish({"embed": embed})
    ref = subscriber.sync()
    assert np.array_equal(module.embed.numpy()[990:], embed[990:])
    world.publish({"embed": np.concatenate([embed, embed[:8]])})
    with pytest.raises(TensorMismatchError, match=r"'embed' is F32\[1000, 4\] here and F32\[1008"):
        subscriber.sync()
    assert subscriber.ref == ref
    assert np.array_equal(module.embed.numpy(), embed)


def test_case_031_another_dtype_is_refused_and_never_cast() -> None:
    world = World()
    module = Box({"count": np.array([1, 2], np.int64)})
    subscriber = world.subscriber(TorchModule(module))
    world.publish({"count": np.array([3, 4], np.int64)})
    subscriber.sync()
    world.publish({"count": np.array([0.5, 1.5], np.float32)})
    with pytest.raises(TensorMismatchError, match=r"I64\[2\] here and F32\[2\]"):
        subscriber.sync()
    assert module.count.tolist() == [3, 4]


DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.parametrize("path", ["host", "device"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_every_bit(
    dtype: torch.dtype, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "device":
        monkeypatch.setattr(torch_module, "_on_host", lambda _: False)
    world = World()
    rng = np.random.default_rng(0)

    def drawn() -> torch.Tensor:
        if dtype == torch.bool:
            return torch.from_numpy(rng.integers(0, 2, (8, 6)).astype(bool))
        raw = rng.integers(0, 256, (8, 6 * dtype.itemsize), np.uint8)
        return torch.from_numpy(raw).view(dtype)

    live = drawn()
    module = Box({"x": live})
    subscriber = world.subscriber(TorchModule(module))
    for _ in range(3):
        for rows in (8, 1):  # as a whole, then a few elements
            wanted = live.detach().clone()
            wanted[:rows] = drawn()[:rows]
            world.publish({"x": wanted})
            subscriber.sync()
            assert to_bits(module.x.detach()).data.tobytes() == to_bits(wanted).data.tobytes()
        assert module.x.data_ptr() == live.data_ptr()


@pytest.mark.parametrize("path", ["host", "device"])
@pytest.mark.parametrize("layout", ["transposed", "strided", "channels_last"])
def test_parameters_need_not_be_contiguous(
    layout: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "device":  # the code for accelerators, on the tensors we have
        monkeypatch.setattr(torch_module, "_on_host", lambda _: False)
    world = World()
    memory = torch.zeros(2, 3, 4, 5)
    live = {
        "transposed": memory.transpose(0, 3),
        "strided": memory[:, :, ::2, 1:],
        "channels_last": memory.contiguous(memory_format=torch.channels_last),
    }[layout]
    module = Box({"x": live})
    subscriber = world.subscriber(TorchModule(module, check="all"))
    value = torch.arange(live.numel(), dtype=torch.float32).reshape(live.shape)
    for version in range(3):
        value.reshape(-1)[version * 3] = -7.0
        world.publish({"x": value.clone()})
        ref = subscriber.sync()
        assert module.x.data_ptr() == live.data_ptr()
        assert module.x.stride() == live.stride()
        assert torch.equal(module.x, value)
        assert subscriber.target.verify() == ref.root


def test_case_093_wrapped_and_compiled_modules_are_known_by_their_plain_names() -> None:
    world = World()
    world.publish()
    inner = Box(blank())
    compiled, outer = nn.Module(), nn.Module()
    compiled._orig_mod = inner  # as torch.compile names it
    outer.module = compiled  # as DistributedDataParallel does
    world.subscriber(TorchModule(outer)).sync()
    assert bits_of(dict(inner.named_parameters())) == bits_of(weights(0))


def test_inference_and_grad_modes_make_no_difference() -> None:
    world = World()
    module = Box(blank())
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(True)
    subscriber = world.subscriber(TorchModule(module))
    for version in range(4):
        world.publish()
        with [torch.enable_grad, torch.no_grad, torch.inference_mode][version % 3]():
            subscriber.sync()
        assert held(subscriber.target) == bits_of(weights(version))


def test_a_commit_may_come_from_another_thread() -> None:
    world = World()
    world.publish()
    subscriber = world.subscriber(TorchModule(Box(blank())))
    staged = subscriber.stage()
    assert staged is not None
    thread = threading.Thread(target=subscriber.commit, args=(staged,))
    thread.start()
    thread.join()
    assert subscriber.ref == world.refs[0]


def test_other_threads_see_each_element_old_or_new_and_nothing_else() -> None:
    world = World()
    module = Box({"x": np.zeros(100_000, np.float64)})
    subscriber = world.subscriber(TorchModule(module))
    odd: list[float] = []
    done = threading.Event()

    def watch() -> None:
        live = module.x.numpy()
        while not done.is_set():
            seen = np.unique(live)
            odd.extend(set(seen.tolist()) - {0.0, 1.1, 2.2, 3.3})

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        for value, few in ((1.1, 1), (2.2, 9), (3.3, 1)):
            wanted = module.x.numpy().copy()
            wanted[::few] = value
            world.publish({"x": wanted})
            subscriber.sync()
    finally:
        done.set()
        thread.join()
    assert not odd


def test_a_module_made_in_inference_mode_is_written_too() -> None:
    world = World()
    with torch.inference_mode():
        module = Box(blank())
    world.publish()
    world.subscriber(TorchModule(module)).sync()
    assert bits_of(dict(module.named_parameters())) == bits_of(weights(0))


def test_case_045_a_replaced_parameter_is_noticed_before_writing() -> None:
    world = World()
    module = Box(blank())
    subscriber = world.subscriber(TorchModule(module))
    world.publish()
    subscriber.sync()
    world.publish()
    staged = subscriber.stage()
    assert staged is not None
    module.layer.weight = nn.Parameter(torch.zeros(16, 16), requires_grad=False)
    with pytest.raises(TargetChangedError, match="replaced"):
        subscriber.commit(staged)
    assert not module.layer.weight.any()
    assert subscriber.sync() == world.refs[1]
    assert bits_of(dict(module.named_parameters())) == bits_of(weights(1))


def test_a_module_that_starts_with_the_right_weights_needs_no_anchor() -> None:
    world = World()
    for _ in range(3):
        world.publish()
    module = Box(weights(1))
    plan = world.subscriber(TorchModule(module)).plan()
    assert plan.have == world.refs[1]


def test_a_tied_module_is_recognised_by_what_the_run_publishes() -> None:
    world, model = World(), Tied()
    world.publish({"embed.weight": model.embed.weight.detach().clone()})
    subscriber = world.subscriber(TorchModule(model))
    assert subscriber.stage() is None
    assert subscriber.ref == world.refs[0]


def test_modules_without_memory_of_their_own_are_refused() -> None:
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    with pytest.raises(TensorMismatchError, match="meta"):
        TorchModule(module)


def test_the_package_does_not_load_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "import sys, farcast.replica; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False).returncode == 0
