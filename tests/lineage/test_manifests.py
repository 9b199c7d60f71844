"""Equal manifests are equal bytes; whatever else a store hands over is refused with a reason."""

import io
import pickle
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from farcast.errors import FormatError, LimitError, RunMismatchError
from farcast.lineage import (
    MAX_MANIFEST_BYTES,
    Delta,
    Manifest,
    ObjectRef,
    RunRecord,
    decode_manifest,
    decode_run_record,
    encode_manifest,
    encode_run_record,
    parse_version_key,
    version_key,
)

ROOT = "ab" * 32
BASE_ROOT = "cd" * 32


def ref(number: int, size: int = 100) -> ObjectRef:
    return ObjectRef(digest=f"{number:064x}", size=size)


def delta(base: int = 6, **changes: Any) -> Delta:
    return replace(Delta(base=base, base_root=BASE_ROOT, objects=(ref(1),)), **changes)


def manifest(**changes: Any) -> Manifest:
    plain = Manifest(
        run_id="run1",
        version=7,
        root=ROOT,
        step=70,
        served_format="bf16",
        tensors=2,
        elements=50,
        bytes_full=100,
        changed=5,
        anchor_version=0,
        deltas=(delta(),),
        writer="w1",
    )
    return replace(plain, **changes)


def raw(**changes: Any) -> bytes:
    fields = msgspec.json.decode(encode_manifest(manifest()))
    fields.update(changes)
    return msgspec.json.encode(fields)


def test_round_trip_and_canonical_bytes() -> None:
    data = encode_manifest(manifest())
    assert decode_manifest(data, run_id="run1", version=7) == manifest()
    assert encode_manifest(decode_manifest(data, run_id="run1", version=7)) == data
    spaced = msgspec.json.format(data, indent=2)
    assert encode_manifest(decode_manifest(spaced, run_id="run1", version=7)) == data


def test_run_record_bytes_do_not_depend_on_the_order_of_assets() -> None:
    first = RunRecord(run_id="run1", created="now", assets={"a.json": ref(1), "b.json": ref(2)})
    other = RunRecord(run_id="run1", created="now", assets={"b.json": ref(2), "a.json": ref(1)})
    assert encode_run_record(first) == encode_run_record(other)
    assert decode_run_record(encode_run_record(first), run_id="run1") == first


def test_another_run_is_a_mismatch() -> None:
    with pytest.raises(RunMismatchError, match="'run1', not to 'run2'"):
        decode_manifest(encode_manifest(manifest()), run_id="run2", version=7)
    record = encode_run_record(RunRecord(run_id="run1", created=""))
    with pytest.raises(RunMismatchError, match="'run1', not to 'run2'"):
        decode_run_record(record, run_id="run2")


