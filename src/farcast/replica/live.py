"""Targets that are in use while they change: a model in memory, elements overwritten in place.

Staging compares the new bits with the live ones and keeps, per tensor, the positions that
differ with their new and old words. Committing writes the words. Tensors keep their identity
and address, so aliases, views and captured graphs follow. Of a tensor that is read on a device all
of this stays there.

Refuses to convert, broadcast or cast: what differs in name, shape or dtype is an error that
lists it, and nothing is written. Refuses to report a version whose derived caches were not
confirmed to be out of reach.
"""

import abc
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from farcast.delta import AnyBits, TensorBits, entry_of, to_bits, words_of
from farcast.errors import TargetChangedError, TargetError, TensorMismatchError
from farcast.replica.base import Check, Draft, Goal, Target
from farcast.replica.words import Positions, Words
from farcast.types import TensorEntry

if TYPE_CHECKING:
    from farcast.replica.device_words import DeviceWords

WHOLE = 4
"""A tensor of which more than one word in this many changes is written as a whole: a position
takes eight bytes, so lists longer than this cost more memory than the tensor."""


class Place(NamedTuple):
    """What a tensor of the target is; `dtype` as safetensors writes it."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class _Words(NamedTuple):
    """Words to write, and those before. `positions` count words in C order; None means all."""

    positions: Positions | None
    new: Words
    old: Words


class LiveTarget(Target):
    """Holds its tensors at fixed places. A subclass says which there are and touches single words.

    `allow_missing` are tensors of the target that versions may lack: they stay as they are.
    `allow_unexpected` are tensors of versions that the target has no place for: they are left
    out. Nothing else is skipped, ever.
    """

    def __init__(
        self,
        *,
        allow_missing: Iterable[str] = (),
        allow_unexpected: Iterable[str] = (),
        check: Check = "changed",
    ) -> None:
        super().__init__(check=check)
        self._allow_missing = frozenset(allow_missing)
        self._allow_unexpected = frozenset(allow_unexpected)

    def holds(self, name: str) -> bool:
        return name in self._places()

    def holdings(self) -> Iterator[Mapping[str, TensorEntry]]:
        self._survey()
        everything = {name: entry_of(self.read(name)) for name in self._places()}
        yield everything
        own: dict[str, TensorEntry] = {}  # a tied tensor is often published once
        for name in sorted(everything, key=lambda name: len(self._inside(name))):
            if own.keys().isdisjoint(self._inside(name)):
                own[name] = everything[name]
        if len(own) < len(everything):
            yield own

    # --- holes -------------------------------------------------------------------------------

    @abc.abstractmethod
    def _places(self) -> Mapping[str, Place]:
        """Every tensor of the target, by its name in checkpoints."""

    @abc.abstractmethod
    def _peek(self, name: str, positions: Positions | None) -> Words:
        """The live words at `positions`, in that order."""

    @abc.abstractmethod
    def _poke(self, name: str, positions: Positions | None, words: Words) -> None:
        """Overwrite the live words at `positions`."""

    def _memory(self, name: str) -> Any:
        """The live words of a tensor whose bits `read` gives on a device: a torch tensor of
        integers in the memory itself, in any strides. Of such a tensor no word is peeked or
        poked."""
        raise TargetError(f"{name[:80]!r} does not lie on a device.")

    def _survey(self) -> None:
        """Look at the model anew; its tensors may have moved since the last time."""

    def _identity(self) -> object:
        """Equal as long as writing to the places still reaches the model."""
        return None

    def _inside(self, name: str) -> Collection[str]:  # noqa: ARG002
        """Tensors whose memory holds all of the memory of `name`, itself left out."""
        return ()

    def _tied(self, name: str) -> Collection[str]:  # noqa: ARG002
        """Other names of the very same tensor."""
        return ()

    def _sharing(self, names: Collection[str]) -> Collection[str]:
        """`names` and every other tensor that shares memory with one of them."""
        return names

    def _refresh(self) -> bool:
        """Put out of reach what was derived from the old weights (prefix caches, fused copies).

        Called after every write and every undo. Anything but True fails the commit.
        """
        return True

    # --- inside ------------------------------------------------------------------------------

    def _begin(self, goal: Goal) -> Draft:
        self._survey()
        places = self._places()
        check_fit(
            places,
            goal.entries,
            allow_missing=self._allow_missing
            | {name for name in places if not goal.entries.keys().isdisjoint(self._inside(name))},
            allow_unexpected=self._allow_unexpected,
        )
        for name in places.keys() & goal.entries.keys():
            for other in self._tied(name):
                if goal.entries.get(other, goal.entries[name]) != goal.entries[name]:
                    raise TensorMismatchError(
                        f"{name[:80]!r} and {other[:80]!r} are one tensor here, but differ in "
                        f"{goal.ref}; untie them in the model. Nothing was written."
                    )
        return _LiveDraft(goal, self)


class _LiveDraft(Draft):
    """The words to write, tensor by tensor."""

    def __init__(self, goal: Goal, target: LiveTarget) -> None:
        super().__init__(goal, awaited=[name for name in goal.changed if target.holds(name)])
        self._target = target
        self._identity = target._identity()
        self._changes: list[_Change] = []
        self._begun = 0

    def _add(self, name: str, bits: AnyBits) -> None:
        change = _change(self._target, name, bits)
        if change is not None:
            self._changes.append(change)

    def _seal(self) -> None:
        self._changes.sort(key=lambda change: change.name)

    def check_unmoved(self) -> None:
        if self._target._identity() != self._identity:
            raise TargetChangedError(
                "The target's tensors were replaced since this version was staged; stage it again."
            )
        for change in self._changes:
            if not change.is_undone():
                raise TargetChangedError(
                    f"Somebody else wrote into {change.name[:80]!r} since this version was "
                    "staged; stage it again."
                )

    def write(self) -> None:
        for number, change in enumerate(self._changes, start=1):
            self._begun = number
            change.write()
        self._refresh()

    def undo(self) -> None:
        # Backwards, since tensors may overlap: the first one written holds the oldest words.
        for change in reversed(self._changes[: self._begun]):
            change.undo()
        for change in self._changes[: self._begun]:
            if not change.is_undone():
                raise TargetError(f"The old words of {change.name[:80]!r} could not be restored.")
        self._refresh()

    def read_back(self, names: Collection[str]) -> Mapping[str, TensorEntry]:
        target = self._target
        return {
            name: entry_of(target.read(name))
            for name in target._sharing(names)
            if target.holds(name)
        }

    def _refresh(self) -> None:
        if self._target._refresh() is not True:
            raise TargetError(
                "The engine did not confirm that caches of the old weights are out of reach, so "
                "the version is not reported; look into its log."
            )

    def settle(self) -> None:
        """Nothing is left over: the words were overwritten in place."""

    def _discard(self) -> None:
        self._changes.clear()


class _Change(abc.ABC):
    """The words of one tensor that differ between two versions."""

    def __init__(self, target: LiveTarget, name: str) -> None:
        self._target, self.name = target, name

    @abc.abstractmethod
    def write(self) -> None:
        """Write the new words."""

    @abc.abstractmethod
    def undo(self) -> None:
        """Write the old ones."""

    @abc.abstractmethod
    def is_undone(self) -> bool:
        """Whether the live words are the old ones."""


class _HostChange(_Change):
    """Of a tensor whose words come to the host, as those of most targets do."""

    def __init__(self, target: LiveTarget, name: str, words: _Words) -> None:
        super().__init__(target, name)
        self._words = words

    def write(self) -> None:
        self._target._poke(self.name, self._words.positions, self._words.new)

    def undo(self) -> None:
        self._target._poke(self.name, self._words.positions, self._words.old)

    def is_undone(self) -> bool:
        live = self._target._peek(self.name, self._words.positions)
        return np.array_equal(live, self._words.old)


class _DeviceChange(_Change):
    """Of a tensor on a device."""

    def __init__(self, target: LiveTarget, name: str, words: "DeviceWords") -> None:
        super().__init__(target, name)
        self._words = words

    def write(self) -> None:
        self._words.write(self._target._memory(self.name))

    def undo(self) -> None:
        self._words.write(self._target._memory(self.name), old=True)

    def is_undone(self) -> bool:
        return self._words.are_old(self._target._memory(self.name))


def _change(target: LiveTarget, name: str, bits: AnyBits) -> _Change | None:
    """What turns the live bits into `bits`; None if nothing does."""
    live = target.read(name)
    if not isinstance(live, TensorBits):
        from farcast.replica.device_words import words_to_write

        placed = words_to_write(live, bits, whole=WHOLE)
        return None if placed is None else _DeviceChange(target, name, placed)
    new, old = words_of(to_bits(bits)), words_of(live)
    positions = np.flatnonzero(new != old)
    if not positions.size:
        return None
    if positions.size * WHOLE > new.size:
        return _HostChange(target, name, _Words(None, new, old.copy()))
    return _HostChange(target, name, _Words(positions, new[positions], old[positions]))


def check_fit(
    places: Mapping[str, Place],
    entries: Mapping[str, TensorEntry],
    *,
    allow_missing: Collection[str] = (),
    allow_unexpected: Collection[str] = (),
) -> None:
    """Raise `TensorMismatchError` with everything that does not fit, not only the first thing."""
    missing = sorted(places.keys() - entries.keys() - set(allow_missing))
    unexpected = sorted(entries.keys() - places.keys() - set(allow_unexpected))
    different = [
        f"{name!r} is {places[name]} here and {wanted} in the version"
        for name, entry in sorted(entries.items())
        if name in places and places[name] != (wanted := Place(entry.dtype, entry.shape))
    ]
    parts = [
        f"missing from the version: {_shortened(map(repr, missing))}" if missing else "",
        f"without a place here: {_shortened(map(repr, unexpected))}" if unexpected else "",
        f"different: {_shortened(different)}" if different else "",
    ]
    if any(parts):
        raise TensorMismatchError(
            "The version does not fit this target ("
            + "; ".join(filter(None, parts))
            + "). Load the model that the run trains, map the names, or allow them one by one; "
            "nothing was written."
        )


def _shortened(texts: Iterable[str], most: int = 20) -> str:
    items = list(texts)
    more = [f"and {len(items) - most} more"] if len(items) > most else []
    return ", ".join([item[:300] for item in items[:most]] + more)
