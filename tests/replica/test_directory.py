"""A checkpoint folder holds one whole version, whatever happens to the process or the disk."""

import errno
import gc
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from replica_world import SHAPES, World, held, weights

from farcast.delta import to_bits
from farcast.errors import (
    FarcastError,
    FormatError,
    IntegrityError,
    RunMismatchError,
    TargetChangedError,
    TargetError,
    TargetFullError,
    TensorMismatchError,
)
from farcast.replica import CheckpointDirectory, Subscriber, files
from farcast.replica.layout import INDEX, SINGLE
from farcast.store import open_store
from version_world import RUN, bits_of

SHARDED: Mapping[str, Any] = {"max_shard_bytes": 600}


def loaded(folder: Path) -> dict[str, np.ndarray]:
    """What an engine loads: the single file, or the files of the index and nothing else."""
    if (folder / SINGLE).exists():
        assert not (folder / INDEX).exists()
        return safetensors.numpy.load_file(folder / SINGLE)
    where = json.loads((folder / INDEX).read_text())["weight_map"]
    shards = {name: safetensors.numpy.load_file(folder / name) for name in set(where.values())}
    return {name: shards[file][name] for name, file in where.items()}


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".farcast")


def hf_sharded(folder: Path, tensors: Mapping[str, np.ndarray], files_: int = 2) -> None:
    """A folder as the transformers library saves it, in `files_` shards."""
    folder.mkdir(exist_ok=True)
    names = sorted(tensors)
    where: dict[str, str] = {}
    for number in range(files_):
        name = f"model-{number + 1:05d}-of-{files_:05d}.safetensors"
        part = {key: tensors[key] for key in names[number::files_]}
        safetensors.numpy.save_file(part, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 1, "kept": "yes"}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index))


@pytest.fixture
def world() -> World:
    world = World()
    for _ in range(3):
        world.publish()
    return world


@pytest.mark.parametrize("options", [{}, SHARDED], ids=["single", "sharded"])
def test_an_engine_can_load_every_version(
    world: World, tmp_path: Path, options: dict[str, Any]
) -> None:
    folder = tmp_path / "model"
    for version in range(3):
        subscriber = world.subscriber(CheckpointDirectory(folder, **options))
        subscriber.sync(to=version)
        assert bits_of(loaded(folder)) == bits_of(weights(version))
    assert not list((folder / ".farcast" / "staging").iterdir())
    used = {SINGLE} if not options else {INDEX, *_index(folder).values()}
    assert set(visible(folder)) == used


def test_a_new_process_knows_what_the_folder_holds_without_the_store(
    world: World, tmp_path: Path
) -> None:
    world.subscriber(CheckpointDirectory(tmp_path)).sync(to=1)
    again = CheckpointDirectory(tmp_path)
    assert again.ref == world.refs[1]
    assert again.run_id == RUN
    assert again.verify() == world.refs[1].root


