"""`farcast bench`: from a run's store to a table, a file and a picture."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from recordings import publish_run

from farcast.cli.main import main
from farcast.store import open_store

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
