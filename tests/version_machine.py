"""A machine for tests. The invariant: what `rebuild(v)` gives is bit for bit what was published as
v, or a typed error.

A model-based machine: two trainers publish into one store, call by call a request fails, loses
its reply or is the last of its process; objects rot and are restored; old versions are removed;
trainers restart.
Every attempt uses a step number of its own, so a manifest's step says which tensors it must hold.
"""

from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from farcast.errors import FarcastError, StoreUnavailableError, VersionConflictError
from farcast.lineage import parse_version_key, version_key
from farcast.publish import Publisher
from farcast.store import MemoryStore
from farcast.store.archive import Archive
from farcast.store.testing import Crash, Fail, FaultStore, Freeze, LoseReply, Rule
from version_world import RUN, Tensors, bits_of, contents, copied, keys, plain

SLOTS = st.integers(0, 1)
EDITS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 8), st.integers(0, 9)), max_size=3
)
TROUBLES = st.builds(
    Rule,
    st.sampled_from([Fail(), LoseReply(), Freeze()]),
    verb=st.just("put"),
    prefix=st.sampled_from(["objects/", "versions/"]),
    nth=st.integers(1, 2),
) | st.builds(Rule, st.sampled_from([Fail(), Freeze()]), nth=st.integers(1, 9))


class Trainer:
    """A process: its link to the store, its publisher, and the weights it would publish next."""

    def __init__(self, store: MemoryStore, weights: Tensors) -> None:
        self.link = FaultStore(store)
        self.weights = weights
        self.publisher = Publisher(
            self.link, RUN, anchor_every=3, squash=2, part_bytes=60, workers=1, reanchor=True
        )
        self.fenced = False