def test_other_files_are_left_alone(world: World, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    world.subscriber(CheckpointDirectory(tmp_path, **SHARDED)).sync()
    assert (tmp_path / "config.json").read_text() == "{}"
    assert {"config.json", "pytorch_model.bin"} < set(visible(tmp_path))


@pytest.mark.parametrize("files_", [1, 2, 3])
def test_a_full_checkpoint_is_recognised_so_that_only_the_delta_is_fetched(
    world: World, tmp_path: Path, files_: int
) -> None:
    if files_ == 1:
        safetensors.numpy.save_file(weights(1), tmp_path / SINGLE)
    else:
        hf_sharded(tmp_path, weights(1), files_)
    subscriber = world.subscriber(CheckpointDirectory(tmp_path))
    plan = subscriber.plan()
    assert plan.have == world.refs[1]
    assert [step.kind for step in plan.steps] == ["delta"]
    subscriber.sync()
    assert bits_of(loaded(tmp_path)) == bits_of(weights(2))
    if files_ > 1:
        assert json.loads((tmp_path / INDEX).read_text())["metadata"]["kept"] == "yes"
        assert {*_index(tmp_path).values(), INDEX} == set(visible(tmp_path))
        size = sum(value.nbytes for value in weights(2).values())
        assert json.loads((tmp_path / INDEX).read_text())["metadata"]["total_size"] == size


def test_a_checkpoint_with_one_other_bit_is_not_believed(world: World, tmp_path: Path) -> None:
    tensors = weights(1)
    tensors["layer.bias"] = tensors["layer.bias"] + 1
    hf_sharded(tmp_path, tensors)
    subscriber = world.subscriber(CheckpointDirectory(tmp_path))
    assert subscriber.plan().have is None
    subscriber.sync()
    assert bits_of(loaded(tmp_path)) == bits_of(weights(2))


def test_a_shard_in_which_nothing_changes_stays_the_same_file(tmp_path: Path) -> None:
    world = World()
    tensors = {f"t{i}": np.full(100, i, np.float32) for i in range(4)}
    world.publish(tensors)
    target = CheckpointDirectory(tmp_path, max_shard_bytes=500)
    subscriber = world.subscriber(target)
    subscriber.sync()
    before = _index(tmp_path)
    world.publish(tensors | {"t2": np.full(100, 9, np.float32)})
    subscriber.sync()
    after = _index(tmp_path)
    assert [name for name in tensors if before[name] != after[name]] == ["t2"]
    assert target.verify() == world.refs[1].root


# --- crashes ---------------------------------------------------------------------------------

CRASHING = """
import os, signal, sys
from pathlib import Path
from farcast.replica import CheckpointDirectory, Subscriber, files
from farcast.store import open_store
url, folder, fatal, shard = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
calls = 0
def dying(original):
    def call(*args):
        global calls
        calls += 1
        if calls == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)
    return call
for name in ("write_at", "move", "remove", "sync", "sync_folder", "create", "keep_copy"):
    setattr(files, name, dying(getattr(files, name)))
target = CheckpointDirectory(folder, max_shard_bytes=shard)
print(Subscriber(open_store(url), "run1", target).sync().version, calls)
"""


@pytest.mark.parametrize("shard", [600, 1 << 30], ids=["sharded", "single"])
def test_case_003_killed_at_any_write_it_restarts_into_a_whole_version(
    tmp_path: Path, shard: int
) -> None:
    url = f"file://{tmp_path / 'store'}"
    world = World(store=open_store(url))  # type: ignore[arg-type]
    for _ in range(2):
        world.publish()
    whole = [bits_of(weights(version)) for version in range(2)]
    seen = set()
    fatal = 0
    while True:
        fatal += 1
        folder = tmp_path / f"model{fatal}"
        options = {"max_shard_bytes": shard}
        world.subscriber(CheckpointDirectory(folder, **options)).sync(to=0)
        process = os.fork()
        if process == 0:
            _die_at(fatal, url, folder, shard)
        _, status = os.waitpid(process, 0)
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        found = bits_of(loaded(folder))
        assert found in whole, f"torn at call {fatal}"
        version = whole.index(found)
        seen.add(version)
        again = CheckpointDirectory(folder, **options)
        assert again.ref == world.refs[version]
        assert world.subscriber(again).sync() == world.refs[1]
        assert bits_of(loaded(folder)) == whole[1]
        _assert_tidy(folder)
    assert fatal > 12
    assert seen == {0, 1}


def _die_at(fatal: int, url: str, folder: Path, shard: int) -> None:
    """In a forked child: sync, but be killed after the `fatal`-th call that changes the disk."""
    calls = 0
    try:
        for name in ("write_at", "move", "remove", "sync", "sync_folder", "create", "keep_copy"):
            original = getattr(files, name)

            def call(*args: Any, original: Any = original) -> Any:
                nonlocal calls
                result = original(*args)
                calls += 1
                if calls == fatal:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            setattr(files, name, call)
        target = CheckpointDirectory(folder, max_shard_bytes=shard)
        Subscriber(open_store(url), RUN, target, workers=1).sync()
        os._exit(0)
    finally:
        os._exit(1)


def test_case_003_killed_before_its_first_version_a_new_process_starts_over(
    tmp_path: Path,
) -> None:
    url = f"file://{tmp_path / 'store'}"
    world = World(store=open_store(url))  # type: ignore[arg-type]
    world.publish()
    for fatal in (1, 4, 8, 12, 14, 20, 21, 22, 23, 24):
        folder = tmp_path / f"model{fatal}"
        command = [sys.executable, "-c", CRASHING, url, str(folder), str(fatal), "600"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        world.subscriber(CheckpointDirectory(folder, **SHARDED)).sync()
        assert bits_of(loaded(folder)) == bits_of(weights(0))
        _assert_tidy(folder)


def _assert_tidy(folder: Path) -> None:
    where = set(_index(folder).values()) | {INDEX} if (folder / INDEX).exists() else {SINGLE}
    assert set(visible(folder)) == where
    assert not list((folder / ".farcast" / "staging").iterdir())


def _index(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return found


# --- disks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, SHARDED], ids=["single", "sharded"])
@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.9, 1.0])
def test_case_041_a_full_disk_leaves_the_old_version(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    fraction: float,
) -> None:
    target = CheckpointDirectory(tmp_path, **options)
    subscriber = world.subscriber(target)
    subscriber.sync(to=0)
    before = visible(tmp_path)
    original = files.write_at
    written: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            files, "write_at", lambda f, d, s: (written.append(len(d)), original(f, d, s))
        )
        twin = CheckpointDirectory(tmp_path.with_name("twin"), **options)
        world.subscriber(twin).sync(to=0)
        written.clear()
        world.subscriber(twin).sync(to=1)
    # Everything up to the renamed pointer; the state is written once more after it.
    room = int((sum(written[:-1]) - 1) * fraction)

    def writes(file: int, data: bytes | memoryview, start: int) -> None:
        nonlocal room
        view = memoryview(data)
        part = view[: max(0, room)]
        room -= len(view)
        original(file, part, start)
        if room < 0:
            raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_at", writes)
        with pytest.raises(TargetFullError, match="Free some space"):
            subscriber.sync(to=1)
    assert target.ref == world.refs[0]
    assert bits_of(loaded(tmp_path)) == bits_of(weights(0))
    assert visible(tmp_path) == before
    assert not list((tmp_path / ".farcast" / "staging").iterdir())
    assert subscriber.sync() == world.refs[2]


