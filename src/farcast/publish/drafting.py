"""From a base and a target to a manifest whose objects are durable: everything of a version
but its commit. Refuses to make anything visible."""

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from farcast.delta import AnyBits, root_of
from farcast.errors import ConfigError, FarcastError
from farcast.lineage import Delta, Manifest, ObjectRef, Signer, is_anchor_due, squash_spans
from farcast.publish.history import History, Reverse, Undo, squash_parts
from farcast.publish.parts import Tally, anchor_parts, delta_parts
from farcast.store.archive import Archive
from farcast.store.rebuilding import Weights
from farcast.types import TensorEntry, VersionRef

_LOG = logging.getLogger(__name__)

PLACES_TRIED = 8
"""Numbers in a row that damaged manifests may hold before the store is at fault."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """The newest version (None in an empty store) and its bits.

    Without `weights` there is nothing to take a difference from: the next version is an anchor.
    """

    newest: Manifest | None
    weights: Weights | None


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """How versions of one publisher are made."""

    archive: Archive
    writer: str
    served_format: str
    anchor_every: int
    squash: int | None
    part_bytes: int
    repeats: bool
    threads: int = 1
    precision_rule: str | UnsetType = UNSET
    fork_of: VersionRef | None = None
    signer: Signer | None = None
    given_up: list[int] = field(default_factory=list)
    """Numbers that the version being published could not have; empty again once it has one."""

    def gives_up(self, manifest: Manifest, error: FarcastError) -> bool:
        """Whether to publish one further, since a manifest that nobody can use holds the place
        of this one. Raised instead where that goes on and on: then the store is at fault."""
        version = manifest.version
        if version not in self.archive.damaged or len(self.given_up) >= PLACES_TRIED:
            return False
        self.given_up.append(version)
        _LOG.warning("Version %d is left behind: %s", version, error)
        return True

    def finished(self, manifest: Manifest) -> Manifest:
        """A manifest as it is committed: with its origin if it begins a fork, and signed."""
        if self.fork_of is not None and manifest.version == 0:
            if manifest.root != self.fork_of.root:
                raise ConfigError(
                    f"The first version of a fork must be what {self.fork_of} holds; publish "
                    "that content first, or start a run that is no fork."
                )
            manifest = replace(manifest, origin=self.fork_of)
        if self.signer is None:
            return manifest
        return self.signer.sign(replace(manifest, issued=int(time.time())))


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A version in one format that lacks only its commit; `repeated` if it is the newest again.

    `undo` leads back from it, for the history once it is committed.
    """

    manifest: Manifest
    entries: Mapping[str, TensorEntry]
    undo: tuple[Undo, ...]
    repeated: bool
    encode_seconds: float
    put_seconds: float


def draft_version(
    how: Drafting, base: Base, history: History, target: Mapping[str, AnyBits], step: int
) -> Draft:
    """Encode `target` and put its objects; the next version after `base`, not yet visible."""
    started = time.perf_counter()
    tally = Tally(threads=how.threads)
    changes = _Changes(how, base, history, target, tally)
    if base.newest is not None and base.weights is not None:
        changes.put_delta(base.newest, base.weights)
        same = (root_of(tally.entries), step) == (base.newest.root, base.newest.step)
        if same and how.repeats:
            return _draft(base.newest, changes, started, repeated=True)
        changes.put_squashed()
    version = changes.version
    before = None if base.newest is None else base.newest.anchor_version
    anchor: tuple[ObjectRef, ...] | None = None
    if not changes.deltas or is_anchor_due(version, before, how.anchor_every):
        anchor = changes.put_anchor()
    manifest = Manifest(
        run_id=how.archive.run_id,
        version=version,
        root=root_of(tally.entries),
        step=step,
        served_format=how.served_format,
        tensors=len(target),
        elements=tally.elements,
        bytes_full=changes.bytes_full,
        changed=tally.changed,
        anchor_version=version if before is None or anchor is not None else before,
        anchor=anchor,
        deltas=tuple(changes.deltas),
        writer=how.writer,
        precision_rule=how.precision_rule,
    )
    return _draft(manifest, changes, started, repeated=False)


class _Changes:
    """The objects of one version, as they are put."""

    def __init__(
        self,
        how: Drafting,
        base: Base,
        history: History,
        target: Mapping[str, AnyBits],
        tally: Tally,
    ) -> None:
        self._how = how
        self.version = how.archive.next_version(base.newest)
        self._history = history
        self._target = target
        self.tally = tally
        self.deltas: list[Delta] = []
        self.undo: list[Undo] = []
        self.bytes_full = sum(bits.nbytes for bits in target.values())

    def put_delta(self, parent: Manifest, weights: Weights) -> None:
        """Put the change from the version before."""
        reverse = Reverse(threads=self._how.threads)
        parts = delta_parts(
            weights.bits,
            weights.entries,
            self._target,
            self.tally,
            part_bytes=self._how.part_bytes,
            on_change=None if self._how.squash is None else reverse.add,
        )
        self._add(parent.version, parent.root, parts, reverse)

    def put_squashed(self) -> None:
        """Put the changes from further back that are due and whose way back is known."""
        for span in squash_spans(self.version, self._how.squash):
            shorter = self.undo[-1] if self.undo else None
            if self._how.squash is None or shorter is None:
                return
            back = self._history.way_back(shorter, self._how.squash)
            if back is None:
                return
            reverse = Reverse(threads=self._how.threads)
            parts = squash_parts(
                back, self._target, self.tally, reverse, part_bytes=self._how.part_bytes
            )
            self._add(self.version - span, back.root, parts, reverse)

    def put_anchor(self) -> tuple[ObjectRef, ...]:
        """Put the full copy; it tells entries and changes only where there is no delta to."""
        own = Tally(threads=self._how.threads) if self.deltas else self.tally
        parts = anchor_parts(self._target, own, part_bytes=self._how.part_bytes)
        objects = self._how.archive.put_objects(parts)
        if own is not self.tally:
            self.tally.seconds += own.seconds
        return objects

    def _add(self, base: int, root: str, parts: Iterator[bytes], reverse: Reverse) -> None:
        objects = self._how.archive.put_objects(parts)
        self.deltas.append(Delta(base=base, base_root=root, objects=objects))
        undo = Undo(base=base, base_root=root, version=self.version, parts=tuple(reverse.parts))
        if self._how.squash is not None and undo.worth_keeping(self.bytes_full):
            self.undo.append(undo)
        self.tally.seconds += reverse.seconds


def _draft(manifest: Manifest, changes: _Changes, started: float, *, repeated: bool) -> Draft:
    seconds = changes.tally.seconds
    return Draft(
        manifest=manifest,
        entries=changes.tally.entries,
        undo=tuple(changes.undo),
        repeated=repeated,
        encode_seconds=seconds,
        put_seconds=max(0.0, time.perf_counter() - started - seconds),
    )
