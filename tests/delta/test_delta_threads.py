"""Threads change neither a byte that is written nor a bit that is applied."""

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from forging import sealed
from hypothesis import given, settings
from hypothesis import strategies as st

from farcast.delta import Patch, TensorBits, apply, crew, encode, encode_bits, squash, to_bits
from farcast.errors import ConfigError, FormatError, IntegrityError


def versions(seed: int, sizes: list[int], share: float) -> list[dict[str, TensorBits]]:
    """Two versions of BF16 tensors."""
    chance = np.random.default_rng(seed)
    base, target = {}, {}
    for number, size in enumerate(sizes):
        words = chance.integers(0x3C00, 0x4000, size).astype("<u2")
        moved = words + (chance.random(size) < share).astype("<u2")
        for side, values in ((base, words), (target, moved)):
            side[f"w{number}"] = TensorBits("BF16", (size,), values.view(np.uint8))
    return [base, target]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 3000), min_size=1, max_size=6),
    st.sampled_from([0.001, 0.05, 0.9]),
)
def test_files_and_tensors_are_the_same_on_any_number(
    seed: int, sizes: list[int], share: float
) -> None:
    base, target = versions(seed, sizes, share)
    data = encode(base, target)
    for threads in (2, 3):
        assert encode(base, target, threads=threads) == data
        patch = Patch.open(data, threads=threads)
        buffers = {name: bits.data.copy() for name, bits in base.items()}
        changed = patch.apply_all(buffers, threads=threads)
        assert changed == sum(entry.changed for entry in patch.entries.values())
        assert all(np.array_equal(buffers[name], bits.data) for name, bits in target.items())
        out = apply(base, data, threads=threads)
        assert all(np.array_equal(to_bits(out[n]).data, b.data) for n, b in target.items())
        anchor = encode({}, target, threads=threads)
        assert anchor == encode({}, target)
        assert apply({}, anchor, threads=threads).keys() == target.keys()


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_damaged_block_leaves_its_tensor_as_it_was(threads: int) -> None:
    base, target = versions(1, [3000], 0.05)
    data = encode_bits(base, target).data
    patch = Patch.open(data)
    _, end = patch._spans["w0"]
    body = bytearray(data[:-32])
    body[end - 1] ^= 0x80
    buffers = {"w0": base["w0"].data.copy()}
    with pytest.raises((FormatError, IntegrityError)):
        Patch.open(sealed(bytes(body))).apply_all(buffers, threads=threads)
    assert np.array_equal(buffers["w0"], base["w0"].data)


def test_a_change_made_in_pieces_is_undone() -> None:
    base, target = versions(2, [5000], 0.05)
    buffer = base["w0"].data.copy()
    applied = Patch.open(encode_bits(base, target).data).change("w0", buffer, threads=3)
    assert np.array_equal(buffer, target["w0"].data)
    applied.undo()
    assert np.array_equal(buffer, base["w0"].data)


def test_a_missing_buffer_is_named_before_anything_is_written() -> None:
    base, target = versions(3, [600, 600], 0.05)
    buffers = {"w0": base["w0"].data.copy()}
    with pytest.raises(FormatError, match="'w1'"):
        Patch.open(encode_bits(base, target).data).apply_all(buffers, threads=2)
    assert np.array_equal(buffers["w0"], base["w0"].data)


def test_nothing_goes_on_after_an_error() -> None:
    go, done = threading.Event(), []

    def work(number: int) -> None:
        if number == 0:
            raise ZeroDivisionError
        go.wait(10)
        done.append(number)

    threading.Timer(0.05, go.set).start()
    threads = crew.Crew(2)
    with pytest.raises(ZeroDivisionError):
        _all(threads, work)
    ended = list(done)
    assert not threads._running
    assert done == ended


def _all(threads: crew.Crew, work: Callable[[int], None]) -> None:
    with threads:
        list(threads.each(work, range(9)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking with threads: the point here
def test_a_forked_process_starts_threads_of_its_own() -> None:
    base, target = versions(4, [600, 600], 0.05)
    data = encode_bits(base, target, threads=2).data
    child = os.fork()
    if child == 0:
        same = encode_bits(base, target, threads=2).data == data
        os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_large_tensors_are_everybodys_and_small_ones_come_together() -> None:
    sizes = {"large": 10 << 20, "a": 3, "b": 4, "middle": 2 << 20}
    assert crew.shares(sizes, 2) == (["large"], [["middle"], ["b", "a"]])
    assert crew.shares(sizes, 1) == ([], [["large"], ["middle"], ["b", "a"]])
    assert crew.shares({}, 2) == ([], [])


@pytest.mark.parametrize("threads", [0, -1, 1.5, "a", None, 257, 10**30])
def test_a_number_of_threads_that_none_can_be_is_one_sentence(threads: Any) -> None:
    base, target = versions(5, [40], 0.5)
    data = encode(base, target)
    buffers = {name: bits.data.copy() for name, bits in base.items()}
    calls: list[Callable[[], object]] = [
        lambda: encode(base, target, threads=threads),
        lambda: encode_bits({}, target, threads=threads),
        lambda: apply(base, data, threads=threads),
        lambda: squash([data], threads=threads),
        lambda: squash([data], base, threads=threads),
        lambda: Patch.open(data, threads=threads),
        lambda: Patch.open(data).apply_all(buffers, threads=threads),
        lambda: Patch.open(data).change("w0", buffers["w0"], threads=threads),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="from 1 to 256"):
            call()
    assert all(np.array_equal(buffers[name], bits.data) for name, bits in base.items())
