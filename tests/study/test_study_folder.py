"""A study writes in its own folders alone: what it did not write is refused, and stays."""

import fcntl
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from farcast.cli.main import main
from farcast.errors import ConfigError
from farcast.study.folder import MARK, check_folder, clear_folder, take_folder

Study = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Study:
    """Run `farcast study` where it has to refuse: what it says."""
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")

    def prepare(*_: object) -> Path:
        raise AssertionError("the folder was not looked at first")

    monkeypatch.setattr("farcast.train.models.prepare_model", prepare)

    def run(out: Path) -> str:
        with pytest.raises(SystemExit) as left:
            main(["study", "--quick", "--figure", "law", "--out", str(out)])
        said = capsys.readouterr().err
        assert left.value.code == 2, said
        assert said.count("\n") == 1, said
        return said

    return run


def files(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize(
    "foreign", ["streams/grpo/step-0001.safetensors", "law.csv", "report.md", "notes.txt"]
)
def test_a_folder_that_holds_anything_else_is_refused_and_left_alone(
    refused: Study, tmp_path: Path, foreign: str
) -> None:
    (tmp_path / foreign).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / foreign).write_text("years of work")
    before = files(tmp_path)
    assert "holds other files" in refused(tmp_path)
    assert files(tmp_path) == before


def test_recordings_that_others_put_into_a_studys_folder_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from farcast.fleet.presets import run_config
    from farcast.study.settings import QUICK
    from farcast.study.streams import open_stream

    foreign = tmp_path / "streams/grpo/step-0001.safetensors"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("years of work")
    run = run_config("tiny", run_id="study", store="memory://", out=tmp_path)
    with pytest.raises(ConfigError, match="holds other files"):
        open_stream("grpo", foreign.parent, tmp_path, run, QUICK, lambda *_: None)
    assert foreign.read_text() == "years of work"


def test_a_file_or_a_dangling_link_is_no_folder(refused: Study, tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("kept")
    link.symlink_to(tmp_path / "gone")
    assert "is not a folder" in refused(file)
    assert "is not a folder" in refused(link)
    assert file.read_text() == "kept"


def test_a_folder_where_a_file_belongs_is_found_before_the_work(
    refused: Study, tmp_path: Path
) -> None:
    (tmp_path / MARK).touch()
    (tmp_path / "law.png").mkdir()
    assert "law.png is a folder" in refused(tmp_path)


def test_one_study_at_a_time_works_in_a_folder(refused: Study, tmp_path: Path) -> None:
    with (tmp_path / MARK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "Another study works in" in refused(tmp_path)


def test_its_own_files_are_cleared_and_no_others(tmp_path: Path) -> None:
    take_folder(tmp_path)
    for name in ("a-1", "a-2", "b"):
        (tmp_path / name).touch()
    clear_folder(tmp_path, re.compile(r"a-\d"))
    assert {path.name for path in tmp_path.iterdir()} == {MARK, "b"}
    check_folder(tmp_path, ["b", "c"])
