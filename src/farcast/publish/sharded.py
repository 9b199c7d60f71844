"""One version from many ranks, none of which ever holds the model.

    every rank    (its own rows of each served format, from masters: `shard_formats`)
    every rank    its shard's change against its own baseline --> the owner of each tensor
    owners        apply the pieces to the whole tensors they look after, hash, encode, put
    rank 0        entries of all --> root, manifest, commit --> every rank's baseline moves

Only changes travel, and digests. Whole rows travel once: with the first version of a process,
when owners have nothing to apply changes to, and after the ranks' layout changed. Objects and root
are those that one process would have published, if it cut its objects alike.

A digest is over a whole tensor, and no rank could hash alone what it has a part of. That is what
owners are for; each looks after 1/N of the model in host memory. Where a version is served in
several formats, each has its owners and its objects, and rank 0 commits them with one manifest. The
rules of `publisher` hold.
Refuses to go on when ranks disagree about the step.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
    UNUSABLE,
    Delta,
    Manifest,
    ObjectRef,
    encode_manifest,
    is_anchor_due,
    joined,
)
from farcast.publish.comms import Comms, Rounds
from farcast.publish.lines import Line
from farcast.publish.parts import Tally, encode_part
from farcast.publish.pieces import Assignment, Layout, assign, layout_digest
from farcast.publish.poison import check_poison
from farcast.publish.shard_formats import Holding, ShardFormats
from farcast.publish.snapshot import Bits
from farcast.types import Digest, TensorEntry

Entries = dict[str, TensorEntry]


class Landed(NamedTuple):
    """How a version ended. `repeated`: the store held exactly this as its newest."""

    manifest: Manifest
    repeated: bool
    encode_seconds: float
    put_seconds: float


class _Begin(msgspec.Struct, frozen=True, array_like=True):
    """What ranks must agree on, of each format. `held` are the roots of the versions whose bits
    are the rank's baselines."""

    layouts: tuple[bytes, ...]
    step: int
    held: tuple[Digest | Literal[""], ...] | None


class _Drafted(msgspec.Struct, frozen=True, array_like=True):
    """What an owner put: objects by their number, and what its tensors are."""

    objects: list[tuple[int, ObjectRef]]
    entries: Entries
    elements: int
    changed: int


class _Decision(msgspec.Struct, frozen=True, array_like=True):
    """`manifests`: before the commit one a format, afterwards the one that was committed. `due`
    says of which formats a full copy is to be put first."""

    kind: Literal["repeated", "anchor", "committed", "taken"]
    manifests: tuple[bytes, ...] = ()
    due: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Baseline:
    """The newest version in one format on this rank: its own pieces, and the tensors that it looks
    after."""

    root: Digest
    shard: Bits
    shard_entries: Entries
    owned: Bits
    entries: Entries


@dataclass(frozen=True)
class _Made:
    """One format's version in the making: this rank's pieces, and the tensors it looks after."""

    shard: Bits
    shard_entries: Entries = field(default_factory=dict)
    bits: Bits = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)


@dataclass
class _Spread:
    """One served format over the ranks: who looks after what, and what was there last."""

    line: Line
    assignment: Assignment
    baseline: _Baseline


