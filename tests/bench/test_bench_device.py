"""The codec's rows for a GPU: measured where there is one, plainly absent where there is none."""

import io

import pytest
from recordings import random_change
from rich.console import Console

torch = pytest.importorskip("torch")

from device_world import PLACES, pretend  # noqa: E402
from farcast.bench import on_device  # noqa: E402
from farcast.bench.on_device import NO_GPU, DeviceReport, measure_device, measure_on  # noqa: E402
from farcast.bench.report import device_table  # noqa: E402
from farcast.delta import encode_bits  # noqa: E402
from farcast.delta.writing import EncodedDelta  # noqa: E402
from farcast.errors import IntegrityError  # noqa: E402

CHANGE = random_change(1, ("BF16", "F8_E4M3"), (300, 200), 0.01)


@pytest.mark.parametrize("place", PLACES)
def test_a_change_is_measured_on_a_device(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    row = measure_on(place, CHANGE, repetitions=2)
    assert row.verified
    assert row.bytes_encoded == len(encode_bits(CHANGE.base, CHANGE.target).data)
    assert row.encode_of_copy == pytest.approx(row.encode_gb_s / row.copy_gb_s)
    assert min(row.encode_gb_s, row.decode_gb_s, row.copy_gb_s) > 0
    console = Console(file=io.StringIO(), width=80)
    console.print(device_table(DeviceReport(device="a GPU", note="", rows=[row])))
    assert "farcast on a GPU" in console.file.getvalue()  # type: ignore[attr-defined]


def test_other_bytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    real, calls = encode_bits, []

    def other(*arguments: object, **how: object) -> EncodedDelta:
        made = real(*arguments, **how)  # type: ignore[arg-type]
        calls.append(made)
        damaged = made.data[:-1] + bytes([made.data[-1] ^ 1])
        return made if len(calls) == 1 else EncodedDelta(damaged, made.entries, 0, 0)

    monkeypatch.setattr(on_device, "encode_bits", other)
    with pytest.raises(IntegrityError, match="other bytes"):
        measure_on("cpu", CHANGE, repetitions=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_that_is_said() -> None:
    report = measure_device(iter([CHANGE]))
    assert report == DeviceReport(device=None, note=NO_GPU, rows=[])
