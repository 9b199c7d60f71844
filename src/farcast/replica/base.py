"""What a subscriber asks of the place a version lives in, and what every such place promises.

`Target` owns the guarantees, a subclass fills small holes. The rules, in the order of a switch:

 1. `begin` refuses a goal whose tensors do not add up to its root, or do not fit the target.
 2. A draft takes only tensors whose verified entry is the goal's. Filling it changes nothing
    that a reader of the target can see.
 3. `commit` refuses a target that moved since the draft was begun, before it writes.
 4. It writes, then recomputes the root from what the target holds *now*.
 5. Only then does `ref` name the new version.
 6. A failure after the first write is undone and the old root recomputed. If that fails too,
    the target is uncertain for good: every later call raises `TargetUncertainError`.

Refuses to decide which version to go to, and to fetch anything.
"""

import abc
import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from farcast.delta import AnyBits, entry_of, root_of
from farcast.errors import (
    IntegrityError,
    TargetChangedError,
    TargetError,
    TargetUncertainError,
)
from farcast.types import TensorEntry, VersionRef

Check = Literal["changed", "all"]
"""What a commit reads back: the tensors it wrote (the others keep their known digests), or all."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Where a draft leads: from `base` (None: whatever is there) to `ref`.

    `entries` are all tensors of `ref`; `changed` are those among them whose bits are not known
    to be those of `base` already.
    """

    base: VersionRef | None
    ref: VersionRef
    entries: Mapping[str, TensorEntry]
    changed: frozenset[str]


class Draft(abc.ABC):
    """The next version, prepared beside the present one. Used by one thread at a time."""

    def __init__(self, goal: Goal, awaited: Iterable[str]) -> None:
        self.goal = goal
        self._awaited = dict.fromkeys(awaited)
        self._open = True
        self._sealed = False

    @property
    def awaited(self) -> Sequence[str]:
        """The changed tensors that were not added yet, in the order that suits the target."""
        return tuple(self._awaited)

    @property
    def sealed(self) -> bool:
        """Ready to be committed."""
        return self._open and self._sealed

    def add(self, name: str, bits: AnyBits, entry: TensorEntry) -> None:
        """Take one changed tensor; `entry` was computed from `bits`.

        The draft may keep `bits`: the caller doesn't write into them afterwards.
        """
        if not self._open or name not in self._awaited:
            raise TargetError(
                f"The tensor {name[:80]!r} is not awaited; add each changed one once."
            )
        if self.goal.entries[name] != entry:
            raise IntegrityError(
                f"The tensor {name[:80]!r} is not the one that {self.goal.ref} has; "
                "fetch it again, or from another store."
            )
        self._add(name, bits)
        del self._awaited[name]

    def seal(self) -> None:
        """Finish a draft to which every awaited tensor was added."""
        if not self._open or self._awaited:
            raise TargetError(f"The draft of {self.goal.ref} is not complete; stage it again.")
        if not self._sealed:
            self._seal()
            self._sealed = True

    def discard(self) -> None:
        """Drop what was prepared. Safe to call twice, and after a commit."""
        if self._open:
            self._open = False
            self._discard()

    @abc.abstractmethod
    def _add(self, name: str, bits: AnyBits) -> None: ...

    @abc.abstractmethod
    def _seal(self) -> None: ...

    @abc.abstractmethod
    def check_unmoved(self) -> None:
        """Raise `TargetChangedError` if the target is not what the draft was made against."""

    @abc.abstractmethod
    def write(self) -> None:
        """Make the target hold the goal. May fail at any point."""

    @abc.abstractmethod
    def read_back(self, names: Collection[str]) -> Mapping[str, TensorEntry]:
        """Entries of `names`, from what the target holds now. Those that it was told to leave out
        may be absent, and others that share memory with `names` present."""

    @abc.abstractmethod
    def undo(self) -> None:
        """Take `write` back, however far it came."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Clear up after the commit. A failure here leaves leftovers, not a wrong version."""

    @abc.abstractmethod
    def _discard(self) -> None: ...


