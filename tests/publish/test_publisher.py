"""What is published is what is rebuilt, whatever the dtype, layout and history."""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farcast.delta import all_bits
from farcast.errors import ConfigError, RunMismatchError, TensorMismatchError
from farcast.lineage import RunRecord
from farcast.publish import Publisher
from farcast.replica import MemoryTarget, Subscriber
from farcast.store import CountingStore, MemoryStore, threads
from farcast.store.archive import Archive
from version_world import RUN, bits_of, contents, copied, keys, rebuilt, tensors

torch = pytest.importorskip("torch")


def test_every_version_rebuilds_to_what_was_published() -> None:
    store = MemoryStore()
    with Publisher(store, RUN, anchor_every=4) as publisher:
        refs = [publisher.publish(tensors(step), step=step) for step in range(11)]
    assert [ref.version for ref in refs] == list(range(11))
    archive = Archive(store, RUN)
    for step, ref in enumerate(refs):
        assert rebuilt(store, step) == bits_of(tensors(step))
        manifest = archive.manifest(step)
        assert manifest.ref == ref
        assert (manifest.anchor is not None) == (step % 4 == 0)
        assert [delta.base for delta in manifest.deltas] == ([step - 1] if step else [])
        assert manifest.changed == (2 if step else manifest.elements)


def test_case_005_an_anchor_alone_is_enough() -> None:
    """Case 005: only `a` changes at the anchor's version; everything is in it all the same."""
    store = MemoryStore()
    publisher = Publisher(store, RUN, anchor_every=2)
    values = tensors()
    for step in range(3):
        values["a"][0, 0] = step
        publisher.publish(values, step=step)
    archive = Archive(store, RUN)
    anchor = archive.manifest(2).anchor
    assert anchor is not None
    for key in keys(store, "objects/"):
        if key.removeprefix("objects/") not in {ref.digest for ref in anchor}:
            store.delete(key)
    assert rebuilt(store, 2) == bits_of(values)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([4.0], dtype=torch.bfloat16)),
        (np.array([0x3F800000], "<u4").view("<f4"), np.array([0x40000000], "<u4").view("<f4")),
        (np.array([1], np.int64), np.array([2**32 + 1], np.int64)),
        (np.array([0.0], np.float32), np.array([-0.0], np.float32)),
        (np.array([0x7FC00000], "<u4").view("<f4"), np.array([0x7FC00001], "<u4").view("<f4")),
    ],
)
def test_case_007_no_change_is_overlooked(before: Any, after: Any) -> None:
    """Case 007."""
    store = MemoryStore()
    publisher = Publisher(store, RUN)
    publisher.publish({"w": before}, step=0)
    publisher.publish({"w": after}, step=1)
    assert Archive(store, RUN).manifest(1).changed == 1
    assert rebuilt(store, 1) == bits_of({"w": after})


def every_pattern() -> dict[str, Any]:
    """A tensor with all bit patterns, or a spread of them, for each dtype."""
    one = np.arange(256, dtype=np.uint8)
    two = np.arange(1 << 16, dtype=np.uint16)
    wide = np.random.default_rng(1).integers(0, 256, 64 * 64, dtype=np.uint8)
    made: dict[str, Any] = {
        f"torch.{dtype}": torch.from_numpy(source.copy()).view(getattr(torch, dtype))
        for dtype, source in {
            "float8_e4m3fn": one,
            "float8_e5m2": one,
            "float8_e8m0fnu": one,
            "bfloat16": two,
            "float16": two,
            "float32": wide,
            "float64": wide,
            "complex64": wide,
            "uint16": two,
        }.items()
    }
    for kind in ("int", "uint"):
        for width in (8, 16, 32, 64):
            source = one if width == 8 else wide
            made[f"numpy.{kind}{width}"] = source.view(f"{kind}{width}")
    for width in (16, 32, 64):
        made[f"numpy.float{width}"] = wide.view(f"float{width}")
    made["numpy.complex64"] = wide.view(np.complex64)
    made["numpy.bool"] = np.arange(64) % 3 == 0
    return made