def test_a_manifest_under_another_version_is_refused() -> None:
    with pytest.raises(FormatError, match="describes version 7"):
        decode_manifest(encode_manifest(manifest()), run_id="run1", version=8)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (manifest(anchor_version=7), "anchor is version 7"),
        (manifest(anchor=(ref(2),)), "anchor is version 0"),
        (manifest(anchor_version=8), "newer than itself"),
        (manifest(deltas=()), "neither an anchor nor a delta"),
        (manifest(anchor=(), anchor_version=7), "anchor without objects"),
        (manifest(deltas=(delta(base=7),)), "not older"),
        (manifest(deltas=(delta(base=9),)), "not older"),
        (manifest(deltas=(delta(), delta())), "two deltas from one base"),
        (manifest(deltas=(delta(objects=()),)), "without objects"),
        (manifest(deltas=(delta(objects=(ref(1), ref(1))),)), "twice"),
        (manifest(changed=51), "more changed"),
        (manifest(tensors=0), "no tensor"),
    ],
)
def test_contradictions_are_refused_on_both_sides(broken: Manifest, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        encode_manifest(broken)
    with pytest.raises(FormatError, match=reason):
        decode_manifest(msgspec.json.encode(broken), run_id="run1", version=7)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        raw(format=2),
        raw(extra=1),
        raw(version=-1),
        raw(version=10**12),
        raw(version=7.5),
        raw(version="7"),
        raw(step=2**70),
        raw(root="AB" * 32),
        raw(root="ab" * 31),
        raw(run_id="../run1"),
        raw(run_id="a\x00b"),
        raw(writer="x" * 129),
        raw(anchor="objects"),
        raw(
            deltas=[{"base": 6, "base_root": BASE_ROOT, "objects": [{"digest": "../x", "size": 1}]}]
        ),
        raw(
            deltas=[
                {"base": 6, "base_root": BASE_ROOT, "objects": [{"digest": ROOT, "size": 2**33}]}
            ]
        ),
        raw(
            deltas=[{"base": 6, "base_root": BASE_ROOT, "objects": [{"digest": ROOT, "size": -1}]}]
        ),
        raw(deltas=[]),
    ],
)
def test_what_is_no_manifest_is_a_format_error(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode_manifest(data, run_id="run1", version=7)


def test_counts_have_bounds() -> None:
    deltas = [
        {"base": i, "base_root": BASE_ROOT, "objects": [{"digest": ROOT, "size": 1}]}
        for i in range(65)
    ]
    with pytest.raises(FormatError, match="length <= 64"):
        decode_manifest(raw(deltas=deltas), run_id="run1", version=7)
    objects = [{"digest": f"{i:064x}", "size": 1} for i in range(4097)]
    with pytest.raises(FormatError, match="length <= 4096"):
        decode_manifest(raw(anchor=objects), run_id="run1", version=7)


def test_case_101_ten_million_entries_are_refused_at_once() -> None:
    """Case 101: refused by size, before anything is parsed."""
    data = b'{"anchor":[' + b"{}," * 10_000_000 + b"{}]}"
    started = time.perf_counter()
    with pytest.raises(LimitError, match=str(MAX_MANIFEST_BYTES)):
        decode_manifest(data, run_id="run1", version=7)
    assert time.perf_counter() - started < 0.1


class _Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize(
    "decode", [lambda d: decode_manifest(d, run_id="r", version=0), decode_run_record]
)
def test_case_097_a_pickle_is_refused_and_not_run(decode: Any, tmp_path: Path) -> None:
    """Case 097."""
    canary = tmp_path / "canary"
    buffer = io.BytesIO()
    pickle.Pickler(buffer).dump(_Canary(canary))
    with pytest.raises(FormatError, match="not JSON"):
        decode(buffer.getvalue())
    assert not canary.exists()


@given(st.binary(max_size=300))
def test_any_bytes_decode_or_raise_a_format_error(data: bytes) -> None:
    for decode in (lambda d: decode_manifest(d, run_id="r", version=0), decode_run_record):
        with pytest.raises(FormatError):
            decode(data)


@given(st.data())
def test_a_damaged_manifest_is_refused_or_still_a_checked_one(data: st.DataObject) -> None:
    good = bytearray(encode_manifest(manifest()))
    position = data.draw(st.integers(0, len(good) - 1))
    good[position] = data.draw(st.integers(0, 255))
    try:
        found = decode_manifest(bytes(good), run_id="run1", version=7)
    except (FormatError, RunMismatchError):
        return
    assert found.version == 7
    assert found.run_id == "run1"


def test_no_value_from_the_wire_is_repeated_in_a_message() -> None:
    with pytest.raises(FormatError) as caught:
        decode_manifest(raw(root="SENTINELSECRET"), run_id="run1", version=7)
    assert "SENTINELSECRET" not in str(caught.value)


def test_version_keys() -> None:
    assert version_key(12) == "versions/000000000012.json"
    assert parse_version_key(version_key(12)) == 12
    for key in ("versions/12.json", "versions/000000000012.json.tmp", "versions/", "x"):
        assert parse_version_key(key) is None
