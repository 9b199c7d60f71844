"""safetensors files: whatever is in one, reading it raises a typed error or gives right bits."""

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from farcast.delta import entry_of, to_bits
from farcast.errors import FarcastError, FormatError, LimitError, TensorMismatchError
from farcast.replica.shards import DEFAULT_METADATA, check_writable, plan_shard, read_shard


def write(path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> Path:
    bits = {name: to_bits(value) for name, value in tensors.items()}
    header, spans = plan_shard({n: entry_of(b) for n, b in bits.items()}, DEFAULT_METADATA)
    data = bytearray(header) + bytes(sum(span.size for span in spans.values()))
    for name, span in spans.items():
        data[span.start : span.start + span.size] = bits[name].data.tobytes()
    path.write_bytes(data)
    return path


def raw(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def test_what_is_written_the_safetensors_library_reads(tmp_path: Path) -> None:
    tensors = {
        "b": np.arange(6, dtype=np.float16).reshape(2, 3),
        "a": np.arange(4, dtype=np.int64),
        "../x": np.array(True),
        "empty": np.zeros((0, 3), np.float32),
    }
    path = write(tmp_path / "x.safetensors", tensors)
    loaded = safetensors.numpy.load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(np.array_equal(loaded[name], tensors[name]) for name in tensors)
    shard = read_shard(path)
    assert shard.metadata == DEFAULT_METADATA
    assert all(shard.read(n).data.tobytes() == tensors[n].tobytes() for n in tensors)
    assert all(span.start % 8 == 0 for name, span in shard.spans.items() if name == "a")


def test_what_the_safetensors_library_writes_is_read(tmp_path: Path) -> None:
    tensors = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "s": np.array(2.5)}
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(tensors, path, metadata={"format": "np"})
    shard = read_shard(path)
    assert shard.metadata == {"format": "np"}
    for name, value in tensors.items():
        assert shard.read(name).shape == value.shape
        assert shard.read(name).data.tobytes() == value.tobytes()


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1, 100])
def test_case_101_lengths_that_lie_are_refused_at_once(tmp_path: Path, length: int) -> None:
    path = raw(tmp_path / "x.safetensors", {}, length=length)
    with pytest.raises(FormatError):
        read_shard(path)


def tensor(dtype: str = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BROKEN: dict[str, tuple[object, bytes]] = {
    "not JSON": (b"{", b""),
    "a list": ([], b""),
    "pickle": (b"\x80\x04c", b""),
    "huge shape": ({"x": tensor(shape=(2**62, 4))}, b"1234"),
    "overflowing shape": ({"x": tensor(shape=(2**32, 2**32, 2**32))}, b"1234"),
    "negative shape": ({"x": tensor(shape=(-1, -4))}, b"1234"),
    "shape of text": ({"x": tensor(shape="4")}, b"1234"),
    "end beyond the file": ({"x": tensor(shape=(2,), offsets=(0, 8))}, b"1234"),
    "hole": ({"x": tensor(offsets=(4, 8))}, b"12345678"),
    "overlap": ({"x": tensor(), "y": tensor()}, b"1234"),
    "backwards": ({"x": tensor(offsets=(4, 0))}, b"1234"),
    "size and shape differ": ({"x": tensor(shape=(2,))}, b"1234"),
    "trailing bytes": ({"x": tensor()}, b"12345"),
    "unknown dtype": ({"x": tensor(dtype="F31")}, b"1234"),
    "unknown field": ({"x": tensor() | {"more": 1}}, b"1234"),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "x": tensor()}, b"1234"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_case_101_headers_that_lie_are_refused(tmp_path: Path, broken: str) -> None:
    header, data = BROKEN[broken]
    path = raw(tmp_path / "x.safetensors", header, data)
    with pytest.raises(FormatError, match=r"x\.safetensors|dtype|F31"):
        read_shard(path)


def test_case_101_a_million_empty_tensors_are_refused_quickly(tmp_path: Path) -> None:
    item = ',"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    text = "{" + "".join(item % i for i in range(300_000))[1:] + "}"
    path = raw(tmp_path / "x.safetensors", text.encode())
    began = time.perf_counter()
    with pytest.raises(LimitError, match="300000 tensors"):
        read_shard(path)
    assert time.perf_counter() - began < 3


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_file_never_does_worse_than_a_typed_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("shards") / "x.safetensors"
    content = bytearray(write(path, {"a": np.arange(9.0), "b": np.ones(3, np.int8)}).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        shard = read_shard(path)
        for name in shard.spans:
            shard.read(name)
    except FarcastError:
        pass


@pytest.mark.parametrize("name", ["__metadata__", "lone \ud800 surrogate"])
def test_names_that_a_header_can_not_hold_are_refused(name: str) -> None:
    entry = entry_of(to_bits(np.ones(2)))
    with pytest.raises(TensorMismatchError, match="rename it"):
        check_writable({"fine": entry, name: entry})


def test_a_dtype_that_other_readers_do_not_know_is_refused() -> None:
    with pytest.raises(TensorMismatchError, match="which is C128"):
        check_writable({"x": entry_of(to_bits(np.ones(2, np.complex128)))})


READER = """
import sys, time
from pathlib import Path
from farcast.errors import FarcastError
from farcast.replica.shards import read_shard
shard = read_shard(Path(sys.argv[1]))
print("opened", flush=True)
sys.stdin.readline()
try:
    for name in shard.spans:
        shard.read(name)
except FarcastError as error:
    print(type(error).__name__)
    sys.exit(3)
"""


def test_case_035_a_file_that_shrinks_gives_an_error_and_not_a_signal(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"a": np.zeros(1 << 18), "b": np.ones(1 << 18)})
    command = [sys.executable, "-c", READER, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "opened\n"
        os.truncate(path, 4096)
        out, _ = child.communicate("\n", timeout=30)
    assert child.returncode == 3, (child.returncode, out)
