"""Recorded consecutive versions of a run: the layout on disk, and the changes between them.

    base.safetensors   all served tensors of the version that every run below starts from
    deltas.npz         "{run}/{base}-{target}/{tensor}/positions": where words changed, ascending,
                       counted in the flattened tensor (any unsigned integers), and
                       ".../values": the new words (unsigned integers as wide as one word).
                       A tensor without an entry did not change.
    hops.json          [{"run", "base", "target", "changed", "elements"}, ...]: the hops in order;
                       each run's hops follow one another, the first from base.safetensors.
                       `changed` and `elements` count words.

A word is an element, or a byte of two packed 4-bit codes. Refuses a recording whose files
contradict one another; nothing in it is ever unpickled.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from farcast.bench.arrays import Arrays, open_arrays
from farcast.delta import TensorBits, Words, word_bytes, words_of
from farcast.errors import ConfigError, FormatError
from farcast.replica.shards import read_shard
from farcast.types import Name

BASE = "base.safetensors"
DELTAS = "deltas.npz"
HOPS = "hops.json"

_WIDEST = 8
"""Bytes of a position or a word."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class HopRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of hops.json."""

    run: Name
    base: _Count
    target: _Count
    changed: _Count
    elements: _Count

    @property
    def key(self) -> str:
        return f"{self.run}/{self.base}-{self.target}"


@dataclass(frozen=True, kw_only=True)
class Change:
    """Two versions to measure codings on. Nobody writes into their bits.

    `packed` names the U8 tensors whose bytes hold two 4-bit codes each.
    """

    data: str
    hop: str
    base: Mapping[str, TensorBits]
    target: Mapping[str, TensorBits]
    packed: frozenset[str] = frozenset()

    @property
    def nbytes(self) -> int:
        return sum(bits.data.nbytes for bits in self.target.values())

    @property
    def is_anchor(self) -> bool:
        return not self.base


class Recording:
    """A folder of recorded versions, read as it is asked for."""

    def __init__(self, folder: Path) -> None:
        missing = [name for name in (BASE, DELTAS, HOPS) if not (folder / name).is_file()]
        if missing:
            raise ConfigError(
                f"{folder} has no {missing[0]}; name a folder that `farcast bench record` wrote."
            )
        self.folder = folder
        try:
            self.hops = msgspec.json.decode((folder / HOPS).read_bytes(), type=list[HopRecord])
        except msgspec.DecodeError as error:
            raise FormatError(f"{folder / HOPS} is malformed ({error}); record again.") from error
        if not self.hops:
            raise ConfigError(
                f"{folder} holds no change between versions; name a folder that "
                "`farcast bench record` wrote."
            )

    @property
    def runs(self) -> list[str]:
        return list(dict.fromkeys(hop.run for hop in self.hops))

    def base(self) -> dict[str, TensorBits]:
        shard = read_shard(self.folder / BASE)
        return {name: shard.read(name) for name in sorted(shard.spans)}

    def walk(self, run: str) -> Iterator[Change]:
        """The changes of one run in order. Tensors that did not change are shared."""
        held: Mapping[str, TensorBits] = self.base()
        before: HopRecord | None = None
        for hop in (hop for hop in self.hops if hop.run == run):
            if before is not None and before.target != hop.base:
                raise FormatError(f"The hop {hop.key} does not follow {before.key}; record again.")
            with open_arrays(self.folder / DELTAS) as deltas:
                target = _applied(held, deltas, hop)
            yield Change(data=run, hop=f"{hop.base}-{hop.target}", base=held, target=target)
            held, before = target, hop


def _applied(
    base: Mapping[str, TensorBits], deltas: Arrays, hop: HopRecord
) -> dict[str, TensorBits]:
    target = dict(base)
    changed = 0
    for name, bits in base.items():
        key = f"{hop.key}/{name}"
        if f"{key}/positions" not in deltas:
            continue
        elements = words_of(bits).size
        positions = deltas.read(f"{key}/positions", elements * _WIDEST)
        values = deltas.read(f"{key}/values", elements * _WIDEST)
        target[name] = _overwritten(bits, positions, values, key)
        changed += positions.size
    if changed != hop.changed or sum(words_of(b).size for b in base.values()) != hop.elements:
        raise FormatError(
            f"The counts of {hop.key} in {HOPS} are not those of its data; record again."
        )
    return target


def _overwritten(bits: TensorBits, positions: Words, values: Words, key: str) -> TensorBits:
    data = np.array(bits.data)
    words = data.view(f"<u{word_bytes(bits.dtype)}")
    if positions.dtype.kind != "u" or values.dtype != words.dtype or positions.ndim != 1:
        raise FormatError(f"The words of {key} have a wrong type; record again.")
    if positions.shape != values.shape or (positions.size and positions.max() >= words.size):
        raise FormatError(f"The positions of {key} leave the tensor; record again.")
    words[positions] = values
    return TensorBits(bits.dtype, bits.shape, data)