class Versions(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.store = MemoryStore()
        self.attempts: dict[int, Any] = {}
        self.committed: dict[str, bytes] = {}
        self.rotten: dict[str, bytes] = {}
        weights = {"a": np.zeros(9, np.uint16), "b": np.zeros((3, 4), np.float32)}
        self.trainers = [Trainer(self.store, copied(weights)) for _ in range(2)]

    @rule(slot=SLOTS)
    def drop(self, slot: int) -> None:
        self.trainers[slot].weights.pop("c", None)

    @rule(slot=SLOTS, edits=EDITS, background=st.booleans())
    def publish(self, slot: int, edits: Any, background: bool) -> None:
        trainer, step = self.trainers[slot], self._attempt(slot, edits)
        before = max(self._versions(), default=-1)
        try:
            ref = self._publish(trainer, step, background)
        except VersionConflictError:
            trainer.fenced = True
            return
        except FarcastError:
            assert self.rotten  # what it must read back is damaged
            return
        assert not trainer.fenced
        assert ref.version == before + 1
        assert Archive(self.store, RUN).manifest(ref.version).step == step

    @rule(slot=SLOTS, edits=EDITS, trouble=TROUBLES, background=st.booleans())
    def publish_in_trouble(self, slot: int, edits: Any, trouble: Rule, background: bool) -> None:
        trainer, step = self.trainers[slot], self._attempt(slot, edits)
        trainer.link.add(trouble)
        try:
            ref = self._publish(trainer, step, background)
        except Crash:
            self.restart(slot)
        except VersionConflictError:
            trainer.fenced = True
        except StoreUnavailableError:
            pass
        except FarcastError:
            assert self.rotten
        else:
            assert Archive(self.store, RUN).manifest(ref.version).step == step
        finally:
            trainer.link.clear()

    @rule(slot=SLOTS)
    def repeat(self, slot: int) -> None:
        """The newest version's own tensors and step, from a restarted trainer: nothing happens."""
        newest = Archive(self.store, RUN).newest()
        if newest is None or self.rotten:
            return
        self.restart(slot)
        archive = Archive(self.store, RUN)
        self.trainers[slot].weights = {
            name: bits.data.view({"U16": np.uint16, "F32": np.float32, "U8": np.uint8}[bits.dtype])
            .reshape(bits.shape)
            .copy()
            for name, bits in archive.rebuild(newest.version).items()
        }
        before = contents(self.store)
        found = self.trainers[slot].publisher.publish(self.trainers[slot].weights, step=newest.step)
        assert found == newest.ref
        assert contents(self.store) == before

    @rule(slot=SLOTS)
    def restart(self, slot: int) -> None:
        self.trainers[slot] = Trainer(self.store, self.trainers[slot].weights)

    @precondition(lambda self: keys(self.store, "objects/"))
    @rule(pick=st.integers(0, 10**6), bit=st.integers(0, 10**6))
    def rot(self, pick: int, bit: int) -> None:
        found = keys(self.store, "objects/")
        key = found[pick % len(found)]
        data = bytearray(self.store.get(key, max_bytes=1 << 20))
        self.rotten.setdefault(key, bytes(data))
        data[bit // 8 % len(data)] ^= 1 << bit % 8
        self.store.put(key, bytes(data))

    @rule()
    def heal(self) -> None:
        for key, data in self.rotten.items():
            self.store.put(key, data)
        self.rotten.clear()

    @invariant()
    def every_version_is_what_was_published(self) -> None:
        archive = Archive(self.store, RUN, workers=1)
        for version in self._whole():
            manifest = archive.manifest(version)
            try:
                bits = plain(archive.rebuild(version))
            except FarcastError:
                assert self.rotten
                continue
            assert bits == self.attempts[manifest.step]

    @rule(slot=SLOTS, keep=st.integers(1, 3))
    def collect(self, slot: int, keep: int) -> None:
        """Only the publisher of the newest version may; what is kept stays usable."""
        try:
            removed = self.trainers[slot].publisher.collect_garbage(keep=keep, grace=0.0)
        except VersionConflictError:
            return
        for version in removed.versions:
            del self.committed[version_key(version)]
        self.rotten = {key: data for key, data in self.rotten.items() if key in keys(self.store)}

    @rule(data=st.data())
    def catch_up(self, data: st.DataObject) -> None:
        """From any version to any other, by whichever path is cheapest: the same bits."""
        found = self._versions()
        if len(found) < 2:
            return
        have, want = (data.draw(st.sampled_from(found)) for _ in range(2))
        archive = Archive(self.store, RUN, workers=1)
        try:
            base = archive.manifest(have).ref, archive.rebuild(have)
            bits = plain(archive.rebuild(want, base))
        except FarcastError:
            assert self.rotten
            return
        assert bits == self.attempts[archive.manifest(want).step]

    @invariant()
    def no_manifest_ever_changes(self) -> None:
        now = contents(self.store, "versions/")
        assert self.committed.items() <= now.items()
        self.committed = now

    def teardown(self) -> None:
        for trainer in getattr(self, "trainers", []):
            trainer.publisher.close()

    def _attempt(self, slot: int, edits: list[tuple[str, int, int]]) -> int:
        weights = self.trainers[slot].weights
        for name, where, value in edits:
            weights.setdefault(name, np.zeros(11, np.uint8)).flat[where] = value
        step = len(self.attempts)
        self.attempts[step] = bits_of(copied(self.trainers[slot].weights))
        return step

    def _whole(self) -> list[int]:
        """Versions without a gap to the newest, from an anchor on. Older ones may be left of a
        collection that was interrupted, or of a trainer that slept past one and was killed in the
        moment between its commit and taking it back."""
        found = self._versions()
        first = max(found, default=0)
        while first - 1 in found:
            first -= 1
        archive = Archive(self.store, RUN, workers=1)
        kept = [version for version in found if version >= first]
        while kept and archive.manifest(kept[0]).anchor is None:
            del kept[0]
        assert kept or not found
        return kept

    def _versions(self) -> list[int]:
        found = map(parse_version_key, keys(self.store, "versions/"))
        return [version for version in found if version is not None]

    def _publish(self, trainer: Trainer, step: int, background: bool) -> Any:
        if not background:
            return trainer.publisher.publish(trainer.weights, step=step)
        job = trainer.publisher.publish_async(trainer.weights, step=step)
        for value in trainer.weights.values():
            value.flat[0] += 1
        return job.result()
