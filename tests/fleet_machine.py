"""A machine for tests. The invariant: the bits of every replica are those that a trainer published
as the version that the replica names.

To the trainers and the store of `Versions` it adds rollbacks, forks, and replicas: they join,
follow, go to a version that they are told, pause between staging and committing, crash and come
back with their weights or without; their store fails, dies, and lies: flipped bits, missing bytes,
old answers.
"""

from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import initialize, invariant, precondition, rule

from farcast.delta import TensorBits
from farcast.errors import (
    FarcastError,
    StoreUnavailableError,
    TargetChangedError,
    UnknownVersionError,
    VersionConflictError,
)
from farcast.lineage import decode_manifest, parse_version_key
from farcast.publish import Publisher
from farcast.replica import MemoryTarget, Staged, Subscriber
from farcast.replica.subscriber import LOOK_EVERY
from farcast.store import MemoryStore
from farcast.store.archive import Archive
from farcast.store.testing import (
    Crash,
    DropBytes,
    Fail,
    FaultStore,
    FlipBit,
    Freeze,
    LoseReply,
    Rule,
    Stale,
)
from farcast.types import VersionRef
from version_machine import SLOTS, TROUBLES, Versions
from version_world import RUN, keys, plain

PLACES = st.integers(0, 2)
_FAULTS = (
    st.sampled_from([Fail(), LoseReply(), Freeze(), Stale()])
    | st.builds(FlipBit, st.integers(0, 4000))
    | st.builds(DropBytes, st.integers(0, 40), st.integers(1, 60))
)
READ_TROUBLES = st.builds(
    Rule,
    _FAULTS,
    verb=st.sampled_from(["get", "get", "list"]),
    prefix=st.sampled_from(["", "objects/", "versions/"]),
    nth=st.integers(1, 6),
    times=st.sampled_from([1, 2, None]),
)


class Replica:
    """A process: its link to the store, and what it holds."""

    def __init__(self, store: MemoryStore, tensors: dict[str, TensorBits] | None = None) -> None:
        self.link = FaultStore(store)
        self.target = MemoryTarget(tensors)
        self.subscriber = Subscriber(self.link, RUN, self.target, workers=1)
        self.staged: Staged | None = None
        self.lied_to = False

    def pull(self, to: int | None = None) -> VersionRef | None:
        """What it holds after a sync; None before a run's first version."""
        try:
            return self.subscriber.sync(to)
        except UnknownVersionError:
            if to is None and self.subscriber.ref is None:
                return None
            raise