def test_case_009_every_bit_pattern_of_every_dtype_survives() -> None:
    """Case 009, as first version and as a delta onto other bits."""
    store = MemoryStore()
    publisher = Publisher(store, RUN)
    patterns = every_pattern()
    turned = {
        name: value[::-1]
        if isinstance(value, np.ndarray)
        else value.flip(0)
        if value.dtype in (torch.float32, torch.bfloat16)
        else value
        for name, value in patterns.items()
    }
    publisher.publish(patterns, step=0)
    publisher.publish(turned, step=1)
    publisher.publish(patterns, step=2)
    for version, values in enumerate((patterns, turned, patterns)):
        assert rebuilt(store, version) == bits_of(values)


def test_case_021_unchanged_weights_give_empty_deltas_and_are_never_written_into() -> None:
    """Case 021."""
    store = MemoryStore()
    publisher = Publisher(store, RUN, anchor_every=100)
    values = tensors()
    before = bits_of(values)
    for step in range(50):
        publisher.publish(values, step=step)
    assert bits_of(values) == before
    archive = Archive(store, RUN)
    assert [archive.manifest(v).changed for v in range(1, 50)] == [0] * 49
    assert all(archive.manifest(v).deltas[0].objects == () for v in range(1, 50))
    assert rebuilt(store, 49) == before


def test_case_033_memory_layout_does_not_matter() -> None:
    """Case 033."""
    w = np.arange(24, dtype=np.float32).reshape(4, 6)
    layouts = {
        "transposed": w.T,
        "strided": w[:, ::2],
        "fortran": np.asfortranarray(w),
        "broadcast": np.broadcast_to(w[0], (3, 6)),
        "negative": w[::-1, ::-1],
        "big endian": w.astype(">f4"),
        "scalar": np.float32(3).reshape(()),
        "empty": np.zeros((0, 5), np.float32),
        "torch transposed": torch.from_numpy(w.copy()).T,
    }
    wanted = {
        name: np.ascontiguousarray(np.asarray(value).astype("<f4")).reshape(np.shape(value))
        for name, value in layouts.items()
    }
    store = MemoryStore()
    publisher = Publisher(store, RUN)
    publisher.publish(layouts, step=0)
    publisher.publish({name: value + 1 for name, value in layouts.items()}, step=1)
    assert rebuilt(store, 0) == bits_of(wanted)
    assert rebuilt(store, 1) == bits_of({name: value + 1 for name, value in wanted.items()})


_OTHER_PROCESS = """
import sys
from farcast.publish import Publisher
from farcast.replica import MemoryTarget, Subscriber
from farcast.store import open_store
from version_world import RUN, tensors
publisher = Publisher(open_store(sys.argv[1]), RUN, anchor_every=3, writer="other")
for step in range(5):
    publisher.publish(tensors(step), step=step)
"""


def test_case_037_equal_tensors_give_equal_objects_in_any_process(tmp_path: Path) -> None:
    """Case 037."""
    stores = MemoryStore(), MemoryStore()
    for store in stores:
        publisher = Publisher(store, RUN, anchor_every=3, writer="same")
        for step in range(5):
            publisher.publish(dict(reversed(tensors(step).items())), step=step)
    assert contents(stores[0]) == contents(stores[1])
    env = {"PYTHONPATH": str(Path(__file__).parent.parent), "PATH": "", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-c", _OTHER_PROCESS, str(tmp_path)], check=True, timeout=60, env=env
    )
    from farcast.store import open_store

    assert contents(open_store(tmp_path), "objects/") == contents(stores[0], "objects/")


def test_case_063_a_restarted_trainer_goes_on_after_the_newest_version() -> None:
    """Case 063."""
    store = MemoryStore()
    first = Publisher(store, RUN)
    for step in range(8):
        first.publish(tensors(step), step=step)
    again = Publisher(store, RUN)
    assert again.newest is not None
    assert again.newest.version == 7
    ref = again.publish(tensors(8), step=8)
    assert ref.version == 8
    manifest = Archive(store, RUN).manifest(8)
    assert [delta.base for delta in manifest.deltas] == [7]
    assert manifest.changed == 2
    assert rebuilt(store, 8) == bits_of(tensors(8))


