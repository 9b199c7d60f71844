"""`farcast bench`: from a run's store to a table, a file and a picture."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from recordings import publish_run
from rich.console import Console

from farcast.bench.data import BASE, DELTAS, HOPS, HopRecord, Recording
from farcast.bench.measure import Row
from farcast.bench.record import _write_base
from farcast.bench.report import NO_BF16, WIDE, table_of
from farcast.bench.synthetic import synthetic
from farcast.cli.main import main
from farcast.delta import TensorBits, entry_of
from farcast.errors import ConfigError
from farcast.store import open_store
from farcast.store.rebuilding import Weights
from farcast.types import VersionRef

FIELDS = {
    "coding",
    "data",
    "hop",
    "elements",
    "changed",
    "bits_per_changed",
    "factor",
    "encode_gb_s",
    "decode_gb_s",
    "memcpy_gb_s",
    "bound_bits",
    "encode_of_memcpy",
    "decode_of_memcpy",
    "encode_two_cores",
    "decode_two_cores",
    "encode_scratch_bytes",
    "decode_scratch_bytes",
}
Farcast = Callable[..., tuple[int, str, str]]


@pytest.fixture
def farcast(capsys: pytest.CaptureFixture[str]) -> Farcast:
    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(list(arguments))
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return run


@pytest.fixture
def recording(farcast: Farcast, tmp_path: Path) -> Path:
    store = tmp_path / "store"
    publish_run(open_store(str(store)))
    out = tmp_path / "recording"
    status, said, _ = farcast("bench", "record", "--store", str(store), "--out", str(out))
    assert status == 0
    assert "Recorded 3 hops of tiny, versions 0 to 3" in " ".join(said.split())
    return out


def test_a_run_is_recorded_and_measured(farcast: Farcast, recording: Path, tmp_path: Path) -> None:
    result, picture = tmp_path / "codec.json", tmp_path / "codec.png"
    status, said, _ = farcast(
        *("bench", "codec", "--data", str(recording), "--quick"),
        *("--json", str(result), "--plot", str(picture)),
    )
    assert status == 0
    assert "tiny, 2-3" in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    report = json.loads(result.read_bytes())
    assert report["device"]["note"] in " ".join(said.split())
    rows = report["rows"]
    assert all(row.keys() >= FIELDS for row in rows)
    assert all(row["verified"] for row in rows)
    assert all(row["encode_gb_s"] > 0 and row["decode_gb_s"] > 0 for row in rows)
    (squash,) = report["squashes"]
    assert (squash["hop"], squash["deltas"]) == ("0-3", 3)
    assert 0 < squash["bytes_squash"] < squash["bytes_chain"]
    assert "squashed" in said
    data = {row["data"] for row in rows}
    assert data >= {"tiny", "anchor", "tiny as fp8-e4m3", "synthetic"}
    assert {row["origin"] for row in rows} >= {
        "own",
        "reimplemented from its published description",
    }
    for row in rows:
        assert row["bits_per_changed"] == pytest.approx(8 * row["bytes_encoded"] / row["changed"])
        assert row["factor"] == pytest.approx(row["bytes_full"] / row["bytes_encoded"])


def test_two_cores_are_measured_on_recorded_hops(
    farcast: Farcast, recording: Path, tmp_path: Path
) -> None:
    result = tmp_path / "codec.json"
    farcast("bench", "codec", "--data", str(recording), "--quick", "--json", str(result))
    rows = json.loads(result.read_bytes())["rows"]
    own = [row for row in rows if row["coding"] == "farcast" and row["data"] == "tiny"]
    assert own
    assert all(row["encode_two_cores"] > 0 and row["decode_two_cores"] > 0 for row in own)


def test_a_folder_without_a_recording_is_one_sentence(farcast: Farcast, tmp_path: Path) -> None:
    status, _, err = farcast("bench", "codec", "--data", str(tmp_path))
    assert status == 2
    assert err.startswith("farcast: ")
    assert "bench record" in err


def fp16_recording(folder: Path) -> Path:
    """Two versions of one half-precision tensor."""
    folder.mkdir()
    random = np.random.default_rng(5)
    old = random.normal(0, 0.02, (96, 192)).astype("<f2").view("<u2").reshape(-1)
    places = np.flatnonzero(random.random(old.size) < 0.01).astype(np.uint32)
    bits = TensorBits("F16", (96, 192), old.view(np.uint8))
    weights = Weights(
        ref=VersionRef("halves", 0, "0" * 64), bits={"w": bits}, entries={"w": entry_of(bits)}
    )
    _write_base(folder / BASE, weights)
    arrays = {"halves/0-1/w/positions": places, "halves/0-1/w/values": old[places] + np.uint16(1)}
    np.savez(folder / DELTAS, **arrays)
    hop = HopRecord(run="halves", base=0, target=1, changed=places.size, elements=old.size)
    (folder / HOPS).write_bytes(msgspec.json.encode([hop]))
    return folder


def test_weights_without_bf16_are_measured_and_what_is_left_out_is_one_sentence(
    farcast: Farcast, tmp_path: Path
) -> None:
    folder = fp16_recording(tmp_path / "recording")
    result = tmp_path / "codec.json"
    told = farcast("bench", "codec", "--data", str(folder), "--quick", "--json", str(result))
    assert told[0] == 0
    assert NO_BF16 in " ".join(told[1].split())
    rows = json.loads(result.read_bytes())["rows"]
    assert {row["data"] for row in rows} >= {"halves", "anchor", "halves as fp8-e4m3"}
    assert "synthetic" not in {row["data"] for row in rows}
    with pytest.raises(ConfigError, match="BF16"):
        synthetic(Recording(folder).base(), 0.01)


def test_a_recording_without_a_hop_is_one_sentence(farcast: Farcast, recording: Path) -> None:
    (recording / HOPS).write_text("[]")
    status, _, err = farcast("bench", "codec", "--data", str(recording))
    assert status == 2
    assert "no change" in err
    assert "bench record" in " ".join(err.split())


def test_the_wide_table_shows_what_a_copy_gains_beside_what_farcast_gains(
    farcast: Farcast, recording: Path, tmp_path: Path
) -> None:
    result = tmp_path / "codec.json"
    farcast("bench", "codec", "--data", str(recording), "--quick", "--json", str(result))
    held = json.loads(result.read_bytes())["rows"]
    row = next(row for row in held if row["coding"] == "farcast" and row["encode_two_cores"])
    console = Console(file=io.StringIO(), width=WIDE)
    console.print(table_of([msgspec.convert(row, Row)], wide=True))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert re.search("2 cores +copy", " ".join(lines))
    gains = (row["encode_two_cores"], row["decode_two_cores"], row["copy_two_cores"])
    assert re.search(r"{:.2f}x / {:.2f}x +{:.2f}x".format(*gains), " ".join(lines))
