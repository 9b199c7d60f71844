"""A run inside a store: created once, read with checks, asked for by key, rebuilt to its root."""

import io
import pickle
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from msgspec.structs import replace

from farcast.delta import TensorBits, encode_bits, root_of, to_bits
from farcast.errors import (
    FarcastError,
    FormatError,
    IntegrityError,
    LimitError,
    ObjectNotFoundError,
    RunMismatchError,
    StoreUnavailableError,
    UnknownVersionError,
    VersionConflictError,
)
from farcast.lineage import (
    Delta,
    Manifest,
    ObjectRef,
    RunRecord,
    encode_manifest,
    object_key,
    version_key,
)
from farcast.store import CountingStore, MemoryStore, Store
from farcast.store.archive import PROBES, Archive
from farcast.store.testing import Fail, FaultStore, LoseReply, Rule
from farcast.types import VersionRef
from version_world import RUN, bits_of, plain, tensors

Bits = dict[str, TensorBits]


def bits(step: int = 0) -> Bits:
    return {name: to_bits(value) for name, value in tensors(step).items()}


class Writer:
    """Writes versions by hand, so that a test can write wrong ones."""

    def __init__(self, store: Store) -> None:
        self.archive = Archive(store, RUN, workers=1)
        self.last: tuple[Manifest, Bits] | None = None

    def write(self, values: Bits, *, anchor: bool = False, **changes: Any) -> Manifest:
        full = encode_bits({}, values)
        version = 0 if self.last is None else self.last[0].version + 1
        deltas: tuple[Delta, ...] = ()
        if self.last is not None:
            manifest, base = self.last
            data = encode_bits(base, values).data
            objects = (self.archive.put_object(data),)
            deltas = (Delta(base=manifest.version, base_root=manifest.root, objects=objects),)
        anchored = anchor or self.last is None
        made = Manifest(
            run_id=RUN,
            version=version,
            root=root_of(full.entries),
            step=version,
            served_format="bf16",
            tensors=len(values),
            elements=full.elements,
            bytes_full=sum(b.data.nbytes for b in values.values()),
            changed=1,
            anchor_version=version
            if anchored or self.last is None
            else self.last[0].anchor_version,
            anchor=(self.archive.put_object(full.data),) if anchored else None,
            deltas=deltas,
            writer="w1",
        )
        made = replace(made, **changes)
        self.archive.commit_manifest(made)
        self.last = made, values
        return made


def filled(store: Store, versions: int) -> Writer:
    writer = Writer(store)
    for step in range(versions):
        writer.write(bits(step))
    return writer


# --- the run ---------------------------------------------------------------------------------


def test_a_run_is_created_once() -> None:
    store = MemoryStore()
    record = RunRecord(run_id=RUN, created="monday", settings="{}")
    assert Archive(store, RUN).create_run(record) == record
    assert Archive(store, RUN).open_run() == record
    # A trainer that starts again later finds its own run.
    assert Archive(store, RUN).create_run(replace(record, created="tuesday")) == record
    with pytest.raises(RunMismatchError, match="other assets or settings"):
        Archive(store, RUN).create_run(replace(record, settings="[]"))
    with pytest.raises(RunMismatchError, match="'run1', not to 'run2'"):
        Archive(store, "run2").create_run(replace(record, run_id="run2"))
    with pytest.raises(RunMismatchError, match="'run1', not to 'run2'"):
        Archive(store, "run2").open_run()
    with pytest.raises(RunMismatchError):
        Archive(store, "run2").create_run(record)


def test_a_lost_reply_to_the_creation_is_no_conflict() -> None:
    store = FaultStore()
    store.add(Rule(LoseReply(), verb="put"))
    record = RunRecord(run_id=RUN, created="monday")
    with pytest.raises(StoreUnavailableError):
        Archive(store, RUN).create_run(record)
    assert Archive(store, RUN).create_run(record) == record


def test_no_run_is_not_found() -> None:
    with pytest.raises(ObjectNotFoundError):
        Archive(MemoryStore(), RUN).open_run()


# --- versions --------------------------------------------------------------------------------


