"""What one delta over several versions takes, against the single ones in a row."""

import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

import msgspec

from farcast.bench.data import Recording
from farcast.delta import EncodedDelta, Patch, TensorBits, encode_bits, entry_of, squash_bits
from farcast.errors import IntegrityError

MOST_HOPS = 16
"""Hops of a run that are squashed: the largest of the default levels."""


class SquashRow(msgspec.Struct, frozen=True, kw_only=True):
    """The first hops of one run, as single deltas and as one. `squash_seconds` go from the base and
    the deltas to the one, `encode_seconds` from the base and the last version, on one core."""

    data: str
    hop: str
    deltas: int
    bytes_chain: int
    bytes_squash: int
    squash_over_chain: float
    changed_chain: int
    changed_squash: int
    squash_seconds: float
    encode_seconds: float


def measure_squashes(folder: Path) -> Iterator[SquashRow]:
    """A row for each run of two hops or more."""
    recording = Recording(folder)
    for run in recording.runs:
        if sum(hop.run == run for hop in recording.hops) > 1:
            yield _measure(recording, run)


def _measure(recording: Recording, run: str) -> SquashRow:
    base = recording.base()
    known = {name: entry_of(bits) for name, bits in base.items()}
    chain: list[EncodedDelta] = []
    names: list[str] = []
    target: Mapping[str, TensorBits] = base
    for hop in islice(recording.walk(run), MOST_HOPS):
        chain.append(encode_bits(hop.base, hop.target))
        names.append(hop.hop)
        target = hop.target
    started = time.perf_counter()
    patches = [Patch.open(one.data) for one in chain]
    squashed = squash_bits(patches, base, base_entries=known)
    between = time.perf_counter()
    direct = encode_bits(base, target, base_entries=known)
    ended = time.perf_counter()
    if squashed != direct:
        raise IntegrityError(f"Squashing {run} gave other bytes than its ends; do not use it.")
    size = sum(len(one.data) for one in chain)
    return SquashRow(
        data=run,
        hop=f"{names[0].partition('-')[0]}-{names[-1].partition('-')[2]}",
        deltas=len(chain),
        bytes_chain=size,
        bytes_squash=len(squashed.data),
        squash_over_chain=len(squashed.data) / size,
        changed_chain=sum(one.changed for one in chain),
        changed_squash=squashed.changed,
        squash_seconds=between - started,
        encode_seconds=ended - between,
    )
