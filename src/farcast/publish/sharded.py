"""One version from many ranks, none of which ever holds the model.

    every rank    its shard's change against its own baseline --> the owner of each tensor
    owners        apply the pieces to the whole tensors they look after, hash, encode, put
    rank 0        entries of all --> root, manifest, commit --> every rank's baseline moves

Only changes travel, and digests. Whole rows travel once: with the first version of a process,
when owners have nothing to apply changes to, and after the ranks' layout changed. Objects and root
are those that one process would have published, if it cut its objects alike.

A digest is over a whole tensor, and no rank could hash alone what it has a part of. That is what
owners are for; each looks after 1/N of the model in host memory. The rules of `publisher` hold.
Refuses to go on when ranks disagree about the step.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from farcast.delta import Patch, TensorBits, encode_bits, root_of
from farcast.errors import (
    ConfigError,
    FormatError,
    IntegrityError,
    ObjectNotFoundError,
    UnknownVersionError,
    VersionConflictError,
)
from farcast.lineage import (
    Delta,
    Manifest,
    ObjectRef,
    encode_manifest,
    is_anchor_due,
)
from farcast.publish.comms import Comms, Rounds
from farcast.publish.drafting import Drafting
from farcast.publish.parts import Tally, encode_part
from farcast.publish.pieces import Assignment, Layout, assign, layout_digest
from farcast.publish.poison import check_poison
from farcast.publish.snapshot import Bits
from farcast.store.archive import UNUSABLE
from farcast.types import Digest, TensorEntry

Entries = dict[str, TensorEntry]


class Holding(NamedTuple):
    """What one rank hands over: its bits by canonical name, and what they are of the whole."""

    bits: Bits
    layout: Layout


class Landed(NamedTuple):
    """How a version ended. `repeated`: the store held exactly this as its newest."""

    manifest: Manifest
    repeated: bool
    encode_seconds: float
    put_seconds: float


class _Begin(msgspec.Struct, frozen=True, array_like=True):
    """What ranks must agree on. `held` is the version whose bits are the rank's baseline."""

    layout: bytes
    step: int
    held: Digest | None


class _Drafted(msgspec.Struct, frozen=True, array_like=True):
    """What an owner put: objects by their number, and what its tensors are."""

    objects: list[tuple[int, ObjectRef]]
    entries: Entries
    elements: int
    changed: int


class _Decision(msgspec.Struct, frozen=True, array_like=True):
    kind: Literal["repeated", "anchor", "committed", "taken"]
    manifest: bytes = b""


@dataclass(frozen=True)
class _Baseline:
    """The newest version on this rank: its own pieces, and the tensors it looks after."""

    root: Digest
    shard: Bits
    shard_entries: Entries
    owned: Bits
    entries: Entries


@dataclass(frozen=True)
class _Made:
    """An owner's tensors as they will be, and what it cost."""

    bits: Bits
    tally: Tally


