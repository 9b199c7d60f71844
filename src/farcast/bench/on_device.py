"""The delta codec on a GPU, where there is one: the same changes, on tensors that lie there.

Base, target and receiver's tensors are on the device before the clock starts, and what was coded
is there when it stops: an encoding ends with bytes in host memory, a decoding with the digests that
it verified. The copy that speeds are compared with is one on the device.
"""

import sys
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from statistics import median
from typing import Any

import msgspec

from farcast.bench.data import Change
from farcast.delta import Patch, encode_bits, entry_of, to_bits
from farcast.errors import IntegrityError

NO_TORCH = "Nothing was measured on a GPU: PyTorch is not installed, so none could be looked for."
NO_GPU = "Nothing was measured on a GPU: there is none here that PyTorch can use."


class DeviceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One change. Speeds are in 10^9 bytes of the served version a second, medians."""

    data: str
    hop: str
    bytes_full: int
    bytes_encoded: int
    encode_gb_s: float
    decode_gb_s: float
    copy_gb_s: float
    encode_of_copy: float
    decode_of_copy: float
    repetitions: int
    verified: bool


class DeviceReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured on a GPU; without one, `device` is None and `note` says so."""

    device: str | None
    note: str
    rows: list[DeviceRow]


def measure_device(changes: Iterable[Change], *, repetitions: int = 5) -> DeviceReport:
    """Rows for `changes`, which are not looked at where there is no GPU. Raises `IntegrityError`
    when other bytes or bits come from it than from the host's code."""
    if find_spec("torch") is None:
        return DeviceReport(device=None, note=NO_TORCH, rows=[])
    import torch

    if not torch.cuda.is_available():
        return DeviceReport(device=None, note=NO_GPU, rows=[])
    rows = [measure_on("cuda", change, repetitions=repetitions) for change in changes]
    name = torch.cuda.get_device_name()
    note = f"Measured on {name}; PyTorch {torch.__version__}, Python {sys.version.split()[0]}."
    return DeviceReport(device=name, note=note, rows=rows)


def measure_on(place: Any, change: Change, *, repetitions: int) -> DeviceRow:
    """One row, on the torch device `place`. The first round is not counted: it compiles."""
    import torch

    from farcast.delta.placed import DeviceBits

    like = DeviceBits.of(torch.empty(0, device=place))
    base = {name: like.place(bits) for name, bits in change.base.items()}
    target = {name: like.place(bits) for name, bits in change.target.items()}
    known = {name: entry_of(bits) for name, bits in change.base.items()}
    data = encode_bits(change.base, change.target, base_entries=known).data
    held = {name: bits.copied() for name, bits in base.items()}
    times: list[tuple[float, float, float]] = []
    for _ in range(repetitions + 1):
        for name, bits in base.items():
            bits.copied(held[name])
        encode = _seconds(lambda: _same(encode_bits(base, target, base_entries=known).data, data))
        decode = _seconds(lambda: _apply(data, held))
        if any(to_bits(held[name]) != bits for name, bits in change.target.items()):
            raise IntegrityError("The GPU decoded other bits than were encoded; do not use it.")
        copy = _seconds(lambda: [bits.copied(held[name]) for name, bits in target.items()])
        times.append((encode, decode, copy))
    encode, decode, copy = (median(column) for column in zip(*times[1:], strict=True))
    return DeviceRow(
        data=change.data,
        hop=change.hop,
        bytes_full=change.nbytes,
        bytes_encoded=len(data),
        encode_gb_s=change.nbytes / encode / 1e9,
        decode_gb_s=change.nbytes / decode / 1e9,
        copy_gb_s=change.nbytes / copy / 1e9,
        encode_of_copy=copy / encode,
        decode_of_copy=copy / decode,
        repetitions=repetitions,
        verified=True,
    )


def _apply(data: bytes, held: Any) -> None:
    patch = Patch.open(data)
    for name in patch.entries:
        patch.change_bits(name, held[name])


def _same(made: bytes, data: bytes) -> None:
    if made != data:
        raise IntegrityError("The GPU encoded other bytes than the host's code; do not use it.")


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started
