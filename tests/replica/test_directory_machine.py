"""Whatever is published, synced, failed, killed and reopened in whatever order: a checkpoint
folder holds exactly the version it reports, and the next sync succeeds."""

import errno
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import safetensors.numpy
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from replica_world import World

from farcast.errors import TargetError
from farcast.replica import CheckpointDirectory, files
from farcast.replica.layout import INDEX, SINGLE, read_layout
from farcast.store.testing import Crash
from version_world import Tensors, bits_of

CALLS = ("write_at", "move", "remove", "sync", "sync_folder", "create", "keep_copy", "lock")
NAMES = ("a", "b", "c", "d")


class Folder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="farcast-machine-"))
        self.folder = self.root / "model"
        self.world = World(anchor_every=3)
        self.published: list[Tensors] = []

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @initialize(shard=st.sampled_from([30, 70, 1 << 30]))
    def start(self, shard: int) -> None:
        self.shard = shard
        self.reopen()
        self.publish({"a", "b", "c"}, [0, 1, 2, 3], 3)

    @rule()
    def reopen(self) -> None:
        self.target = CheckpointDirectory(self.folder, max_shard_bytes=self.shard)
        self.subscriber = self.world.subscriber(self.target, workers=1)

    @rule(
        names=st.sets(st.sampled_from(NAMES), min_size=1),
        values=st.lists(st.integers(0, 3), min_size=4, max_size=4),
        length=st.sampled_from([0, 3, 3, 3, 9]),
    )
    def publish(self, names: set[str], values: list[int], length: int) -> None:
        made = {
            name: np.full(length if name == "a" else 5, values[NAMES.index(name)], np.float32)
            for name in sorted(names)
        }
        before = len(self.world.refs)
        self.world.publish(made)
        self.published.append(made)
        assert self.world.refs[-1].version == before

    @rule()
    def sync(self) -> None:
        assert self.subscriber.sync() == self.world.refs[-1]

    @rule(data=st.data())
    def sync_to(self, data: st.DataObject) -> None:
        version = data.draw(st.integers(0, len(self.published) - 1))
        assert self.subscriber.sync(to=version) == self.world.refs[version]

    @rule(nth=st.integers(1, 25), crash=st.booleans(), after=st.booleans())
    def interrupted(self, nth: int, crash: bool, after: bool) -> None:
        """The `nth` call that changes the disk fails; with `crash` the process ends there."""
        fault = Fault(nth, after=after, dies=crash)
        held = self.target.ref
        with fault:
            try:
                self.subscriber.sync()
            except (TargetError, Crash):
                if not crash:
                    assert self.target.ref == held
        fault.release()
        if crash:
            self.reopen()

    @invariant()
    def the_folder_is_the_version(self) -> None:
        if not hasattr(self, "target"):
            return
        ref = self.target.ref
        if ref is None:
            assert not read_layout(self.folder).where
            return
        assert bits_of(load(self.folder)) == bits_of(self.published[ref.version])
        assert self.target.verify() == ref.root


class Fault:
    """Fails one call of `files`. A dead process makes no further one, not even to clear up."""

    def __init__(self, nth: int, *, after: bool, dies: bool) -> None:
        self._left = nth
        self._after = after
        self._dies = dies
        self._dead = False
        self._locks: list[int] = []
        self._patches = [mock.patch.object(files, n, self._faulty(n)) for n in CALLS]
        self._close = mock.patch.object(files, "close", self._closing(files.close))

    def __enter__(self) -> None:
        for patch in (*self._patches, self._close):
            patch.start()

    def __exit__(self, *_: object) -> None:
        for patch in (*self._patches, self._close):
            patch.stop()

    def release(self) -> None:
        """What the kernel does for a dead process: its files are closed."""
        for file in self._locks:
            files.close(file)

    def _closing(self, original: Any) -> Any:
        def close(file: int) -> None:
            if self._dead:
                self._locks.append(file)
            else:
                original(file)

        return close

    def _faulty(self, name: str) -> Any:
        original = getattr(files, name)

        def call(*args: Any) -> Any:
            if self._dead:
                raise Crash
            self._left -= 1
            if self._left == 0 and not self._after:
                self._fail()
            result = original(*args)
            if self._left == 0 and self._after and name not in ("create", "lock"):
                self._fail()
            return result

        return call

    def _fail(self) -> None:
        if self._dies:
            self._dead = True
            raise Crash
        raise OSError(errno.EIO, "broken")


def load(folder: Path) -> Tensors:
    """As an engine does it."""
    if (folder / SINGLE).exists():
        assert not (folder / INDEX).exists()
        return safetensors.numpy.load_file(folder / SINGLE)
    layout = read_layout(folder)
    shards = {name: safetensors.numpy.load_file(folder / name) for name in layout.shards}
    return {name: shards[file][name] for name, file in layout.where.items()}


Folder.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestFolder = Folder.TestCase