class Target(abc.ABC):
    """A place that holds one version. `begin` and `commit` may be called from any thread."""

    def __init__(self, *, check: Check = "changed") -> None:
        self._check = check
        self._lock = threading.RLock()
        self._ref: VersionRef | None = None
        self._entries: Mapping[str, TensorEntry] = {}
        self._uncertain: str | None = None
        self._newest: VersionRef | None = None

    @property
    def newest(self) -> VersionRef | None:
        """The newest version ever held, verified; kept for as long as the target keeps what it
        holds. A store that shows only older ones shows an old state."""
        return self._newest

    @property
    def ref(self) -> VersionRef | None:
        """The verified version held now; None if it is not known to be one."""
        self._require_certain()
        return self._ref

    @property
    def run_id(self) -> str | None:
        """The run whose versions the target holds or held; None if it belongs to no run yet."""
        ref = self.ref
        return None if ref is None else ref.run_id

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """All tensors of `ref`; empty if that is None."""
        return self._entries

    gives_copies: bool = False
    """What `read` returns is the caller's own, to be written into."""

    @abc.abstractmethod
    def read(self, name: str) -> AnyBits:
        """The present bits of a tensor. A view where possible: not to be written into, unless
        the target `gives_copies`."""

    def place_of(self, name: str) -> AnyBits | None:  # noqa: ARG002
        """Any bits that lie on the device where `read(name)` has its own: a tensor that comes
        whole is made beside them, block by block. None for host memory."""
        return None

    def holds(self, name: str) -> bool:
        """Whether `read(name)` has an answer. A version may have tensors that a target was told
        to leave out."""
        return name in self._entries

    @abc.abstractmethod
    def holdings(self) -> Iterable[Mapping[str, TensorEntry]]:
        """What the target may hold by its own bits: candidates for `recognise`, hashed now."""

    def recognise(self, roots: Callable[[], Mapping[str, VersionRef]]) -> VersionRef | None:
        """Find out by hashing whether the target already holds a version; `roots` gives those it
        may be, by root, and is only called if the target holds anything."""
        with self._lock:
            self._require_certain()
            known: Mapping[str, VersionRef] | None = None
            for entries in self.holdings():
                known = roots() if known is None else known
                ref = known.get(root_of(entries))
                if ref is not None:
                    self._settle_on(ref, entries)
                    return ref
        return None

    def forget(self) -> None:
        """Stop claiming a version: the next plan starts from nothing and rewrites everything."""
        with self._lock:
            self._ref, self._entries = None, {}

    def begin(self, goal: Goal) -> Draft:
        """An empty draft of `goal`. Raises `TensorMismatchError` if it does not fit."""
        with self._lock:
            self._require_certain()
            self._require_base(goal)
            if root_of(goal.entries) != goal.ref.root:
                raise IntegrityError(
                    f"The tensors listed for {goal.ref} do not have that root; "
                    "do not use that version."
                )
            return self._begin(goal)

    def commit(self, draft: Draft) -> VersionRef:
        """Switch to the draft's version, verified on return.

        After any error but `TargetUncertainError` the target holds what it held before.
        """
        with self._lock:
            self._require_certain()
            goal = draft.goal
            if not draft.sealed:
                raise TargetError(f"The draft of {goal.ref} was not sealed; stage it again.")
            self._require_base(goal)
            with self._exclusive():
                self._check_unmoved(draft)
                self._switch(draft)
            try:
                draft.settle()
            except OSError as error:
                _log.warning("Leftovers remain after the switch to %s: %s", goal.ref, error)
            draft.discard()
            return goal.ref

    def verify(self) -> str:
        """Recompute the root of all bits held. Raises `TargetChangedError` if it isn't `ref`'s."""
        with self._lock:
            ref = self.ref
            if ref is None:
                raise TargetError("The target holds no known version yet; sync it first.")
            live = {
                name: entry_of(self.read(name)) if self.holds(name) else entry
                for name, entry in self._entries.items()
            }
            return self._same_root(ref, live)

    # --- holes -------------------------------------------------------------------------------

    @abc.abstractmethod
    def _begin(self, goal: Goal) -> Draft: ...

    def _exclusive(self) -> contextlib.AbstractContextManager[None]:
        """Nobody reads the target's weights inside. Entered once a commit, around writing,
        checking and renaming; left only when the target holds one version again."""
        return contextlib.nullcontext()

    def _settle_on(self, ref: VersionRef, entries: Mapping[str, TensorEntry]) -> None:
        self._ref, self._entries = ref, dict(entries)
        self._newest = later(self._newest, ref)

    # --- inside ------------------------------------------------------------------------------

    def _check_unmoved(self, draft: Draft) -> None:
        try:
            draft.check_unmoved()
        except TargetChangedError:
            self.forget()  # what it holds now is not what `ref` claims
            raise

    def _switch(self, draft: Draft) -> None:
        goal = draft.goal
        try:
            draft.write()
            self._confirm(draft, goal.ref, goal.entries)
            self._settle_on(goal.ref, goal.entries)
        except BaseException as error:  # an interrupt leaves no half-written target either
            self._undo(draft, error)
            raise

    def _undo(self, draft: Draft, cause: BaseException) -> None:
        try:
            draft.undo()
            if self._ref is not None:
                self._confirm(draft, self._ref, self._entries)
        except BaseException as error:  # noqa: BLE001 - any failure here is the same to a caller
            self._uncertain = (
                f"The switch to {draft.goal.ref} failed and could not be undone; "
                "replace the engine, or rebuild the target from an empty one."
            )
            _log.error("Undoing a failed commit failed: %r, after %r", error, cause)
            raise TargetUncertainError(self._uncertain) from cause

    def _confirm(self, draft: Draft, ref: VersionRef, entries: Mapping[str, TensorEntry]) -> None:
        """Recompute the root of `ref` from what the target holds now."""
        names = draft.goal.changed if self._check == "changed" else entries.keys()
        found = draft.read_back([name for name in names if name in entries])
        live = {name: found.get(name, entry) for name, entry in entries.items()}
        wrong = [name for name, entry in live.items() if entries[name] != entry]
        if wrong or root_of(live) != ref.root:
            raise IntegrityError(
                f"The target does not hold {ref} after it was written: {_listed(wrong)} "
                "read back as other bits; do not serve from it."
            )

    def _same_root(self, ref: VersionRef, live: Mapping[str, TensorEntry]) -> str:
        root = root_of(live)
        if root != ref.root:
            wrong = [name for name, entry in live.items() if self._entries[name] != entry]
            raise TargetChangedError(
                f"The target no longer holds {ref}: {_listed(wrong)} changed; sync it again."
            )
        return root

    def _require_certain(self) -> None:
        if self._uncertain is not None:
            raise TargetUncertainError(self._uncertain)

    def _require_base(self, goal: Goal) -> None:
        if goal.base != self.ref:
            raise TargetChangedError(
                f"The target holds {self.ref or 'no known version'}, not {goal.base or 'nothing'} "
                "that this draft starts from; stage it again."
            )


def later(one: VersionRef | None, other: VersionRef) -> VersionRef:
    """The newer of two versions of one run; of two under one number, the other."""
    return one if one is not None and one.version > other.version else other


def _listed(names: Collection[str], most: int = 5) -> str:
    """Names for a message, cut where they would fill a screen."""
    shown = ", ".join(repr(name[:80]) for name in sorted(names)[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
