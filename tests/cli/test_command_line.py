"""What goes wrong for a person is one sentence on stderr, a status, and nothing lost."""

import errno
import inspect
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from farcast.cli import boundary, options
from farcast.cli.main import app, main
from farcast.errors import FarcastError, StoreFullError


@pytest.fixture
def farcast(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Run a command line in an empty folder: (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(list(arguments))
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return run


Farcast = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--model", "no/such/folder"], "There is no model 'no/such/folder'"),
        (["demo", "--model", "."], "holds no config.json"),
        (["demo", "--link", "1mbit,99999999999s"], "an hour at most"),
        (["demo", "--link", "0.0001kbit,1ms"], "1kbit or more"),
        (["demo", "--link", "fast"], "write bandwidth and round trip like 100mbit,80ms"),
        (["demo", "--resume", "--out", "nothing"], "There is no run to resume"),
        (["demo", "--resume"], "There is no run to resume"),
        (["demo", "--model", "tiny", "--out", "/dev/null/x"], "cannot be written"),
        (["demo", "--model", "tiny", "--json", "absent/out.json"], "cannot be written"),
        (["demo", "--model", "tiny", "--store", "ftp://x/y"], "No store is known for 'ftp'"),
        (["train", "--config", "absent.json"], "There is no file absent.json"),
        (["worker", "--store", "ftp://x"], "No store is known for 'ftp'"),
        (["worker", "--store", "st", "--link", "1,2"], "is not understood"),
        (["worker", "--store", "st", "--id", "a/b"], "'a/b'"),
        (["status", "--store", "s3://key:word@bucket/x"], "holds a user"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_users_mistake_is_one_sentence_with_status_two(
    farcast: Farcast, tmp_path: Path, arguments: list[str], words: str
) -> None:
    status, out, err = farcast(*arguments)
    assert status == 2
    assert out == ""
    assert words in err
    assert err.startswith("farcast: ")
    assert err.count("\n") == 1, err
    assert "word@" not in err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_used_folder_is_refused_and_left_alone(farcast: Farcast, tmp_path: Path) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "config.json").write_text("{}")
    status, _, err = farcast("demo", "--model", "tiny", "--out", str(used))
    assert status == 2
    assert "continue it with --resume" in err
    (used / "config.json").rename(used / "thesis.txt")
    status, _, err = farcast("demo", "--model", "tiny", "--out", str(used))
    assert status == 2
    assert "holds other files" in err
    assert [path.name for path in used.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("command", ["verify", "inspect", "plan", "status"])
def test_a_store_without_a_run_says_so(farcast: Farcast, command: str) -> None:
    status, _, err = farcast(command, "--store", "empty")
    assert status == 4 or status == 5
    assert err.count("\n") == 1
    assert "run" in err


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        (errno.ENOSPC, 4, "no space left"),
        (errno.EDQUOT, 4, "quota"),
        (errno.EACCES, 2, "permission"),
        (errno.EROFS, 2, "read-only"),
    ],
)
def test_what_the_system_refuses_is_one_sentence(
    capsys: pytest.CaptureFixture[str], code: int, status: int, words: str
) -> None:
    def refuse(_: list[str]) -> None:
        raise OSError(code, "raw words", "/data/file")

    with pytest.raises(SystemExit) as left:
        boundary.run(refuse, [])
    err = capsys.readouterr().err
    assert left.value.code == status
    assert err.startswith("farcast: /data/file: ")
    assert words in err
    assert err.count("\n") == 1


def test_a_bug_keeps_its_traceback_and_debug_shows_any() -> None:
    def bug(_: list[str]) -> None:
        raise ZeroDivisionError

    def refuse(_: list[str]) -> None:
        raise StoreFullError("full")

    with pytest.raises(ZeroDivisionError):
        boundary.run(bug, [])
    with pytest.raises(StoreFullError):
        boundary.run(refuse, ["demo", "--debug"])


def test_every_error_has_a_status_of_failure() -> None:
    def tree(kind: type[FarcastError]) -> list[type[FarcastError]]:
        return [kind, *(t for child in kind.__subclasses__() for t in tree(child))]

    assert all(kind.exit_code > 0 for kind in tree(FarcastError))


def commands(group: Any = None, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Every command by what is typed for it."""
    group = group or get_command(app)
    found = {}
    for name, command in group.commands.items():
        words = (*path, name)
        found[" ".join(words)] = command
        if hasattr(command, "commands"):
            found |= commands(command, words)
    return found


def examples(command: Any) -> list[str]:
    """The lines of its code blocks, as typed: continued ones joined."""
    blocks = inspect.cleandoc(command.help).split("```")[1::2]
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip()]


@pytest.mark.parametrize("name", sorted(commands()))
def test_help_teaches_by_examples_whose_options_there_are(name: str) -> None:
    held = commands()
    lines = [shlex.split(line, comments=True) for line in examples(held[name])]
    assert any(words[1 : 1 + len(name.split())] == name.split() for words in lines), lines
    for words in lines:
        if words[0] != "farcast":
            continue
        typed = " ".join(words[1:3]) if " ".join(words[1:3]) in held else words[1]
        options = {option for param in held[typed].params for option in param.opts}
        named = [word for word in words if word.startswith("--")]
        assert set(named) <= options, (typed, named)
        wanted = [p.opts for p in held[typed].params if p.required and p.opts[0].startswith("--")]
        assert all(set(opts) & set(named) for opts in wanted), (typed, wanted)


def test_help_fits_eighty_columns(farcast: Farcast, monkeypatch: pytest.MonkeyPatch) -> None:
    """No example is broken in two, and what an option takes is told in a word, not in a type."""
    monkeypatch.setenv("COLUMNS", "80")
    for name, command in commands().items():
        status, out, _ = farcast(*name.split(), "--help")
        assert status == 0
        lines = [" ".join(line.split()) for line in out.splitlines()]
        assert max(map(len, out.splitlines())) <= 80, name
        for block in inspect.cleandoc(command.help).split("```")[1::2]:
            for line in filter(None, block.splitlines()):
                assert " ".join(line.split()) in lines, (name, line)
        for type_name in ("<int", "<float", "<str", "TEXT"):
            assert type_name not in out.replace("TURN:TEXT", ""), (name, type_name)


def test_version_and_module(farcast: Farcast) -> None:
    from farcast import __version__

    assert farcast("--version") == (0, f"farcast {__version__}\n", "")


def test_a_message_names_a_command_that_can_be_typed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After `make demo` the command is in .venv/bin, which is on nobody's path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(tmp_path / ".venv/bin/farcast"), "demo"])
    assert options.program() == ".venv/bin/farcast"
    monkeypatch.setattr(sys, "argv", ["/site/farcast/__main__.py"])
    assert options.program().endswith(" -m farcast")
    (tmp_path / "farcast").touch(mode=0o755)
    assert options.program() == "farcast"


@pytest.mark.parametrize(
    "option", [("--seed", "5"), ("--model", "smollm2"), ("--optimizer", "muon")]
)
def test_a_run_is_not_resumed_as_another(
    farcast: Farcast, tmp_path: Path, option: tuple[str, str]
) -> None:
    """The same command with --resume goes on; one that says something else is refused."""
    from farcast.fleet.demo import DemoSettings, new_plan
    from farcast.fleet.layout import RunFolder
    from farcast.fleet.presets import run_config

    folder = RunFolder(tmp_path / "run")
    config = run_config("tiny", run_id="r", store=folder.store.as_uri(), out=folder.path)
    new_plan(folder, config, DemoSettings(workers=2, link=None, kill=True))
    status, _, err = farcast("demo", "--resume", "--out", str(folder.path), *option)
    assert status == 2
    assert f"not {option[1]}" in err


def test_a_key_is_made_in_files_and_shown_by_its_fingerprint_alone(
    farcast: Farcast, tmp_path: Path
) -> None:
    status, out, err = farcast("keygen", "run.key", "--json", "key.json")
    assert (status, err) == (0, "")
    secret = (tmp_path / "run.key").read_text().splitlines()[1]
    assert secret not in out + (tmp_path / "key.json").read_text()
    status, _, err = farcast("keygen", "run.key")
    assert status == 2
    assert "is there already" in err
    (tmp_path / "run.key").chmod(0o644)
    arguments = ["--model", "tiny", "--out", "o", "--signing-key", "run.key"]
    status, _, err = farcast("train", *arguments)
    assert status == 2
    assert "chmod 600" in err
    status, _, err = farcast("plan", "--store", "st", "--trusted-key", "run.key")
    assert status == 2
    assert "secret key" in err
    assert secret not in err
