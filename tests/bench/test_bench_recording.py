"""A recording is what the store holds, and a damaged one is refused."""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from recordings import RUN, publish_run, rewrite_arrays, start_run

from farcast.bench.data import DELTAS, HOPS, Recording
from farcast.bench.record import record
from farcast.errors import ConfigError, FormatError, UnknownVersionError
from farcast.publish import Publisher
from farcast.store import MemoryStore
from farcast.store.archive import Archive


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[MemoryStore, Path]:
    store = MemoryStore()
    publish_run(store)
    record(store, tmp_path / "out")
    return store, tmp_path / "out"


def test_every_version_comes_back_bit_for_bit(recorded: tuple[MemoryStore, Path]) -> None:
    store, folder = recorded
    archive = Archive(store, RUN)
    changes = list(Recording(folder).walk(RUN))
    assert [change.hop for change in changes] == ["0-1", "1-2", "2-3"]
    for version, change in enumerate(changes):
        assert change.base == archive.rebuild(version)
        assert change.target == archive.rebuild(version + 1)


def test_a_range_can_be_chosen(recorded: tuple[MemoryStore, Path], tmp_path: Path) -> None:
    hops = record(recorded[0], tmp_path / "part", first=1, last=2)
    assert [(hop.base, hop.target) for hop in hops] == [(1, 2)]
    with pytest.raises(UnknownVersionError, match="versions 2 to 9"):
        record(recorded[0], tmp_path / "beyond", first=2, last=9)
    with pytest.raises(UnknownVersionError, match="two at least"):
        record(recorded[0], tmp_path / "one", first=3)


def test_a_folder_in_use_is_refused(recorded: tuple[MemoryStore, Path]) -> None:
    with pytest.raises(ConfigError, match="not empty"):
        record(*recorded)


def test_tensors_that_come_and_go_are_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    start_run(store)
    publisher = Publisher(store, RUN)
    publisher.publish({"a": np.zeros(4, np.float32)}, step=0)
    publisher.publish({"a": np.zeros(4, np.float32), "b": np.ones(2, np.float32)}, step=1)
    with pytest.raises(ConfigError, match="came, went or changed shape"):
        record(store, tmp_path / "out")


def test_a_folder_that_is_no_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no base\.safetensors"):
        Recording(tmp_path)


@pytest.mark.parametrize(
    ("ending", "array", "words"),
    [
        ("embed/positions", np.array([1 << 31], np.uint32), "leave the tensor"),
        ("embed/positions", np.array([-1], np.int64), "wrong type"),
        ("embed/values", np.array([1.0], np.float64), "wrong type"),
        ("embed/values", np.array([1], np.uint16), "leave the tensor"),
        ("embed/values", np.array([[1]], np.uint16), "leave the tensor"),
    ],
)
def test_words_that_cannot_be_are_refused(
    recorded: tuple[MemoryStore, Path], ending: str, array: np.ndarray, words: str
) -> None:
    rewrite_arrays(recorded[1] / DELTAS, {ending: array})
    with pytest.raises(FormatError, match=words):
        list(Recording(recorded[1]).walk(RUN))


def test_pickled_arrays_are_refused(recorded: tuple[MemoryStore, Path]) -> None:
    with np.load(recorded[1] / DELTAS) as held:
        arrays = {key: held[key] for key in held.files}
    key = next(key for key in arrays if key.endswith("embed/values"))
    np.savez(recorded[1] / DELTAS, **{**arrays, key: np.array([print], dtype=object)})
    with pytest.raises(FormatError, match="damaged"):
        list(Recording(recorded[1]).walk(RUN))


def header(descr: str, shape: tuple[int, ...]) -> bytes:
    """The beginning of an array file."""
    written = io.BytesIO()
    told = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(written, told)
    return written.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"junk",
        b"\x93NUMPY\x09\x00",
        header("<u4", (1 << 60,)),
        header("<u4", (1 << 40,)),
        header("<u4", (3,)) + bytes(8),
        header("<u4", (-1,)),
        header("<f4", (1,)) + bytes(4),
        header("<u4", ()) + bytes(4),
        header("<u4", (1 << 20,)) + bytes(1 << 22),
    ],
    ids=range(10),
)
def test_arrays_that_are_none_are_refused_before_they_take_memory(
    recorded: tuple[MemoryStore, Path], data: bytes
) -> None:
    path = recorded[1] / DELTAS
    with zipfile.ZipFile(path) as held:
        names = held.namelist()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as written:
        for name in names:
            written.writestr(name, data)
    with pytest.raises(FormatError, match="record again"):
        list(Recording(recorded[1]).walk(RUN))


def flipped(data: bytes) -> bytes:
    """With other bytes where the first array is packed."""
    return data[:120] + bytes(40) + data[160:]


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda _: header("<u4", (0,)),  # one array, not an archive of them
        lambda data: data[:10],
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        flipped,
        lambda _: b"PK\x05\x06" + bytes(18),
    ],
    ids=["empty", "npy", "head", "half", "cut", "flipped", "no arrays"],
)
def test_a_damaged_archive_of_arrays_is_refused(
    recorded: tuple[MemoryStore, Path], damage: Callable[[bytes], bytes]
) -> None:
    path = recorded[1] / DELTAS
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(FormatError, match="record again"):
        list(Recording(recorded[1]).walk(RUN))


@pytest.mark.parametrize(
    "hops",
    [
        b"",
        b"{}",
        b"[[1]]",
        b"null",
        b"not JSON",
        b"\xff\xfe",
        b"[" * 100_000,
        b'[{"run": "a/b", "base": 0, "target": 1, "changed": 0, "elements": 1}]',
        b'[{"run": "a\\n", "base": 0, "target": 1, "changed": 0, "elements": 1}]',
        b'[{"run": "a", "base": -1, "target": 1, "changed": 0, "elements": 1}]',
        b'[{"run": "a", "base": 1e99, "target": 1, "changed": 0, "elements": 1}]',
        b'[{"run": "a", "base": ' + b"9" * 5000 + b', "target": 1, "changed": 0, "elements": 1}]',
    ],
    ids=range(12),
)
def test_hops_that_are_none_are_refused(recorded: tuple[MemoryStore, Path], hops: bytes) -> None:
    (recorded[1] / HOPS).write_bytes(hops)
    with pytest.raises(FormatError, match="malformed"):
        Recording(recorded[1])


def test_counts_and_order_of_hops_are_checked(recorded: tuple[MemoryStore, Path]) -> None:
    folder = recorded[1]
    hops = msgspec.json.decode((folder / HOPS).read_bytes())
    (folder / HOPS).write_bytes(msgspec.json.encode([{**hops[0], "changed": 1}]))
    with pytest.raises(FormatError, match="counts of tiny/0-1"):
        list(Recording(folder).walk(RUN))
    (folder / HOPS).write_bytes(msgspec.json.encode([hops[0], hops[2]]))
    with pytest.raises(FormatError, match="does not follow"):
        list(Recording(folder).walk(RUN))
    (folder / HOPS).write_bytes(b"[{}]")
    with pytest.raises(FormatError, match="malformed"):
        Recording(folder)
