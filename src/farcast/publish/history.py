"""The way back: what a publisher keeps so that it can squash deltas without older weights.

A delta from further back needs the bits of that older version, and the publisher holds only the
newest. So it keeps each version's change also in reverse, as a patch from the new bits to the
old; undoing those on a tensor gives what it was. A squashed delta is kept in reverse as well, so
the next level undoes `factor` patches and not `factor` squared. The memory is that of some deltas,
and each tensor that is undone is checked against its digest.

Lives only in the process: after a restart squashed deltas come back as soon as enough versions
were published again, and until then paths go through what is there. Refuses to touch the store.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from farcast.delta import AnyBits, Patch, root_of
from farcast.errors import IntegrityError
from farcast.publish.parts import Tally, encode_part, split
from farcast.store.rebuilding import Chain
from farcast.types import TensorEntry

KEPT_FRACTION = 8
"""A step back larger than this part of the weights is not kept: so dense a change makes squashed
deltas as large as an anchor, and keeping several would cost more memory than a second baseline."""

ALWAYS_KEPT = 1 << 16
"""Bytes of a step that is kept in any case: for small models the format's own bytes count."""


@dataclass(frozen=True, kw_only=True)
class Undo:
    """Patches that turn `version` into `base`, whose root is `base_root`."""

    base: int
    base_root: str
    version: int
    parts: tuple[bytes, ...]

    def worth_keeping(self, bytes_full: int) -> bool:
        """Whether the step is small enough to stay in memory."""
        return sum(map(len, self.parts)) <= max(ALWAYS_KEPT, bytes_full // KEPT_FRACTION)


class WayBack(NamedTuple):
    """What undoes the newest versions, and the root it leads to."""

    chain: Chain
    root: str


class History:
    """Undo steps of committed versions, newest last, by the number of versions that they span."""

    def __init__(self) -> None:
        self._steps: dict[int, list[Undo]] = {}

    def add(self, undo: Undo, *, keep: int) -> None:
        """Remember a step of a version that is committed; `keep` of its span are enough."""
        steps = self._steps.setdefault(undo.version - undo.base, [])
        steps.append(undo)
        del steps[:-keep]

    def clear(self) -> None:
        """Forget everything: the baseline was read from the store."""
        self._steps.clear()

    def way_back(self, newest: Undo, factor: int) -> WayBack | None:
        """Undoes `factor` steps as long as `newest`, which is the last of them and not yet
        added; None where a step is missing."""
        short = newest.version - newest.base
        steps = [*self._steps.get(short, []), newest][-factor:]
        first = newest.version - short * factor
        if [step.base for step in steps] != list(range(first, newest.version, short)):
            return None
        chain = Chain([Patch.open(part) for part in step.parts] for step in reversed(steps))
        return WayBack(chain, steps[0].base_root)


@dataclass
class Reverse:
    """Collects the undo patches of one delta while its parts are encoded, and the seconds of all
    encoding that only the history needs."""

    parts: list[bytes] = field(default_factory=list)
    seconds: float = 0.0
    threads: int = 1

    def add(self, base: Mapping[str, AnyBits], target: Mapping[str, AnyBits]) -> None:
        tally = Tally(threads=self.threads)
        self.parts.append(encode_part(target, base, {}, tally).data)
        self.seconds += tally.seconds


def squash_parts(
    back: WayBack,
    target: Mapping[str, AnyBits],
    tally: Tally,
    reverse: Reverse,
    *,
    part_bytes: int,
) -> Iterator[bytes]:
    """The objects of the change to `target` from what `back` leads to; `reverse` gets the way
    back over the whole span. `tally` holds the entries of `target`."""
    gone = [name for name in back.chain if name not in target]
    reached: dict[str, TensorEntry] = {}
    for names in split(target, part_bytes=part_bytes):
        started = time.perf_counter()
        before: dict[str, AnyBits] = {}
        for name in (*names, *gone):
            made = (
                back.chain.finish(name, target.get(name))
                if name in back.chain
                else (target[name], tally.entries[name])
            )
            if made is not None:
                before[name], reached[name] = made
        gone = []
        reverse.seconds += time.perf_counter() - started
        after = {name: target[name] for name in names}
        known = {name: reached[name] for name in before}
        squashed = Tally(threads=reverse.threads)
        encoded = encode_part(before, after, known, squashed)
        reverse.seconds += squashed.seconds
        if encoded.entries != known:
            reverse.add(before, after)
            yield encoded.data
    if root_of(reached) != back.root:
        raise IntegrityError(
            "Undoing the last versions did not lead back to the older one; restart the publisher."
        )
