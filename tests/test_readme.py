"""What the README shows is run, so that it stays true."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})  # our own text
    assert (tmp_path / "served").is_dir()


def test_every_command_named_exists() -> None:
    from farcast.cli.main import app

    known = CliRunner().invoke(app, ["--help"]).stdout
    for command in set(re.findall(r"`farcast ([a-z]+)", README)):
        assert command in known


def test_links_lead_somewhere() -> None:
    root = Path(__file__).parent.parent
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (root / target).exists(), target
