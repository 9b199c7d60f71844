"""From patches to served bits, one tensor at a time. No I/O of its own.

A chain of patches is folded per tensor: everything before the last full copy of a tensor is
skipped, and its digest is checked once, after the last patch. The root over all digests then
proves the whole. Refuses to return a tensor whose bits were not verified.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

from farcast.delta import AnyBits, Patch, entry_of, nbytes_of, root_of
from farcast.delta.crew import Crew, threads_for
from farcast.errors import FormatError, IntegrityError
from farcast.lineage import Manifest
from farcast.types import TensorEntry, VersionRef


@dataclass(frozen=True, kw_only=True)
class Weights:
    """All served tensors of one version, with their verified entries. Nobody writes into `bits`."""

    ref: VersionRef
    bits: Mapping[str, AnyBits]
    entries: Mapping[str, TensorEntry]

    @classmethod
    def of(cls, ref: VersionRef, bits: Mapping[str, AnyBits]) -> "Weights":
        """Weights whose entries are computed here; refuses bits that are not those of `ref`."""
        entries = {name: entry_of(tensor) for name, tensor in bits.items()}
        if root_of(entries) != ref.root:
            raise IntegrityError(
                f"The tensors at hand are not those of {ref}; start from an empty copy."
            )
        return cls(ref=ref, bits=bits, entries=entries)


Finished: TypeAlias = tuple[AnyBits, TensorEntry] | None
"""A tensor and what it is; None if it was removed."""


class Chain:
    """The patches of consecutive deltas, by tensor."""

    def __init__(self, steps: Iterable[Sequence[Patch]]) -> None:
        self._patches: dict[str, list[Patch | None]] = {}
        for patches in steps:
            self._add(patches)

    def _add(self, patches: Sequence[Patch]) -> None:
        seen: set[str] = set()
        for patch in patches:
            for name in (*patch.entries, *patch.removed):
                if name in seen:
                    raise FormatError(
                        f"Two objects of one version change {name[:80]!r}; do not use it."
                    )
                seen.add(name)
                kept = patch if name in patch.entries else None
                self._patches.setdefault(name, []).append(kept)

    def __contains__(self, name: object) -> bool:
        return name in self._patches

    def __iter__(self) -> Iterator[str]:
        """Every tensor that some patch names."""
        return iter(self._patches)

    def entry(self, name: str) -> TensorEntry | None:
        """What a tensor that some patch names is after the last one; None if removed."""
        last = self._patches[name][-1]
        return None if last is None else last.entries[name].entry

    def is_whole(self, name: str) -> bool:
        """Whether some patch holds this tensor whole, so that nothing before it is needed."""
        patches = self._patches[name]
        reset = patches[_last_reset(name, patches)]
        return reset is not None and reset.entries[name].kind == "full"

    def finish(self, name: str, base: AnyBits | None, *, owned: bool = False) -> Finished:
        """A tensor that some patch names, after the last patch, verified; None if removed.

        `base` is what it was before the chain, None if it was not there. It is written into
        only if `owned`. The tensor lies where `base` lies, else in host memory.
        """
        patches = self._patches[name]
        last = patches[-1]
        if last is None:
            return None
        start = _last_reset(name, patches)
        bits = base if patches[start] is not None else None
        for patch in patches[start:]:
            if patch is not None:
                bits = patch.turned(name, bits, owned=owned, verify=patch is last)
                owned = True
        return None if bits is None else (bits, last.entries[name].entry)


class _Task(NamedTuple):
    """What makes one tensor."""

    name: str
    make: Callable[[], Finished]


def _result_of(task: _Task) -> Finished:
    return task.make()


class Rebuild:
    """Collects the tensors of one version: first all of a start, then what the chain adds.

    Works on so many `threads`, a tensor each. With `only`, bits of other tensors are neither
    decoded nor kept, just their entries.
    """

    def __init__(
        self, chain: Chain, only: Container[str] | None = None, *, threads: int = 1
    ) -> None:
        self._chain = chain
        self._threads = threads
        self._only = only
        self._started: set[str] = set()
        self._bits: dict[str, AnyBits] = {}
        self._entries: dict[str, TensorEntry] = {}

    def add_base(self, have: Weights) -> None:
        """Start from verified weights; those the chain does not name are kept as they are."""
        tasks: list[_Task] = []
        for name, bits in have.bits.items():
            self._started.add(name)
            if name in self._chain:
                tasks.append(_Task(name, partial(self._chain.finish, name, bits)))
            else:
                self._bits[name], self._entries[name] = bits, have.entries[name]
        self._do(tasks, threads_for(have.bits.values(), self._threads))

    def add_anchor(self, patch: Patch) -> None:
        """Start from one object of an anchor."""
        if patch.removed:
            raise FormatError("An anchor lists removed tensors; do not use that version.")
        tasks: list[_Task] = []
        for name in patch.entries:
            if name in self._started:
                raise FormatError(
                    f"Two objects of one anchor hold {name[:80]!r}; do not use that version."
                )
            self._started.add(name)
            if not self._wanted(name):
                self._note(name, patch.entries[name].entry)
                continue
            tasks.append(_Task(name, partial(self._whole, patch, name)))
        self._do(tasks, self._threads)

    def finish(self, ref: VersionRef) -> Weights:
        """The weights, with the tensors that the chain brought in; their root is not checked."""
        tasks: list[_Task] = []
        for name in self._chain:
            if name in self._started:
                continue
            if self._wanted(name):
                tasks.append(_Task(name, partial(self._chain.finish, name, None)))
            else:
                self._note(name, None)
        self._do(tasks, self._threads)
        return Weights(ref=ref, bits=self._bits, entries=self._entries)

    def _wanted(self, name: str) -> bool:
        return self._only is None or name in self._only

    def _note(self, name: str, start: TensorEntry | None) -> None:
        entry = self._chain.entry(name) if name in self._chain else start
        if entry is not None:
            self._entries[name] = entry

    def _whole(self, patch: Patch, name: str) -> Finished:
        """A tensor of an anchor, after the chain."""
        bits = patch.turned(name, None)
        if name in self._chain:
            return self._chain.finish(name, bits, owned=True)
        return bits, patch.entries[name].entry

    def _do(self, tasks: list[_Task], threads: int) -> None:
        with Crew(threads) as crew:
            for task, made in zip(tasks, crew.each(_result_of, tasks), strict=True):
                if made is not None:
                    self._bits[task.name], self._entries[task.name] = made


def check_weights(weights: Weights, manifest: Manifest) -> Weights:
    """`weights`, if they are exactly what `manifest` describes."""
    if root_of(weights.entries) != manifest.root:
        raise IntegrityError(
            f"What the store holds for {manifest.ref} does not have that root; "
            "do not use that version."
        )
    check_figures(weights.entries, manifest)
    return weights


def check_figures(entries: Mapping[str, TensorEntry], manifest: Manifest) -> None:
    """Refuse a manifest that counts other tensors or bytes than its version has."""
    size = sum(nbytes_of(entry.dtype, entry.shape) for entry in entries.values())
    if (len(entries), size) != (manifest.tensors, manifest.bytes_full):
        raise IntegrityError(
            f"The manifest of {manifest.ref} counts {manifest.tensors} tensors and "
            f"{manifest.bytes_full} bytes, but there are {len(entries)} and {size}; "
            "do not trust its figures."
        )


def _last_reset(name: str, patches: Sequence[Patch | None]) -> int:
    """Index of the last patch that needs nothing before it; 0 if every one does."""
    for index in reversed(range(len(patches))):
        patch = patches[index]
        if patch is None or patch.entries[name].kind == "full":
            return index
    return 0