def test_case_095_repeating_the_newest_version_changes_nothing() -> None:
    """Case 095: crash after the manifest of v8, resume from the checkpoint of v7."""
    store = MemoryStore()
    first = Publisher(store, RUN, anchor_every=4)
    for step in range(9):
        ref = first.publish(tensors(step), step=step)
    before = contents(store)
    again = Publisher(store, RUN, anchor_every=4)
    assert again.publish(tensors(8), step=8) == ref
    assert again.last is not None
    assert not again.last.written
    assert again.last.bytes_sent == 0
    assert contents(store) == before
    other = again.publish(tensors(8, seed=9), step=8)
    assert other.version == 9
    assert rebuilt(store, 8) == bits_of(tensors(8))
    assert rebuilt(store, 9) == bits_of(tensors(8, seed=9))


def test_tensors_may_come_go_and_change_their_shape_or_dtype() -> None:
    store = MemoryStore()
    publisher = Publisher(store, RUN, anchor_every=100, part_bytes=64)
    versions: list[dict[str, Any]] = [
        tensors(),
        tensors(names=("b", "c", "d")),
        {**tensors(), "a": tensors()["a"].astype(np.float64)},
        {**tensors(), "b": tensors()["b"].reshape(8, 16)},
        {"a": tensors()["a"], "empty": np.zeros((3, 0), np.int8)},
        {"a": tensors()["a"]},
    ]
    for step, values in enumerate(versions):
        publisher.publish(values, step=step)
    for step, values in enumerate(versions):
        assert rebuilt(store, step) == bits_of(values)


def test_large_versions_are_cut_into_objects_of_bounded_size() -> None:
    store = MemoryStore()
    publisher = Publisher(store, RUN, part_bytes=1 << 12, workers=3)
    rng = np.random.default_rng(0)
    values = {f"w{i:02}": rng.integers(0, 255, 1000, dtype=np.uint8) for i in range(20)}
    publisher.publish(values, step=0)
    after = copied(values)
    after["w03"][5] ^= 1
    after["w17"][5] ^= 1
    publisher.publish(after, step=1)
    archive = Archive(store, RUN)
    anchor = archive.manifest(0).anchor
    assert anchor is not None
    assert len(anchor) == 5
    assert len(archive.manifest(1).deltas[0].objects) == 2
    assert rebuilt(store, 1) == bits_of(after)


def test_steady_state_writes_two_objects_and_reads_the_manifest_before() -> None:
    store = CountingStore(MemoryStore())
    publisher = Publisher(store, RUN, anchor_every=100)
    publisher.publish(tensors(0), step=0)
    before = store.traffic.requests
    for step in range(1, 11):
        publisher.publish(tensors(step), step=step)
    after = store.traffic.requests
    assert {verb: after[verb] - before.get(verb, 0) for verb in after} == {
        "get": 10,
        "list": 0,
        "put": 20,
    }


def test_reports_add_up() -> None:
    store = CountingStore(MemoryStore())
    publisher = Publisher(store, RUN, anchor_every=2)
    for step in range(4):
        publisher.publish(tensors(step), step=step)
        report = publisher.last
        assert report is not None
        assert (report.step, report.anchor) == (step, step % 2 == 0)
        assert report.bytes_full == sum(value.nbytes for value in tensors().values())
    assert publisher.totals.versions == 4
    assert publisher.totals.bytes_sent == store.traffic.bytes_up
    assert publisher.totals.waited_seconds >= publisher.totals.encode_seconds
    publisher.publish(tensors(3), step=3)  # there already
    assert publisher.totals.versions == 4
    assert publisher.totals.bytes_full == 4 * report.bytes_full


def test_a_store_of_another_run_is_refused() -> None:
    store = MemoryStore()
    Publisher(store, "run-a").publish(tensors(), step=0)
    with pytest.raises(RunMismatchError, match="'run-a', not to 'run-b'"):
        Publisher(store, "run-b")
    store = MemoryStore()
    Archive(store, "run-a").create_run(RunRecord(run_id="run-a", created="now"))
    with pytest.raises(RunMismatchError, match="'run-a', not to 'run-b'"):
        Publisher(store, "run-b")


def test_two_runs_that_race_for_an_empty_store() -> None:
    store = MemoryStore()
    first, second = Publisher(store, "run-a"), Publisher(store, "run-b")
    first.publish(tensors(), step=0)
    with pytest.raises(RunMismatchError):
        second.publish(tensors(), step=0)


