"""Times one coding on one change, against a copy of the same bytes in the same minute.

Every repetition copies the base into warmed buffers (that is the memcpy of the ratios), encodes,
decodes into those buffers and compares every bit with the target. What is reported are medians.
The first round is not counted: it compiles and warms. Speeds are in bytes of the whole served
version, changed or not, since that is what a trainer has to look at.
"""

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from farcast.bench.bounds import Bounds
from farcast.bench.codings import Coding, Encoded
from farcast.bench.data import Change
from farcast.delta import TensorBits
from farcast.delta.bits import Bytes
from farcast.errors import IntegrityError

CORES = 2


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One coding on one change. See `FIELDS` for what the numbers mean."""

    coding: str
    origin: str
    data: str
    hop: str
    elements: int
    changed: int
    density: float
    bytes_full: int
    bytes_encoded: int
    bits_per_changed: float
    factor: float
    bound_bits: float
    bound_independent_bits: float
    over_bound: float
    encode_gb_s: float
    decode_gb_s: float
    memcpy_gb_s: float
    encode_of_memcpy: float
    decode_of_memcpy: float
    encode_two_cores: float | None
    decode_two_cores: float | None
    copy_two_cores: float | None
    encode_scratch_bytes: int
    decode_scratch_bytes: int
    digests: bool
    own_threads: bool
    repetitions: int
    verified: bool


FIELDS = {
    "elements": "elements of the target, two in a byte of packed codes",
    "bits_per_changed": "8 * bytes_encoded / changed (of an anchor: bits per element)",
    "factor": "bytes_full / bytes_encoded",
    "bound_bits": "bits per changed element, positions conditioned on the old exponent or code",
    "bound_independent_bits": "bits per changed element if positions were independent",
    "over_bound": "bits_per_changed / bound_bits",
    "encode_gb_s": "10^9 bytes of the served version a second, one core; so too decode, memcpy",
    "encode_of_memcpy": "encode_gb_s / memcpy_gb_s; so too decode",
    "encode_two_cores": "speed on two threads over speed on one; null: not measured. Codings that "
    "know of no threads are given half of the tensors in each; see `copy_two_cores`",
    "copy_two_cores": "the same of the copy: where memory is the limit, no coding gains more",
    "encode_scratch_bytes": "most memory held beyond base, target and receiver's buffers, the "
    "result included; the larger of what Python traced and what the process grew by",
    "digests": "whether digests of the tensors are made by encode and verified by decode",
    "own_threads": "it starts threads itself: its speed is not that of one core",
    "verified": "the decoded bits equalled the target in every repetition",
}


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to measure: `repetitions`, fewer (`least`) once `seconds` have passed."""

    repetitions: int = 7
    least: int = 3
    seconds: float = 4.0