def test_newest_of_nothing_and_of_much() -> None:
    store = MemoryStore()
    assert Archive(store, RUN).newest() is None
    writer = filled(store, 30)
    store.put("versions/readme.txt", b"not a manifest")
    found = Archive(store, RUN).newest()
    assert found is not None
    assert writer.last is not None
    assert found == writer.last[0]


def test_steady_state_asks_by_key_and_never_lists() -> None:
    store = CountingStore(MemoryStore())
    writer = Writer(store)
    reader = Archive(store, RUN)
    reader.newest()
    writer.write(bits(0))
    assert reader.newest() is not None
    before = store.traffic.requests
    for step in range(1, 11):
        writer.write(bits(step))
        found = reader.newest()
        assert found is not None
        assert found.version == step
        reader.plan(VersionRef(RUN, step - 1, reader.manifest(step - 1).root), found.ref)
    after = store.traffic.requests
    assert after["list"] == before["list"]
    # One finds the version, one finds that there is no other; the writer looks at the one before.
    assert after["get"] - before["get"] == 30
    polls = store.traffic.requests["get"]
    for _ in range(5):
        reader.newest()
    assert store.traffic.requests["get"] - polls == 5


def test_a_reader_far_behind_lists_once() -> None:
    store = CountingStore(MemoryStore())
    writer = filled(store, 1)
    reader = Archive(store, RUN)
    reader.newest()
    for step in range(1, 60):
        writer.write(bits(step))
    before = store.traffic
    found = reader.newest()
    assert found is not None
    assert found.version == 59
    assert store.traffic.requests["list"] - before.requests["list"] == 1
    assert store.traffic.requests["get"] - before.requests["get"] <= PROBES + 2


def test_a_gap_is_seen_by_listing_again() -> None:
    store = MemoryStore()
    writer = filled(store, 1)
    reader = Archive(store, RUN)
    reader.newest()
    for step in range(1, 9):
        writer.write(bits(step), anchor=step == 5)
    for version in range(5):
        store.delete(version_key(version))
    found = reader.newest()
    assert found is not None
    assert found.version == 0
    found = reader.newest(relist=True)
    assert found is not None
    assert found.version == 8
    assert plain(Archive(store, RUN).rebuild(8)) == bits_of(tensors(8))


def test_unknown_versions() -> None:
    archive = Archive(MemoryStore(), RUN)
    for version in (0, 5, -1, 10**12, 10**30):
        with pytest.raises(UnknownVersionError):
            archive.manifest(version)


def test_manifests_are_kept() -> None:
    store = CountingStore(MemoryStore())
    filled(store, 2)
    before = store.traffic.requests["get"]
    archive = Archive(store, RUN)
    for _ in range(5):
        archive.manifest(1)
    assert store.traffic.requests["get"] - before == 1


def test_manifests_for_is_what_a_plan_needs() -> None:
    store = MemoryStore()
    filled(store, 9)
    archive = Archive(store, RUN)
    refs = [archive.manifest(version).ref for version in range(9)]
    from farcast.lineage import plan

    for have in (None, refs[3], refs[7], refs[8]):
        manifests = archive.manifests_for(have, refs[8])
        assert plan(have, refs[8], manifests) == archive.plan(have, refs[8])
    assert set(archive.manifests_for(refs[7], refs[8])) == {8}


def test_a_far_plan_in_a_run_of_single_deltas() -> None:
    store = MemoryStore()
    filled(store, 60)
    archive = Archive(store, RUN)
    ref = archive.manifest(59).ref
    assert len(archive.plan(None, ref).steps) == 60
    assert len(archive.plan(archive.manifest(2).ref, ref).steps) == 57
    store.delete(version_key(30))
    with pytest.raises(UnknownVersionError, match="newer version"):
        Archive(store, RUN).plan(None, ref)


def test_a_commit_is_judged_by_what_is_there() -> None:
    store = FaultStore()
    writer = filled(store, 1)
    assert writer.last is not None
    manifest = writer.last[0]
    writer.archive.commit_manifest(manifest)  # again: the same bytes
    Archive(store, RUN).commit_manifest(manifest)
    with pytest.raises(VersionConflictError, match="published by 'w1', not by 'w2'"):
        writer.archive.commit_manifest(replace(manifest, writer="w2"))
    with pytest.raises(RunMismatchError):
        Archive(store, "run2").commit_manifest(manifest)
    with pytest.raises(RunMismatchError):
        Archive(store, "run2").commit_manifest(replace(manifest, run_id="run2"))