@pytest.mark.parametrize("call", ["sync", "move", "sync_folder", "create", "keep_copy"])
def test_any_failing_call_leaves_a_whole_version(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    for failing in range(1, 6):
        folder = tmp_path / str(failing)
        target = CheckpointDirectory(folder, **SHARDED)
        subscriber = world.subscriber(target)
        subscriber.sync(to=0)
        count = 0
        original = getattr(files, call)

        def fails(*args: Any, original: Any = original, failing: int = failing) -> Any:
            nonlocal count
            count += 1
            if count == failing:
                raise OSError(errno.EIO, "broken")
            return original(*args)

        with monkeypatch.context() as patch:
            patch.setattr(files, call, fails)
            try:
                subscriber.sync(to=1)
            except TargetError:
                assert target.ref == world.refs[0]
        ref = target.ref
        assert ref is not None
        assert bits_of(loaded(folder)) == bits_of(weights(ref.version))
        assert subscriber.sync() == world.refs[2]
        _assert_tidy(folder)


def test_a_folder_that_can_not_be_used_is_one_clear_error(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(TargetError, match=r"can't be used \(ENOTDIR"):
        world.subscriber(CheckpointDirectory(tmp_path / "file" / "model")).sync()
    (tmp_path / "file2").write_text("x")
    with pytest.raises(TargetError):
        world.subscriber(CheckpointDirectory(tmp_path / "file2")).sync()


# --- other hands -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, SHARDED], ids=["single", "sharded"])
@pytest.mark.parametrize("when", ["before staging", "before the commit"])
def test_case_045_a_base_file_that_was_replaced_is_not_built_upon(
    world: World, tmp_path: Path, options: dict[str, Any], when: str
) -> None:
    target = CheckpointDirectory(tmp_path, **options)
    subscriber = world.subscriber(target)
    subscriber.sync(to=0)
    victim = tmp_path / (SINGLE if not options else _index(tmp_path)["layer.weight"])
    replacement = tmp_path / "other"
    replacement.write_bytes(victim.read_bytes())
    staged = subscriber.stage() if when == "before the commit" else None
    replacement.replace(victim)
    inode = victim.stat().st_ino
    with pytest.raises(TargetChangedError, match=r"Somebody else replaced|was changed"):
        subscriber.sync() if staged is None else subscriber.commit(staged)
    if staged is not None:
        staged.discard()
    assert victim.stat().st_ino == inode
    assert subscriber.sync() == world.refs[2]
    assert bits_of(loaded(tmp_path)) == bits_of(weights(2))


def test_case_045_a_file_changed_in_place_behind_our_back_is_found(
    world: World, tmp_path: Path
) -> None:
    target = CheckpointDirectory(tmp_path)
    subscriber = world.subscriber(target)
    subscriber.sync(to=0)
    path = tmp_path / SINGLE
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"!")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(TargetChangedError):
        target.verify()
    with pytest.raises((TargetChangedError, IntegrityError)):
        subscriber.sync()
    target.forget()
    assert subscriber.sync() == world.refs[2]


def test_two_processes_do_not_update_one_folder_at_once(world: World, tmp_path: Path) -> None:
    first = world.subscriber(CheckpointDirectory(tmp_path))
    staged = first.stage()
    assert staged is not None
    with pytest.raises(TargetError, match="being updated"):
        world.subscriber(CheckpointDirectory(tmp_path)).stage()
    first.commit(staged)
    assert world.subscriber(CheckpointDirectory(tmp_path)).stage() is None


def test_a_staged_version_that_is_forgotten_gives_the_folder_back(
    world: World, tmp_path: Path
) -> None:
    first = world.subscriber(CheckpointDirectory(tmp_path))
    staged = first.stage()
    del staged
    gc.collect()
    assert list((tmp_path / ".farcast" / "staging").iterdir())
    assert world.subscriber(CheckpointDirectory(tmp_path)).sync() == world.refs[2]
    assert not list((tmp_path / ".farcast" / "staging").iterdir())
    assert bits_of(loaded(tmp_path)) == bits_of(weights(2))


def test_a_folder_of_another_run_is_refused_even_if_it_was_emptied(
    world: World, tmp_path: Path
) -> None:
    world.subscriber(CheckpointDirectory(tmp_path)).sync()
    (tmp_path / SINGLE).unlink()
    with pytest.raises(RunMismatchError):
        Subscriber(world.store, "other", CheckpointDirectory(tmp_path)).sync()


def test_a_symbolic_link_is_replaced_and_never_written_through(
    world: World, tmp_path: Path
) -> None:
    cache, folder = tmp_path / "blobs", tmp_path / "snapshot"
    cache.mkdir()
    hf_sharded(folder, weights(0))
    for path in list(folder.iterdir()):
        path.rename(cache / path.name)
        path.symlink_to(cache / path.name)
    before = {path.name: path.read_bytes() for path in cache.iterdir()}
    subscriber = world.subscriber(CheckpointDirectory(folder))
    assert subscriber.plan().have == world.refs[0]
    subscriber.sync()
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == before
    assert bits_of(loaded(folder)) == bits_of(weights(2))
    assert not any(path.is_symlink() for path in folder.iterdir())


def test_permissions_are_kept(world: World, tmp_path: Path) -> None:
    target = CheckpointDirectory(tmp_path)
    subscriber = world.subscriber(target)
    subscriber.sync(to=0)
    (tmp_path / SINGLE).chmod(0o640)
    subscriber.sync()
    assert stat.S_IMODE((tmp_path / SINGLE).stat().st_mode) == 0o640


# --- folders that contradict themselves ------------------------------------------------------


def test_case_039a_an_index_that_names_an_absent_file_is_refused(
    world: World, tmp_path: Path
) -> None:
    hf_sharded(tmp_path, weights(0))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    before = visible(tmp_path)
    with pytest.raises(IntegrityError, match="model-00002-of-00002"):
        world.subscriber(CheckpointDirectory(tmp_path)).sync()
    assert visible(tmp_path) == before


def test_case_039b_a_stray_shard_is_ignored(world: World, tmp_path: Path) -> None:
    hf_sharded(tmp_path, weights(0))
    stray = tmp_path / "old-shard.safetensors"
    safetensors.numpy.save_file({"layer.bias": np.zeros(16, np.float32)}, stray)
    subscriber = world.subscriber(CheckpointDirectory(tmp_path))
    assert subscriber.plan().have == world.refs[0]
    subscriber.sync()
    assert bits_of(loaded(tmp_path)) == bits_of(weights(2))


def test_case_039c_a_tensor_is_in_one_file_only(world: World, tmp_path: Path) -> None:
    hf_sharded(tmp_path, weights(0))
    index = json.loads((tmp_path / INDEX).read_text())
    first, second = sorted(set(index["weight_map"].values()))
    both = safetensors.numpy.load_file(tmp_path / second) | {
        "embed.weight": weights(0)["embed.weight"]
    }
    safetensors.numpy.save_file(both, tmp_path / second)
    index["weight_map"]["embed.weight"] = second
    (tmp_path / INDEX).write_text(json.dumps(index))
    world.subscriber(CheckpointDirectory(tmp_path)).sync()
    where = _index(tmp_path)
    for file in set(where.values()):
        names = safetensors.numpy.load_file(tmp_path / file).keys()
        assert {name for name in where if where[name] == file} == set(names)
    assert bits_of(loaded(tmp_path)) == bits_of(weights(2))
    assert first not in visible(tmp_path)


def test_case_039c_an_old_copy_in_a_file_that_does_not_change_goes(tmp_path: Path) -> None:
    world = World()
    tensors = {"a": np.zeros(9, np.float32), "b": np.ones(9, np.float32)}
    world.publish(tensors)
    hf_sharded(tmp_path, tensors)
    other = tmp_path / _index(tmp_path)["b"]  # where nothing changes
    safetensors.numpy.save_file(tensors, other, metadata={"format": "pt"})
    world.publish({**tensors, "a": np.full(9, 2, np.float32)})
    world.subscriber(CheckpointDirectory(tmp_path)).sync()
    for name, file in _index(tmp_path).items():  # engines load all of a file that is named
        assert safetensors.numpy.load_file(tmp_path / file).keys() == {name}


def test_case_039d_fewer_tensors_leave_no_file_behind(tmp_path: Path) -> None:
    world = World()
    tensors = {f"t{i}": np.full(100, i, np.float32) for i in range(3)}
    world.publish(tensors)
    subscriber = world.subscriber(CheckpointDirectory(tmp_path, max_shard_bytes=500))
    subscriber.sync()
    assert len(set(_index(tmp_path).values())) == 3
    world.publish({name: tensors[name] for name in ("t0", "t1")})
    subscriber.sync()
    assert _index(tmp_path).keys() == {"t0", "t1"}
    _assert_tidy(tmp_path)


def test_cases_023_and_031_another_shape_or_dtype_replaces_the_tensor(tmp_path: Path) -> None:
    world = World()
    first = {"embed": np.ones((1000, 4), np.float32), "count": np.ones(3, np.int64)}
    second = {"embed": np.ones((1008, 4), np.float32), "count": np.full(3, 0.5, np.float32)}
    subscriber = world.subscriber(CheckpointDirectory(tmp_path))
    for tensors in (first, second):
        world.publish(tensors)
        subscriber.sync()
        assert bits_of(loaded(tmp_path)) == bits_of(tensors)


@pytest.mark.parametrize("setup", ["both pointers", "orphans"])
def test_a_folder_that_can_be_read_in_two_ways_is_refused(
    world: World, tmp_path: Path, setup: str
) -> None:
    hf_sharded(tmp_path, weights(0))
    if setup == "both pointers":
        safetensors.numpy.save_file(weights(1), tmp_path / SINGLE)
    else:
        (tmp_path / INDEX).unlink()
    before = visible(tmp_path)
    with pytest.raises(TargetError, match="remove the"):
        world.subscriber(CheckpointDirectory(tmp_path)).sync()
    assert visible(tmp_path) == before


HOSTILE = ["../x", "/etc/x", "a/../../x", "x\0y", ".", "", "C:\\x", "x" * 300, "sub/x"]


@pytest.mark.parametrize("name", HOSTILE)
def test_case_059_file_names_in_an_index_stay_in_the_folder(
    world: World, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "model"
    hf_sharded(folder, weights(0))
    for file in (f"{name}.safetensors", name):
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"]["scale"] = file
        (folder / INDEX).write_text(json.dumps(index))
        before = sorted(tmp_path.rglob("*"))
        if file == "..safetensors":
            continue
        with pytest.raises(FormatError, match="not one in this folder"):
            world.subscriber(CheckpointDirectory(folder)).sync()
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", [*HOSTILE, "ok"])
def test_case_059_a_tensor_name_never_becomes_a_path(tmp_path: Path, name: str) -> None:
    world = World()
    tensors = {name: np.ones(3, np.float32), "w": np.ones(2, np.float32)}
    try:
        world.publish(tensors)
    except FarcastError:
        return  # the codec does not take it: nothing to sync
    folder = tmp_path / "deep" / "model"
    target = CheckpointDirectory(folder, max_shard_bytes=8)
    world.subscriber(target).sync()
    assert held(target) == bits_of(tensors)
    outside = [path for path in tmp_path.rglob("*") if folder not in (path, *path.parents)]
    assert outside == [tmp_path / "deep"]
    _assert_tidy(folder)


def test_case_059_a_linked_work_folder_is_refused(world: World, tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "model"
    elsewhere.mkdir()
    folder.mkdir()
    (folder / ".farcast").symlink_to(elsewhere)
    with pytest.raises(TargetError, match="not a folder of farcast's own"):
        world.subscriber(CheckpointDirectory(folder)).sync()
    assert not list(elsewhere.iterdir())


def test_a_reserved_tensor_name_is_refused_before_any_write(tmp_path: Path) -> None:
    world = World()
    try:
        world.publish({"__metadata__": np.ones(3, np.float32)})
    except FarcastError:
        return
    with pytest.raises(TensorMismatchError, match="rename it"):
        world.subscriber(CheckpointDirectory(tmp_path / "model")).sync()
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"\x80\x04c", b'{"run_id": "../x"}'])
def test_a_broken_state_is_refused_with_what_to_do(
    world: World, tmp_path: Path, content: bytes
) -> None:
    world.subscriber(CheckpointDirectory(tmp_path)).sync(to=0)
    (tmp_path / ".farcast" / "state.json").write_bytes(content)
    with pytest.raises(FormatError, match="remove it and sync again"):
        world.subscriber(CheckpointDirectory(tmp_path)).sync()
    (tmp_path / ".farcast" / "state.json").unlink()
    subscriber = world.subscriber(CheckpointDirectory(tmp_path))
    assert subscriber.plan().have == world.refs[0]
    subscriber.sync()


NESTED = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("where", ["index", "header"])
def test_json_nested_without_end_is_one_clear_error(
    world: World, tmp_path: Path, where: str
) -> None:
    hf_sharded(tmp_path, weights(0))
    if where == "index":
        (tmp_path / INDEX).write_text(f'{{"weight_map": {{}}, "metadata": {{"a": {NESTED}}}}}')
    else:
        header = f'{{"a": {NESTED}}}'.encode()
        for path in tmp_path.glob("*.safetensors"):
            path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(FormatError, match="restore it"):
        world.subscriber(CheckpointDirectory(tmp_path)).sync()


def test_a_state_that_lies_about_the_version_is_not_believed(world: World, tmp_path: Path) -> None:
    world.subscriber(CheckpointDirectory(tmp_path)).sync(to=0)
    path = tmp_path / ".farcast" / "state.json"
    state = json.loads(path.read_text())
    state["current"]["version"] = 2
    state["current"]["root"] = world.refs[2].root
    path.write_text(json.dumps(state))
    target = CheckpointDirectory(tmp_path)
    assert target.ref is None
    assert world.subscriber(target).plan().have == world.refs[0]


def test_the_shapes_in_use_cover_scalars_and_several_widths() -> None:
    assert {to_bits(value).dtype for value in weights(0).values()} == {"U16", "F32", "I64"}
    assert () in {shape for _, shape in SHAPES.values()}