class Buffers:
    """The receiver's tensors, warmed."""

    def __init__(self, change: Change) -> None:
        self._change = change
        self.arrays: dict[str, Bytes] = {
            name: np.zeros(bits.data.size, np.uint8) for name, bits in change.target.items()
        }
        self.reset()

    def reset(self) -> None:
        """Hold the base again, or zeros where there is none."""
        for name, array in self.arrays.items():
            base = self._change.base.get(name)
            if base is None:
                array.fill(0)
            else:
                np.copyto(array, base.data)

    def copy_target(self, pieces: int = 1, piece: int = 0) -> None:
        """The memcpy that speeds are compared with: every served byte once; or one of so many
        pieces of each tensor."""
        for name, bits in self._change.target.items():
            size = bits.data.size
            part = slice(piece * size // pieces, (piece + 1) * size // pieces)
            np.copyto(self.arrays[name][part], bits.data[part])

    def check(self, coding: Coding) -> None:
        for name, bits in self._change.target.items():
            if not np.array_equal(self.arrays[name], bits.data):
                raise IntegrityError(
                    f"{coding.name} decoded other bits than were encoded, in {name[:80]!r}; "
                    "do not use it."
                )


@dataclass
class Timings:
    """Seconds, one entry a repetition."""

    memcpy: list[float] = field(default_factory=list)
    encode: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    memcpy_two: list[float] = field(default_factory=list)
    encode_two: list[float] = field(default_factory=list)
    decode_two: list[float] = field(default_factory=list)


def measure(
    coding: Coding, change: Change, bounds: Bounds, effort: Effort, *, two_cores: bool = True
) -> Row:
    """One row. Raises `IntegrityError` when the coding does not give back the target's bits."""
    buffers = Buffers(change)
    with ThreadPoolExecutor(CORES) as pool:
        on_two = _on_two_cores(coding, change, pool) if two_cores else None
        encoded = _round(coding, change, buffers, Timings())
        scratch = _scratch(coding, change, buffers)
        timings = Timings()
        started = time.perf_counter()
        while not _enough(timings, effort, time.perf_counter() - started):
            encoded = _round(coding, change, buffers, timings)
            if on_two is not None:
                with _clocked(timings.memcpy_two):
                    list(pool.map(partial(buffers.copy_target, CORES), range(CORES)))
                buffers.reset()
                on_two(buffers, timings)
                buffers.check(coding)
    return _row(coding, change, bounds, encoded.nbytes, timings, scratch)


def _round(coding: Coding, change: Change, buffers: Buffers, timings: Timings) -> Encoded:
    with _clocked(timings.memcpy):
        buffers.copy_target()
    buffers.reset()
    with _clocked(timings.encode):
        encoded = coding.encode(change)
    with _clocked(timings.decode):
        coding.decode(encoded, buffers.arrays)
    buffers.check(coding)
    return encoded


def _on_two_cores(
    coding: Coding, change: Change, pool: ThreadPoolExecutor
) -> Callable[[Buffers, Timings], None] | None:
    """What codes and decodes the change on two cores, timed; None where nothing can."""
    if coding.own_threads:
        return None
    if coding.threads is not None:
        other = coding.on(CORES)
        _code_itself(other, change, Buffers(change), Timings())  # warms its threads
        return partial(_code_itself, other, change)
    halves = _halves(change)
    return None if halves is None else partial(_code_halves, coding, halves, pool)


def _code_itself(coding: Coding, change: Change, buffers: Buffers, timings: Timings) -> None:
    with _clocked(timings.encode_two):
        encoded = coding.encode(change)
    with _clocked(timings.decode_two):
        coding.decode(encoded, buffers.arrays)


def _code_halves(
    coding: Coding,
    halves: list[Change],
    pool: ThreadPoolExecutor,
    buffers: Buffers,
    timings: Timings,
) -> None:
    with _clocked(timings.encode_two):
        encoded = list(pool.map(coding.encode, halves))
    with _clocked(timings.decode_two):
        list(pool.map(lambda one: coding.decode(one, buffers.arrays), encoded))


def _enough(timings: Timings, effort: Effort, seconds: float) -> bool:
    done = len(timings.encode)
    return done >= effort.repetitions or (done >= effort.least and seconds > effort.seconds)


@contextmanager
def _clocked(into: list[float]) -> Iterator[None]:
    """Time the body, without a garbage collection in it."""
    collecting = gc.isenabled()
    gc.disable()
    started = time.perf_counter()
    try:
        yield
    finally:
        into.append(time.perf_counter() - started)
        if collecting:
            gc.enable()


def _halves(change: Change) -> list[Change] | None:
    """Two changes of about the same bytes, by whole tensors; None for a single tensor."""
    sizes = {name: bits.data.nbytes for name, bits in change.target.items()}
    parts: list[list[str]] = [[] for _ in range(CORES)]
    filled = [0] * CORES
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = filled.index(min(filled))
        parts[least].append(name)
        filled[least] += sizes[name]
    if not all(parts):
        return None
    return [_part(change, sorted(names)) for names in parts]


def _part(change: Change, names: list[str]) -> Change:
    def pick(tensors: Mapping[str, TensorBits]) -> dict[str, TensorBits]:
        return {name: tensors[name] for name in names if name in tensors}

    return Change(
        data=change.data,
        hop=change.hop,
        base=pick(change.base),
        target=pick(change.target),
        packed=change.packed & set(names),
    )


def _scratch(coding: Coding, change: Change, buffers: Buffers) -> tuple[int, int]:
    """Most memory that encode and decode held at once beyond what was there before."""
    buffers.reset()
    kept: list[Encoded] = []
    encode = _most_memory(lambda: kept.append(coding.encode(change)))
    decode = _most_memory(lambda: coding.decode(kept[0], buffers.arrays))
    return encode, decode


def _most_memory(action: Callable[[], None]) -> int:
    tracemalloc.start()
    resident = _reset_peak()
    try:
        before = tracemalloc.get_traced_memory()[0]
        action()
        traced = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    grown = _status("VmHWM") - resident if resident else 0
    return max(traced, grown, 0)


def _reset_peak() -> int:
    """Let Linux forget the peak of the resident size; the size now, 0 where it can't be told."""
    try:
        Path("/proc/self/clear_refs").write_bytes(b"5")
    except OSError:  # another system, or a sandbox: what Python traces must do
        return 0
    return _status("VmRSS")


def _status(entry: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{entry}:"):
            return int(line.split()[1]) << 10
    return 0


def _row(
    coding: Coding,
    change: Change,
    bounds: Bounds,
    nbytes: int,
    timings: Timings,
    scratch: tuple[int, int],
) -> Row:
    count = max(1, bounds.changed)
    memcpy, encode, decode = map(median, (timings.memcpy, timings.encode, timings.decode))
    bits = 8 * nbytes / count
    return Row(
        coding=coding.name,
        origin=coding.origin,
        data=change.data,
        hop=change.hop,
        elements=bounds.elements,
        changed=bounds.changed,
        density=bounds.changed / max(1, bounds.elements),
        bytes_full=change.nbytes,
        bytes_encoded=nbytes,
        bits_per_changed=bits,
        factor=change.nbytes / max(1, nbytes),
        bound_bits=bounds.conditioned / count,
        bound_independent_bits=bounds.independent / count,
        over_bound=bits * count / bounds.conditioned if bounds.conditioned else 0.0,
        encode_gb_s=change.nbytes / encode / 1e9,
        decode_gb_s=change.nbytes / decode / 1e9,
        memcpy_gb_s=change.nbytes / memcpy / 1e9,
        encode_of_memcpy=memcpy / encode,
        decode_of_memcpy=memcpy / decode,
        encode_two_cores=_gain(timings.encode, timings.encode_two),
        decode_two_cores=_gain(timings.decode, timings.decode_two),
        copy_two_cores=_gain(timings.memcpy, timings.memcpy_two),
        encode_scratch_bytes=scratch[0],
        decode_scratch_bytes=scratch[1],
        digests=coding.digests,
        own_threads=coding.own_threads,
        repetitions=len(timings.encode),
        verified=True,
    )


def _gain(one: list[float], two: list[float]) -> float | None:
    return median(one) / median(two) if two else None