class Fleet(Versions):
    steps = commits = 0
    """Of all machines of this process."""

    @initialize()
    def start(self) -> None:
        super().start()
        self.replicas = [Replica(self.store) for _ in range(3)]
        self.contents: dict[tuple[int, str], int] = {}
        self.seen: dict[int, VersionRef] = {}

    @rule(place=PLACES, keeps=st.booleans())
    def come_back(self, place: int, keeps: bool) -> None:
        """A crash and a new start, with the weights that were there or without any."""
        before = self.replicas[place].target.tensors
        held = {name: TensorBits(b.dtype, b.shape, np.array(b.data)) for name, b in before.items()}
        self.replicas[place] = Replica(self.store, held if keeps else None)

    @rule(place=PLACES)
    def follow(self, place: int) -> None:
        """Where nothing is wrong, the newest version is reached; by who was overtaken by a
        collection, once it looks further."""
        replica = self.replicas[place]
        before = replica.target.ref
        newest = Archive(self.store, RUN).newest()
        overtaken = before is not None and before.version + 1 not in self._versions()
        try:
            ref = replica.pull()
            for _ in range(LOOK_EVERY if overtaken else 0):
                ref = replica.pull()
        except FarcastError:
            assert self.rotten or replica.lied_to
            assert before in (None, replica.target.ref)
            return
        if not (replica.lied_to or self.rotten):
            assert ref == (None if newest is None else newest.ref)
        assert before is None or ref is None or ref.version >= before.version

    @rule(place=PLACES, trouble=READ_TROUBLES)
    def follow_in_trouble(self, place: int, trouble: Rule) -> None:
        replica = self.replicas[place]
        before = replica.target.ref
        replica.link.add(trouble)
        replica.lied_to |= isinstance(trouble.fault, FlipBit | DropBytes)
        try:
            ref = replica.pull()
        except Crash:
            self.come_back(place, keeps=True)
        except FarcastError:
            assert before in (None, replica.target.ref)
        else:
            assert before is None or ref is None or ref.version >= before.version
        finally:
            replica.link.clear()

    @rule(place=PLACES, data=st.data())
    def go_to(self, place: int, data: st.DataObject) -> None:
        """A version that somebody names, older ones too."""
        found = self._versions()
        if not found:
            return
        replica, version = self.replicas[place], data.draw(st.sampled_from(found))
        before = replica.target.ref
        try:
            ref = replica.pull(version)
        except FarcastError:
            assert self.rotten or replica.lied_to or version < min(self._whole())
            assert before in (None, replica.target.ref)
            return
        assert ref is not None
        assert ref.version == version

    @rule(place=PLACES)
    def pause(self, place: int) -> None:
        """Stage, and wait; what was staged before is given up."""
        replica = self.replicas[place]
        if replica.staged is not None:
            replica.staged.discard()
        try:
            replica.staged = replica.subscriber.stage()
        except FarcastError:
            replica.staged = None
            assert self.rotten or replica.lied_to

    @precondition(lambda self: any(replica.staged for replica in self.replicas))
    @rule(place=PLACES)
    def wake(self, place: int) -> None:
        """Commit what was staged, unless the replica moved meanwhile."""
        replica = self.replicas[place]
        staged, replica.staged = replica.staged, None
        if staged is None:
            return
        before = replica.target.ref
        moved = before != staged.plan.have
        try:
            assert replica.subscriber.commit(staged) == staged.ref
            assert not moved
        except TargetChangedError:
            assert moved
            assert replica.target.ref == before
        staged.discard()

    @precondition(lambda self: keys(self.store, "versions/"))
    @rule(slot=SLOTS, data=st.data(), trouble=st.none() | TROUBLES)
    def rollback(self, slot: int, data: st.DataObject, trouble: Rule | None) -> None:
        """An earlier content as a new version, under the step that it had."""
        trainer, version = self.trainers[slot], data.draw(st.sampled_from(self._versions()))
        step, newest = self._manifest(version).step, max(self._versions())
        if trouble is not None:
            trainer.link.add(trouble)
        try:
            ref = trainer.publisher.rollback(version)
        except Crash:
            self.restart(slot)
        except VersionConflictError:
            trainer.fenced = True
        except StoreUnavailableError:
            assert trouble is not None
        except FarcastError:
            assert self.rotten or version < min(self._whole())
        else:
            assert self._manifest(ref.version).step == step
            assert ref.version in (newest, newest + 1), "the newest version's own content stays"
        finally:
            trainer.link.clear()

    @precondition(lambda self: keys(self.store, "versions/"))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """Another run begins with the bits of one version of this one."""
        version = data.draw(st.sampled_from(self._versions()))
        manifest, other = self._manifest(version), MemoryStore()
        try:
            bits = Archive(self.store, RUN, workers=1).rebuild(version)
        except FarcastError:
            assert self.rotten or version < min(self._whole())
            return
        with Publisher(other, "fork", fork_of=manifest.ref, workers=1) as publisher:
            ref = publisher.publish(bits, step=0, allow_poison=True)
        assert (ref.version, ref.root) == (0, manifest.root)
        held = plain(Archive(other, "fork", workers=1).rebuild(0))
        assert held == self.attempts[manifest.step]

    @invariant()
    def every_version_is_what_was_published(self) -> None:
        """Of the newest only: replicas are compared with the others."""
        for version in self._versions()[-1:]:
            manifest = self._manifest(version)
            try:
                bits = plain(Archive(self.store, RUN, workers=1).rebuild(version))
            except FarcastError:
                assert self.rotten
                continue
            assert bits == self.attempts[manifest.step]

    @invariant()
    def replicas_hold_what_they_name(self) -> None:
        for key, data in self.committed.items():
            version = parse_version_key(key)
            assert version is not None
            manifest = decode_manifest(data, run_id=RUN, version=version)
            self.contents[version, manifest.root] = manifest.step
        Fleet.steps += 1
        for place, replica in enumerate(self.replicas):
            ref = replica.target.ref
            if ref is None:
                continue
            Fleet.commits += self.seen.get(place) != ref
            self.seen[place] = ref
            held = plain({name: replica.target.read(name) for name in replica.target.entries})
            assert held == self.attempts[self.contents[ref.version, ref.root]]

    def _manifest(self, version: int) -> Any:
        return Archive(self.store, RUN).manifest(version)