class ShardedVersions:
    """Makes versions together with the same object on every other rank of `comms`.

    Every method is entered by all ranks, in the same order. An error on one is an error on all,
    and leaves every baseline as it was.
    """

    def __init__(self, how: Drafting, comms: Comms, *, reanchor: bool) -> None:
        self._how = how
        self._comms = comms
        self._rounds = Rounds(comms)
        self._reanchor = reanchor
        self._digests: tuple[bytes, ...] = ()
        self._assignment: Assignment | None = None
        self._baseline: _Baseline | None = None
        self._doubtful: list[Manifest] = []
        self._started = False
        self.newest: Manifest | None = self._read_newest()

    def publish(
        self, take: Callable[[], Holding], step: int, *, allow_poison: bool
    ) -> tuple[Landed, Bits]:
        """Publish what `take` gives on each rank; also returns bits that are no longer needed."""
        holding: list[Holding] = []

        def taken() -> Holding:
            holding[:] = holding or [take()]
            return holding[0]

        while True:
            self._begin(taken, step)
            landed = self._version(holding[0], step, allow_poison=allow_poison)
            if landed is not None:
                return landed

    # --- agreeing ----------------------------------------------------------------------------

    def _begin(self, take: Callable[[], Holding], step: int) -> None:
        """Agree on the step, on who holds what, and on the version to start from."""
        root = None if self._baseline is None else self._baseline.root

        def make() -> bytes:
            return msgspec.msgpack.encode(_Begin(layout_digest(take().layout), step, root))

        told = [msgspec.msgpack.decode(data, type=_Begin) for data in self._rounds.share(make)]
        if len({begin.step for begin in told}) > 1:
            raise ConfigError(
                f"The ranks publish different steps ({sorted({b.step for b in told})}); "
                "publish on every rank after the same optimizer step."
            )
        digests = tuple(begin.layout for begin in told)
        if digests != self._digests or len({b.held for b in told}) > 1 or root is None:
            self._start_over(take, digests)

    def _start_over(self, take: Callable[[], Holding], digests: tuple[bytes, ...]) -> None:
        """Owners anew, and their tensors from the store. Shards have no baseline: the next
        version moves whole rows to the owners, but only changes to the store."""
        self._baseline, self._digests = None, ()
        layouts = self._rounds.share(lambda: msgspec.msgpack.encode(take().layout))
        assignment = assign(
            [msgspec.msgpack.decode(data, type=Layout) for data in layouts],
            part_bytes=self._how.part_bytes,
        )
        newest = self._read_newest()
        owned: tuple[Bits, Entries] | None = None

        def restore() -> bytes:
            nonlocal owned
            owned = None if newest is None else self._restored(newest, assignment)
            return b"\x00" if owned is None else b"\x01"

        everybody = self._rounds.share(restore)
        bits, entries = owned if owned is not None and b"\x00" not in everybody else ({}, {})
        root = "" if newest is None or not entries else newest.root
        self.newest, self._assignment = newest, assignment
        self._baseline = _Baseline(root, {}, {}, bits, entries)
        self._digests, self._started = digests, True

    def _read_newest(self) -> Manifest | None:
        """The newest version as rank 0 sees it, which must not be a stranger's by now."""

        def make() -> bytes:
            newest = self._how.archive.newest()
            if newest is None:
                return b""
            if self._started and newest.writer != self._how.writer:
                raise VersionConflictError(
                    f"This publisher was superseded: version {newest.version} was published by "
                    f"{newest.writer!r}; let one trainer publish to a run."
                )
            return encode_manifest(newest)

        data = self._rounds.broadcast(make)
        return msgspec.json.decode(data, type=Manifest) if data else None

    def _restored(self, newest: Manifest, assignment: Assignment) -> tuple[Bits, Entries] | None:
        """The tensors that this rank looks after; None where the next version must be whole."""
        names = assignment.owned(self._comms.rank)
        try:
            weights = self._how.archive.restore(newest.version, only=names)
        except (IntegrityError, FormatError, ObjectNotFoundError, UnknownVersionError):
            if self._reanchor:
                return None
            raise
        if set(weights.entries) != set(assignment.kinds):
            return None
        return dict(weights.bits), {name: weights.entries[name] for name in names}

    # --- one version -------------------------------------------------------------------------

    def _version(
        self, holding: Holding, step: int, *, allow_poison: bool
    ) -> tuple[Landed, Bits] | None:
        """One attempt; None when an earlier commit of this publisher holds its place."""
        assignment, baseline = self._assignment, self._baseline
        if assignment is None or baseline is None:
            raise ConfigError("This publisher has no baseline; publish again.")
        shard = self._contributed(assignment, holding.bits)
        shard_entries: Entries = {}
        arrived = self._rounds.exchange(
            lambda: self._pieces(assignment, baseline, shard, shard_entries)
        )
        began = time.perf_counter()
        made = _Made({}, Tally())

        def draft() -> bytes:
            made.bits.update(self._assembled(assignment, baseline, arrived))
            if not allow_poison:
                check_poison(baseline.owned, made.bits)
            return self._draft(assignment, baseline, made)

        drafted = self._rounds.gather(draft)
        decision = self._rounds.broadcast(lambda: self._decide(assignment, drafted, step))
        told = msgspec.msgpack.decode(decision, type=_Decision)
        if told.kind == "anchor":
            told = self._with_anchor(assignment, made, told.manifest)
        if told.kind == "taken":
            self._baseline = None
            return None
        manifest = msgspec.json.decode(told.manifest, type=Manifest)
        seconds = made.tally.seconds
        put = max(0.0, time.perf_counter() - began - seconds)
        landed = Landed(manifest, told.kind == "repeated", seconds, put)
        if landed.repeated:
            return landed, holding.bits
        old, self.newest = baseline.shard, manifest
        self._baseline = _Baseline(
            manifest.root, shard, shard_entries, made.bits, made.tally.entries
        )
        return landed, old

    def _contributed(self, assignment: Assignment, bits: Bits) -> Bits:
        """The pieces that this rank is the one to send."""
        rank = self._comms.rank
        return {
            name: piece
            for name, piece in bits.items()
            if any(span.rank == rank for span in assignment.spans[name])
        }

    def _pieces(
        self, assignment: Assignment, baseline: _Baseline, shard: Bits, entries: Entries
    ) -> list[bytes]:
        """The change of this rank's pieces, one container for each owner; `entries` gets what
        the pieces are."""
        parts = []
        for owner in range(self._comms.size):
            names = assignment.sent(self._comms.rank, owner)
            if not names:
                parts.append(b"")
                continue
            encoded = encode_bits(
                {name: baseline.shard[name] for name in names if name in baseline.shard},
                {name: shard[name] for name in names},
                base_entries=baseline.shard_entries,
            )
            entries.update(encoded.entries)
            parts.append(encoded.data)
        return parts

    def _assembled(
        self, assignment: Assignment, baseline: _Baseline, arrived: Sequence[bytes]
    ) -> Bits:
        """The tensors this rank looks after, as they are now. Those without a change are shared
        with the baseline."""
        patches = {rank: Patch.open(data) for rank, data in enumerate(arrived) if data}
        made: Bits = {}
        for name in sorted(assignment.owned(self._comms.rank)):
            spans = [s for s in assignment.spans[name] if name in patches[s.rank].entries]
            old = baseline.owned.get(name)
            if not spans and old is not None:
                made[name] = old
                continue
            kind = assignment.kinds[name]
            data = np.empty(kind.nbytes, np.uint8)
            if old is not None and old.data.size == data.size:
                np.copyto(data, old.data)
            for span in spans:
                patches[span.rank].apply_into(name, data[span.start : span.end])
            made[name] = TensorBits(kind.dtype, kind.shape, data)
        return made

    # --- owners ------------------------------------------------------------------------------

    def _draft(self, assignment: Assignment, baseline: _Baseline, made: _Made) -> bytes:
        """Put the change of this owner's tensors, or all of them if there is nothing before."""
        objects = self._put(self._encoded(assignment, baseline, made))
        tally = made.tally
        return msgspec.msgpack.encode(
            _Drafted(objects, tally.entries, tally.elements, tally.changed)
        )

    def _put(self, parts: Iterator[tuple[int, bytes]]) -> list[tuple[int, ObjectRef]]:
        numbers: list[int] = []

        def data() -> Iterator[bytes]:
            for number, part in parts:
                numbers.append(number)
                yield part

        return list(zip(numbers, self._how.archive.put_objects(data()), strict=True))

    def _encoded(
        self, assignment: Assignment, baseline: _Baseline, made: _Made
    ) -> Iterator[tuple[int, bytes]]:
        """This owner's objects with their numbers; none for those in which nothing changed."""
        for number, names in self._own_parts(assignment):
            base = {name: baseline.owned[name] for name in names if name in baseline.owned}
            known = {name: baseline.entries[name] for name in base}
            target = {name: made.bits[name] for name in names}
            encoded = encode_part(base, target, known, made.tally)
            if encoded.entries != known:
                yield number, encoded.data

    def _anchors(self, assignment: Assignment, made: _Made) -> Iterator[tuple[int, bytes]]:
        tally = Tally()
        for number, names in self._own_parts(assignment):
            yield number, encode_part({}, {n: made.bits[n] for n in names}, {}, tally).data
        made.tally.seconds += tally.seconds

    def _own_parts(self, assignment: Assignment) -> Iterator[tuple[int, tuple[str, ...]]]:
        for number, owner in enumerate(assignment.owners):
            if owner == self._comms.rank:
                yield number, assignment.parts[number]

    def _with_anchor(self, assignment: Assignment, made: _Made, manifest: bytes) -> _Decision:
        """Put the full copy too, and commit."""
        put = self._rounds.gather(
            lambda: msgspec.msgpack.encode(self._put(self._anchors(assignment, made)))
        )

        def commit() -> bytes:
            draft = msgspec.json.decode(manifest, type=Manifest)
            found = [msgspec.msgpack.decode(d, type=list[tuple[int, ObjectRef]]) for d in put]
            anchor = _in_order(found)
            return self._commit(replace(draft, anchor=anchor, anchor_version=draft.version))

        return msgspec.msgpack.decode(self._rounds.broadcast(commit), type=_Decision)

    # --- rank 0 ------------------------------------------------------------------------------

    def _decide(self, assignment: Assignment, drafted: Sequence[bytes], step: int) -> bytes:
        """Commit what the owners put, unless there is nothing to commit or an anchor is due."""
        told = [msgspec.msgpack.decode(data, type=_Drafted) for data in drafted]
        manifest = self._manifest(assignment, told, step)
        newest = self.newest
        if newest is not None and manifest.deltas:
            same = (manifest.root, step) == (newest.root, newest.step)
            if same and self._how.repeats:
                return msgspec.msgpack.encode(_Decision("repeated", encode_manifest(newest)))
            if is_anchor_due(manifest.version, newest.anchor_version, self._how.anchor_every):
                return msgspec.msgpack.encode(_Decision("anchor", encode_manifest(manifest)))
        return self._commit(manifest)

    def _manifest(self, assignment: Assignment, told: Sequence[_Drafted], step: int) -> Manifest:
        """The next version as a change, or in full if there is nothing to change."""
        entries = {name: entry for owner in told for name, entry in owner.entries.items()}
        objects = _in_order([owner.objects for owner in told])
        newest, baseline = self.newest, self._baseline
        version = self._how.archive.next_version(newest)
        base = newest if baseline is not None and baseline.root else None
        return Manifest(
            run_id=self._how.archive.run_id,
            version=version,
            root=root_of(entries),
            step=step,
            served_format=self._how.served_format,
            tensors=len(entries),
            elements=sum(owner.elements for owner in told),
            bytes_full=sum(kind.nbytes for kind in assignment.kinds.values()),
            changed=sum(owner.changed for owner in told),
            anchor_version=version if base is None else base.anchor_version,
            anchor=objects if base is None else None,
            deltas=()
            if base is None
            else (Delta(base=base.version, base_root=base.root, objects=objects),),
            writer=self._how.writer,
        )

    def _commit(self, manifest: Manifest) -> bytes:
        """Make the version visible, or find an earlier attempt of this publisher in its place."""
        manifest = self._how.finished(manifest)
        # Every object that the manifest names is durable: each owner's put has returned.
        self._doubtful.append(manifest)
        try:
            self._how.archive.commit_manifest(manifest)
        except VersionConflictError:
            if self._how.archive.committed(manifest.version) in self._doubtful:
                return msgspec.msgpack.encode(_Decision("taken"))
            raise
        except UNUSABLE as error:
            if not self._how.gives_up(manifest, error):
                raise
            return msgspec.msgpack.encode(_Decision("taken"))
        self._doubtful.clear()
        self._how.given_up.clear()
        return msgspec.msgpack.encode(_Decision("committed", encode_manifest(manifest)))


def _in_order(objects: Sequence[Sequence[tuple[int, ObjectRef]]]) -> tuple[ObjectRef, ...]:
    """The owners' objects as one process would list them."""
    numbered = [pair for owner in objects for pair in owner]
    return tuple(ref for _, ref in sorted(numbered, key=lambda pair: pair[0]))
