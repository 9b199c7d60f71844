"""`MemoryTarget`: versions as plain arrays in this process, for tools and tests.

Takes any version whatever its tensors: a commit exchanges the whole mapping. Who still holds
arrays of the old version keeps them unchanged.
"""

from collections.abc import Collection, Iterator, Mapping

from farcast.delta import AnyBits, TensorBits, entry_of, to_bits
from farcast.errors import TargetChangedError, TargetError
from farcast.replica.base import Check, Draft, Goal, Target
from farcast.types import TensorEntry


class MemoryTarget(Target):
    """Starts empty, or with `tensors` that are compared with the run's versions by their root."""

    def __init__(
        self, tensors: Mapping[str, TensorBits] | None = None, *, check: Check = "changed"
    ) -> None:
        super().__init__(check=check)
        self._tensors: Mapping[str, TensorBits] = dict(tensors or {})

    @property
    def tensors(self) -> Mapping[str, TensorBits]:
        """All tensors held now. Not to be written into."""
        return self._tensors

    def read(self, name: str) -> TensorBits:
        found = self._tensors.get(name)
        if found is None:
            raise TargetError(
                f"There is no tensor {name[:80]!r} here; see `tensors` for the names."
            )
        return found

    def holds(self, name: str) -> bool:
        return name in self._tensors

    def holdings(self) -> Iterator[Mapping[str, TensorEntry]]:
        if self._tensors:
            yield {name: entry_of(bits) for name, bits in self._tensors.items()}

    def _begin(self, goal: Goal) -> Draft:
        return _MemoryDraft(goal, self)


class _MemoryDraft(Draft):
    def __init__(self, goal: Goal, target: MemoryTarget) -> None:
        super().__init__(goal, awaited=goal.changed)
        self._target = target
        self._before = target._tensors
        self._next: dict[str, TensorBits] = {
            name: self._before[name] for name in goal.entries if name not in goal.changed
        }

    def _add(self, name: str, bits: AnyBits) -> None:
        self._next[name] = to_bits(bits)

    def _seal(self) -> None:
        self._next = {name: self._next[name] for name in self.goal.entries}

    def check_unmoved(self) -> None:
        if self._target._tensors is not self._before:
            raise TargetChangedError(
                "The target's tensors were replaced since this version was staged; stage it again."
            )

    def write(self) -> None:
        self._target._tensors = self._next

    def read_back(self, names: Collection[str]) -> Mapping[str, TensorEntry]:
        held = self._target._tensors
        return {name: entry_of(held[name]) for name in names}

    def undo(self) -> None:
        self._target._tensors = self._before

    def settle(self) -> None:
        """Nothing is left over: who holds old arrays keeps them."""

    def _discard(self) -> None:
        self._next = {}