@pytest.mark.parametrize(
    "options",
    [{"anchor_every": 0}, {"writer": "a/b"}, {"served_format": ""}, {"writer": "x" * 200}],
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Publisher(MemoryStore(), RUN, **options)
    with pytest.raises(ConfigError):
        Publisher(MemoryStore(), "../run")


def test_calls_are_checked() -> None:
    store = MemoryStore()
    publisher = Publisher(store, RUN)
    with pytest.raises(ConfigError, match="no tensor"):
        publisher.publish(iter([]), step=0)
    with pytest.raises(ConfigError, match="step"):
        publisher.publish(tensors(), step=-1)
    with pytest.raises(TensorMismatchError, match="twice"):
        publisher.publish([("a", np.zeros(3)), ("a", np.ones(3))], step=0)
    publisher.close()
    for publish in (publisher.publish, publisher.publish_async):
        with pytest.raises(ConfigError, match="closed"):
            publish(tensors(), step=0)
    assert keys(store) == []


def test_case_093_wrapped_and_bare_models_publish_identical_objects() -> None:
    """Case 093."""
    bare, wrapped = MemoryStore(), MemoryStore()
    w = np.arange(12, dtype=np.float32)
    Publisher(bare, RUN, writer="w").publish({"a.w": w, "layers.0.w": w + 1}, step=0)
    Publisher(wrapped, RUN, writer="w").publish(
        {"_orig_mod.module.a.w": w, "layers.0._orig_mod.w": w + 1}, step=0
    )
    assert contents(bare) == contents(wrapped)
    with pytest.raises(TensorMismatchError, match="both"):
        Publisher(MemoryStore(), RUN).publish({"a.w": w, "_orig_mod.a.w": w}, step=0)


def test_buffers_of_wrapped_names_are_used_again() -> None:
    store = MemoryStore()
    with Publisher(store, RUN) as publisher:
        for step in range(4):
            values = {f"_orig_mod.{n}": v for n, v in tensors(step).items()}
            publisher.publish_async(values, step=step)
    assert rebuilt(store, 3) == bits_of(tensors(3))


def test_case_103_secrets_of_the_environment_appear_nowhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 103."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SENTINELSECRET")
    caplog.set_level(logging.DEBUG)
    store = MemoryStore()
    publisher = Publisher(store, RUN)
    publisher.publish(tensors(), step=0)
    assert "SENTINELSECRET" not in caplog.text
    assert "SENTINELSECRET" not in repr(publisher)
    assert not any(b"SENTINELSECRET" in data for data in contents(store).values())


def test_a_step_taken_again_gets_its_own_number_where_that_is_asked_for() -> None:
    store = MemoryStore()
    served = {"w": np.arange(8, dtype=np.float32)}
    first = Publisher(store, RUN).publish(served, 1)
    again = Publisher(store, RUN, repeats=False).publish(served, 1)
    assert (again.version, again.root) == (first.version + 1, first.root)
    assert Archive(store, RUN).restore(again.version).ref == again


def test_threads_change_no_object_and_no_version() -> None:
    stores = MemoryStore(), MemoryStore()
    for store, number in zip(stores, (1, 3), strict=True):
        with Publisher(
            store, RUN, anchor_every=3, squash=2, writer="same", threads=number
        ) as publisher:
            for step in range(6):
                publisher.publish(tensors(step), step=step)
        assert Archive(store, RUN, threads=number).rebuild(5).keys() == tensors(5).keys()
    assert contents(stores[0]) == contents(stores[1])
    target = MemoryTarget()
    subscriber = Subscriber(stores[0], RUN, target, threads=3)
    for version in (2, 4, 5):
        assert subscriber.sync(version).version == version
        assert target.tensors == all_bits(tensors(version))
    with pytest.raises(ConfigError, match="threads is 0"):
        Publisher(MemoryStore(), RUN, threads=0)


def test_the_default_leaves_half_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, 1), (2, 1), (4, 2), (64, 4)):
        monkeypatch.setattr(threads, "available_cores", lambda cores=cores: cores)
        assert threads.default_threads() == expected
