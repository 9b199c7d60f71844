import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farcast.cli.main import app


@pytest.mark.full
def test_serving_is_measured_through_the_real_commands(tmp_path: Path) -> None:
    path = tmp_path / "serve.json"
    arguments = ["bench", "serve", "--seconds", "0.2", "--rounds", "1", "--json", str(path)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    found = json.loads(path.read_text())
    assert {(row["way"], row["connections"]) for row in found["rows"]} == {
        (way, count) for way in ("direct", "proxy", "gateway") for count in (1, 16, 64)
    }
    assert all(row["failed"] == 0 for row in found["rows"])
    assert found["proxy_added_ms_p50"] > 0
    slow = [r["requests_per_s"] for r in found["rows"] if r["way"] == "proxy"][1:]
    assert found["proxy_requests_per_s"] == min(slow)