# --- objects ---------------------------------------------------------------------------------


def test_objects_are_named_by_their_bytes() -> None:
    store = MemoryStore()
    archive = Archive(store, RUN)
    ref = archive.put_object(b"some bytes")
    assert ref == ObjectRef(digest=blake3(b"some bytes").hexdigest(), size=10)
    assert archive.put_object(b"some bytes") == ref
    assert archive.get_object(ref) == b"some bytes"
    refs = archive.put_objects(bytes([i]) * i for i in range(20))
    assert list(archive.get_objects(refs)) == [bytes([i]) * i for i in range(20)]
    assert [ref.size for ref in refs] == list(range(20))


@pytest.mark.parametrize("damage", [b"some byteZ", b"some byte", b"some bytes and more", b""])
def test_a_damaged_object_is_refused_and_replaced_when_put_again(damage: bytes) -> None:
    store = MemoryStore()
    archive = Archive(store, RUN)
    ref = archive.put_object(b"some bytes")
    store.put(object_key(ref), damage)
    with pytest.raises((IntegrityError, LimitError)):
        archive.get_object(ref)
    assert archive.put_object(b"some bytes") == ref
    assert archive.get_object(ref) == b"some bytes"


def test_no_more_is_read_than_the_reference_says() -> None:
    store = MemoryStore()
    archive = Archive(store, RUN)
    ref = archive.put_object(b"x" * 100)
    with pytest.raises(LimitError):
        archive.get_object(replace(ref, size=99))
    with pytest.raises(IntegrityError):
        archive.get_object(replace(ref, size=101))


def test_the_first_error_of_many_transfers_is_raised() -> None:
    store = FaultStore()
    archive = Archive(store, RUN, workers=4)
    store.add(Rule(Fail(), verb="put", nth=5))
    made = []

    def parts() -> Any:
        for index in range(100):
            made.append(index)
            yield bytes([index])

    with pytest.raises(StoreUnavailableError):
        archive.put_objects(parts())
    assert len(made) < 20


# --- content ---------------------------------------------------------------------------------


@pytest.mark.parametrize("have", [None, 0, 2, 3, 5, 8])
def test_rebuilds_from_anything(have: int | None) -> None:
    store = MemoryStore()
    writer = Writer(store)
    for step in range(9):
        writer.write(bits(step), anchor=step == 4)
    archive = Archive(store, RUN)
    seen: list[tuple[int, int]] = []
    for version in range(9):
        start = None if have is None else (archive.manifest(have).ref, bits(have))
        before = None if start is None else plain(start[1])
        seen.clear()
        found = archive.rebuild(version, start, progress=lambda *done: seen.append(done))
        assert plain(found) == bits_of(tensors(version))
        assert start is None or plain(start[1]) == before
        if seen:
            assert seen[-1][0] == seen[-1][1]


def test_a_wrong_start_is_refused() -> None:
    store = MemoryStore()
    filled(store, 3)
    archive = Archive(store, RUN)
    with pytest.raises(IntegrityError, match="not those of"):
        archive.rebuild(2, (archive.manifest(1).ref, bits(0)))


def swapped_objects(store: MemoryStore, writer: Writer) -> None:
    """The delta to 2 is what leads from 0 to 1."""
    first = writer.archive.manifest(1)
    second = writer.archive.manifest(2)
    wrong = replace(second, deltas=(replace(second.deltas[0], objects=first.deltas[0].objects),))
    store.put(version_key(2), encode_manifest(wrong))


def wrong_root(store: MemoryStore, writer: Writer) -> None:
    store.put(version_key(2), encode_manifest(replace(writer.archive.manifest(2), root="ab" * 32)))


def wrong_counts(store: MemoryStore, writer: Writer) -> None:
    manifest = writer.archive.manifest(2)
    store.put(version_key(2), encode_manifest(replace(manifest, bytes_full=1)))


def wrong_base(store: MemoryStore, writer: Writer) -> None:
    """The delta to 2 is said to start from 0."""
    manifest = writer.archive.manifest(2)
    base = writer.archive.manifest(0)
    wrong = replace(manifest.deltas[0], base=0, base_root=base.root)
    store.put(version_key(2), encode_manifest(replace(manifest, deltas=(wrong,))))