class ShardedVersions:
    """Makes versions together with the same object on every other rank of `comms`.

    Every method is entered by all ranks, in the same order. An error on one is an error on all,
    and leaves every baseline as it was.
    """

    def __init__(self, lines: Sequence[Line], comms: Comms, *, reanchor: bool) -> None:
        self._lines = tuple(lines)
        self._how = lines[0].how
        self._comms = comms
        self._rounds = Rounds(comms)
        self._formats = ShardFormats([line.recipe for line in lines if line.recipe], self._rounds)
        self._reanchor = reanchor
        self._digests: tuple[tuple[bytes, ...], ...] = ()
        self._spreads: list[_Spread] = []
        self._doubtful: list[Manifest] = []
        self._started = False
        self.newest: Manifest | None = self._read_newest()

    def publish(
        self, take: Callable[[], Holding], step: int, *, allow_poison: bool
    ) -> tuple[Landed, Bits]:
        """Publish what `take` gives on each rank; also returns bits that are no longer needed."""
        taken: list[Holding] = []
        served: list[Holding] = []

        def once() -> Holding:
            taken[:] = taken or [take()]
            return taken[0]

        def holdings() -> list[Holding]:
            served[:] = served or self._formats.derived(once())
            return served

        self._formats.measure(once)
        while True:
            self._begin(holdings, step)
            landed = self._version(served, step, allow_poison=allow_poison)
            if landed is not None:
                return landed

    # --- agreeing ----------------------------------------------------------------------------

    def _begin(self, holdings: Callable[[], list[Holding]], step: int) -> None:
        """Agree on the step, on who holds what, and on the version to start from."""
        roots = tuple(spread.baseline.root for spread in self._spreads) or None

        def make() -> bytes:
            layouts = tuple(layout_digest(holding.layout) for holding in holdings())
            return msgspec.msgpack.encode(_Begin(layouts, step, roots))

        told = [msgspec.msgpack.decode(data, type=_Begin) for data in self._rounds.share(make)]
        if len({begin.step for begin in told}) > 1:
            raise ConfigError(
                f"The ranks publish different steps ({sorted({b.step for b in told})}); "
                "publish on every rank after the same optimizer step."
            )
        digests = tuple(begin.layouts for begin in told)
        if digests != self._digests or len({b.held for b in told}) > 1 or roots is None:
            self._start_over(holdings, digests)

    def _start_over(
        self, holdings: Callable[[], list[Holding]], digests: tuple[tuple[bytes, ...], ...]
    ) -> None:
        """Owners anew, and their tensors from the store. Shards have no baseline: the next
        version moves whole rows to the owners, but only changes to the store."""
        self._spreads, self._digests = [], ()
        told = self._rounds.share(
            lambda: msgspec.msgpack.encode([holding.layout for holding in holdings()])
        )
        layouts = [msgspec.msgpack.decode(data, type=list[Layout]) for data in told]
        newest = self._read_newest()
        spreads = []
        for index, line in enumerate(self._lines):
            assignment = assign([rank[index] for rank in layouts], part_bytes=self._how.part_bytes)
            spreads.append(self._started_over(line, assignment, newest))
        self.newest, self._spreads = newest, spreads
        self._digests, self._started = digests, True

    def _started_over(self, line: Line, assignment: Assignment, newest: Manifest | None) -> _Spread:
        """One format with the tensors that this rank looks after, from the store."""
        view = None if newest is None else line.view(newest)
        owned: tuple[Bits, Entries] | None = None

        def restore() -> bytes:
            nonlocal owned
            owned = None if view is None else self._restored(line, view, assignment)
            return b"\x00" if owned is None else b"\x01"

        everybody = self._rounds.share(restore)
        bits, entries = owned if owned is not None and b"\x00" not in everybody else ({}, {})
        root = "" if view is None or not entries else view.root
        return _Spread(line, assignment, _Baseline(root, {}, {}, bits, entries))

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

    def _restored(
        self, line: Line, newest: Manifest, assignment: Assignment
    ) -> tuple[Bits, Entries] | None:
        """The tensors that this rank looks after; None where the next version must be whole."""
        names = assignment.owned(self._comms.rank)
        try:
            weights = line.reader.restore(newest.version, only=names)
        except (IntegrityError, FormatError, ObjectNotFoundError, UnknownVersionError):
            if self._reanchor:
                return None
            raise
        if set(weights.entries) != set(assignment.kinds):
            return None
        return dict(weights.bits), {name: weights.entries[name] for name in names}

    # --- one version -------------------------------------------------------------------------

    def _version(
        self, holdings: Sequence[Holding], step: int, *, allow_poison: bool
    ) -> tuple[Landed, Bits] | None:
        """One attempt; None when an earlier commit of this publisher holds its place."""
        if not self._spreads:
            raise ConfigError("This publisher has no baseline; publish again.")
        began = time.perf_counter()
        made: list[_Made] = []
        drafted: list[list[bytes]] = []
        for spread, holding in zip(self._spreads, holdings, strict=True):
            one = _Made(self._contributed(spread.assignment, holding.bits))
            made.append(one)
            drafted.append(self._drafted(spread, one, allow_poison=allow_poison))
        decision = self._rounds.broadcast(lambda: self._decide(drafted, step))
        told = msgspec.msgpack.decode(decision, type=_Decision)
        if told.kind == "anchor":
            told = self._with_anchors(made, told)
        if told.kind == "taken":
            self._spreads = []
            return None
        manifest = msgspec.json.decode(told.manifests[0], type=Manifest)
        seconds = sum(one.tally.seconds for one in made)
        put = max(0.0, time.perf_counter() - began - seconds)
        landed = Landed(manifest, told.kind == "repeated", seconds, put)
        if landed.repeated:
            return landed, holdings[0].bits
        old, self.newest = self._spreads[0].baseline.shard, manifest
        for spread, one in zip(self._spreads, made, strict=True):
            spread.baseline = _Baseline(
                spread.line.root_in(manifest),
                one.shard,
                one.shard_entries,
                one.bits,
                one.tally.entries,
            )
        return landed, old

    def _drafted(self, spread: _Spread, made: _Made, *, allow_poison: bool) -> list[bytes]:
        """The changes of one format go to their owners, who put them; on rank 0, what they put."""
        arrived = self._rounds.exchange(lambda: self._pieces(spread, made))

        def draft() -> bytes:
            made.bits.update(self._assembled(spread, arrived))
            if not allow_poison:
                check_poison(spread.baseline.owned, made.bits)
            return self._draft(spread, made)

        return self._rounds.gather(draft)

    def _contributed(self, assignment: Assignment, bits: Bits) -> Bits:
        """The pieces that this rank is the one to send."""
        rank = self._comms.rank
        return {
            name: piece
            for name, piece in bits.items()
            if any(span.rank == rank for span in assignment.spans[name])
        }

    def _pieces(self, spread: _Spread, made: _Made) -> list[bytes]:
        """The change of this rank's pieces, one container for each owner; `made` gets what the
        pieces are."""
        parts = []
        baseline = spread.baseline
        for owner in range(self._comms.size):
            names = spread.assignment.sent(self._comms.rank, owner)
            if not names:
                parts.append(b"")
                continue
            encoded = encode_bits(
                {name: baseline.shard[name] for name in names if name in baseline.shard},
                {name: made.shard[name] for name in names},
                base_entries=baseline.shard_entries,
                threads=self._how.threads,
            )
            made.shard_entries.update(encoded.entries)
            parts.append(encoded.data)
        return parts

    def _assembled(self, spread: _Spread, arrived: Sequence[bytes]) -> Bits:
        """The tensors this rank looks after, as they are now. Those without a change are shared
        with the baseline."""
        assignment = spread.assignment
        patches = {rank: Patch.open(data) for rank, data in enumerate(arrived) if data}
        made: Bits = {}
        for name in sorted(assignment.owned(self._comms.rank)):
            spans = [s for s in assignment.spans[name] if name in patches[s.rank].entries]
            old = spread.baseline.owned.get(name)
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

    def _draft(self, spread: _Spread, made: _Made) -> bytes:
        """Put the change of this owner's tensors, or all of them if there is nothing before."""
        objects = self._put(self._encoded(spread, made))
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

    def _encoded(self, spread: _Spread, made: _Made) -> Iterator[tuple[int, bytes]]:
        """This owner's objects with their numbers; none for those in which nothing changed."""
        baseline = spread.baseline
        for number, names in self._own_parts(spread.assignment):
            base = {name: baseline.owned[name] for name in names if name in baseline.owned}
            known = {name: baseline.entries[name] for name in base}
            target = {name: made.bits[name] for name in names}
            encoded = encode_part(base, target, known, made.tally)
            if encoded.entries != known:
                yield number, encoded.data

    def _anchors(self, spread: _Spread, made: _Made) -> Iterator[tuple[int, bytes]]:
        tally = Tally()
        for number, names in self._own_parts(spread.assignment):
            yield number, encode_part({}, {n: made.bits[n] for n in names}, {}, tally).data
        made.tally.seconds += tally.seconds

    def _own_parts(self, assignment: Assignment) -> Iterator[tuple[int, tuple[str, ...]]]:
        for number, owner in enumerate(assignment.owners):
            if owner == self._comms.rank:
                yield number, assignment.parts[number]

    def _with_anchors(self, made: Sequence[_Made], told: _Decision) -> _Decision:
        """Put the full copies that are due too, and commit."""

        def put() -> bytes:
            copies = [self._put(self._anchors(self._spreads[i], made[i])) for i in told.due]
            return msgspec.msgpack.encode(copies)

        gathered = self._rounds.gather(put)

        def commit() -> bytes:
            drafts = [msgspec.json.decode(data, type=Manifest) for data in told.manifests]
            kind = list[list[tuple[int, ObjectRef]]]
            found = [msgspec.msgpack.decode(data, type=kind) for data in gathered]
            for place, index in enumerate(told.due):
                anchor = _in_order([copies[place] for copies in found])
                version = drafts[index].version
                drafts[index] = replace(drafts[index], anchor=anchor, anchor_version=version)
            return self._commit(joined(drafts))

        return msgspec.msgpack.decode(self._rounds.broadcast(commit), type=_Decision)

    # --- rank 0 ------------------------------------------------------------------------------

    def _decide(self, drafted: Sequence[Sequence[bytes]], step: int) -> bytes:
        """Commit what the owners put, unless there is nothing to commit or an anchor is due."""
        drafts = []
        for spread, owners in zip(self._spreads, drafted, strict=True):
            told = [msgspec.msgpack.decode(data, type=_Drafted) for data in owners]
            drafts.append(self._manifest(spread, told, step))
        newest = self.newest
        if newest is not None and self._how.repeats and self._repeats(newest, drafts, step):
            return msgspec.msgpack.encode(_Decision("repeated", (encode_manifest(newest),)))
        due = tuple(
            index
            for index, draft in enumerate(drafts)
            if draft.deltas
            and is_anchor_due(draft.version, draft.anchor_version, self._how.anchor_every)
        )
        if due:
            encoded = tuple(map(encode_manifest, drafts))
            return msgspec.msgpack.encode(_Decision("anchor", encoded, due))
        return self._commit(joined(drafts))

    def _repeats(self, newest: Manifest, drafts: Sequence[Manifest], step: int) -> bool:
        """Whether the store's newest version is exactly these, in every format."""
        return newest.step == step and all(
            draft.deltas and spread.line.root_in(newest) == draft.root
            for spread, draft in zip(self._spreads, drafts, strict=True)
        )

    def _manifest(self, spread: _Spread, told: Sequence[_Drafted], step: int) -> Manifest:
        """The next version in one format as a change, or in full if there is nothing to change."""
        entries = {name: entry for owner in told for name, entry in owner.entries.items()}
        objects = _in_order([owner.objects for owner in told])
        newest, how = self.newest, spread.line.how
        version = how.archive.next_version(newest)
        base = spread.line.view(newest) if newest is not None and spread.baseline.root else None
        return Manifest(
            run_id=how.archive.run_id,
            version=version,
            root=root_of(entries),
            step=step,
            served_format=how.served_format,
            tensors=len(entries),
            elements=sum(owner.elements for owner in told),
            bytes_full=sum(kind.nbytes for kind in spread.assignment.kinds.values()),
            changed=sum(owner.changed for owner in told),
            anchor_version=version if base is None else base.anchor_version,
            anchor=objects if base is None else None,
            deltas=()
            if base is None
            else (Delta(base=base.version, base_root=base.root, objects=objects),),
            writer=how.writer,
            precision_rule=how.precision_rule,
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
        return msgspec.msgpack.encode(_Decision("committed", (encode_manifest(manifest),)))


def _in_order(objects: Sequence[Sequence[tuple[int, ObjectRef]]]) -> tuple[ObjectRef, ...]:
    """The owners' objects as one process would list them."""
    numbered = [pair for owner in objects for pair in owner]
    return tuple(ref for _, ref in sorted(numbered, key=lambda pair: pair[0]))