def delta_as_anchor(store: MemoryStore, writer: Writer) -> None:
    manifest = writer.archive.manifest(2)
    objects = manifest.deltas[0].objects
    wrong = replace(manifest, anchor=objects, anchor_version=2, deltas=())
    store.put(version_key(2), encode_manifest(wrong))


def doubled_part(store: MemoryStore, writer: Writer) -> None:
    manifest = writer.archive.manifest(2)
    more = encode_bits(bits(1), bits(3)).data
    objects = (*manifest.deltas[0].objects, writer.archive.put_object(more))
    wrong = replace(manifest, deltas=(replace(manifest.deltas[0], objects=objects),))
    store.put(version_key(2), encode_manifest(wrong))


def lost_object(store: MemoryStore, writer: Writer) -> None:
    store.delete(object_key(writer.archive.manifest(2).deltas[0].objects[0]))


def garbage_object(store: MemoryStore, writer: Writer) -> None:
    manifest = writer.archive.manifest(2)
    objects = (writer.archive.put_object(b"\x80\x04garbage"),)
    wrong = replace(manifest, deltas=(replace(manifest.deltas[0], objects=objects),))
    store.put(version_key(2), encode_manifest(wrong))


@pytest.mark.parametrize(
    ("tamper", "error"),
    [
        (swapped_objects, FarcastError),
        (wrong_root, IntegrityError),
        (wrong_counts, IntegrityError),
        (wrong_base, FarcastError),
        (delta_as_anchor, FormatError),
        (doubled_part, FormatError),
        (lost_object, ObjectNotFoundError),
        (garbage_object, FormatError),
    ],
)
def test_a_hostile_store_gets_a_typed_refusal(
    tamper: Callable[[MemoryStore, Writer], None], error: type[FarcastError]
) -> None:
    store = MemoryStore()
    tamper(store, filled(store, 3))
    archive = Archive(store, RUN)
    with pytest.raises(error):
        archive.rebuild(2)
    assert plain(archive.rebuild(1)) == bits_of(tensors(1))


class _Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_case_097_a_pickle_is_refused_wherever_it_lies(tmp_path: Path) -> None:
    """Case 097: as manifest, run record and object."""
    canary = tmp_path / "canary"
    buffer = io.BytesIO()
    pickle.Pickler(buffer).dump(_Canary(canary))
    store = MemoryStore()
    writer = filled(store, 1)
    store.put(version_key(1), buffer.getvalue())
    store.put("run.json", buffer.getvalue())
    archive = Archive(store, RUN)
    with pytest.raises(FormatError):
        archive.manifest(1)
    newest = archive.newest()
    assert newest is not None
    assert newest.version == 0  # passed over, and named
    assert isinstance(archive.damaged[1], FormatError)
    with pytest.raises(FormatError):
        archive.open_run()
    store.delete(version_key(1))
    assert writer.last is not None
    anchor = (archive.put_object(buffer.getvalue()),)
    store.put(version_key(0), encode_manifest(replace(writer.last[0], anchor=anchor)))
    with pytest.raises(FormatError):
        Archive(store, RUN).rebuild(0)
    assert not canary.exists()


def test_case_101_a_manifest_of_ten_million_entries_is_not_even_read() -> None:
    """Case 101."""
    store = MemoryStore()
    store.put(version_key(0), b'{"anchor":[' + b"{}," * 10_000_000 + b"{}]}")
    tracemalloc.start()
    started = time.perf_counter()
    with pytest.raises(LimitError):
        Archive(store, RUN).newest()
    assert time.perf_counter() - started < 0.5
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_the_base_given_is_not_kept_hostage() -> None:
    """What a rebuild returns for unchanged tensors is the caller's own memory, not a copy."""
    store = MemoryStore()
    filled(store, 2)
    archive = Archive(store, RUN)
    start = bits(0)
    found = archive.rebuild(1, (archive.manifest(0).ref, start))
    assert np.shares_memory(found["c"].data, start["c"].data)
    assert not np.shares_memory(found["a"].data, start["a"].data)
