"""Processes are apart from each other, end when their parent does, and leave words behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from farcast.errors import ConfigError
from farcast.fleet.launcher import LocalLauncher, ProcessSpec, last_words
from farcast.fleet.signals import StopRequest


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in for `python -m farcast`: the launcher must not care what it starts."""
    package = tmp_path / "path" / "farcast"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    source = Path(__file__).parents[2] / "src" / "farcast" / "fleet"
    (package / "fleet").mkdir()
    for name in ("launcher.py", "signals.py", "fleet/saying.py"):
        (package / name).write_text((source / Path(name).name).read_text())
    (package / "errors.py").write_text(
        "class ConfigError(Exception): ...\nclass StoppedAtOnceError(Exception): ...\n"
    )
    (package / "__main__.py").write_text(
        "import os, sys\n"
        "from farcast.launcher import leave_with_parent\n"
        "from farcast.signals import StopRequest\n"
        "if 'parent' in sys.argv:\n"
        "    import subprocess, time\n"
        "    print('up', subprocess.Popen(['sleep', '60']).pid, flush=True)\n"
        "    time.sleep(60)\n"
        "if 'stubborn' in sys.argv:\n"
        "    import signal, time\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    print('up', flush=True)\n"
        "    time.sleep(60)\n"
        "with StopRequest() as stop:\n"
        "    leave_with_parent()\n"
        "    print('up', os.environ['OMP_NUM_THREADS'], sys.argv[1:], flush=True)\n"
        "    asked = stop.wait(60)\n"
        "print('left', asked, flush=True)\n"
        "sys.exit(5)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    return package


def wait_for(log: Path, words: str) -> None:
    deadline = time.monotonic() + 20
    while words not in (log.read_text() if log.exists() else ""):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


@pytest.mark.usefixtures("program")
def test_a_process_is_asked_to_leave_and_says_how_it_left(tmp_path: Path) -> None:
    launcher, log = LocalLauncher(), tmp_path / "log"
    handle = launcher.start(ProcessSpec("one", ("worker", "--id", "w1"), log))
    wait_for(log, "up")
    assert "up 1 ['worker', '--id', 'w1', '--tied']" in log.read_text()
    assert os.getpgid(handle.pid) == handle.pid
    assert launcher.poll(handle) is None
    launcher.ask(handle)
    assert launcher.stop(handle, grace=20) == 5
    assert last_words(log) == "left True"
    launcher.close()


@pytest.mark.usefixtures("program")
def test_one_that_will_not_leave_is_killed(tmp_path: Path) -> None:
    launcher, log = LocalLauncher(), tmp_path / "log"
    handle = launcher.start(ProcessSpec("one", ("stubborn",), log))
    wait_for(log, "up")
    assert launcher.stop(handle, grace=0.1) == -signal.SIGKILL
    launcher.close()


@pytest.mark.usefixtures("program")
def test_killed_is_killed(tmp_path: Path) -> None:
    launcher, log = LocalLauncher(), tmp_path / "log"
    handle = launcher.start(ProcessSpec("one", ("worker",), log))
    wait_for(log, "up")
    launcher.kill(handle)
    assert launcher.poll(handle) == -signal.SIGKILL
    launcher.close()


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize("way", ["kill", "close"])
def test_what_a_killed_process_started_is_ended_too(tmp_path: Path, way: str) -> None:
    launcher, log = LocalLauncher(), tmp_path / "log"
    handle = launcher.start(ProcessSpec("one", ("parent",), log))
    wait_for(log, "up")
    child = psutil.Process(int(last_words(log).split()[1]))
    if way == "kill":
        launcher.kill(handle)
    launcher.close()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


@pytest.mark.usefixtures("program")
def test_a_process_that_ended_holds_no_pipe(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    before = psutil.Process().num_fds()
    for number in range(2):
        handle = launcher.start(ProcessSpec("one", ("worker",), tmp_path / str(number)))
        wait_for(tmp_path / str(number), "up")
        launcher.stop(handle, grace=20)
    assert psutil.Process().num_fds() == before
    launcher.close()


@pytest.mark.usefixtures("program")
def test_children_leave_when_their_parent_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    source = Path(__file__).parents[2] / "src"
    script = (
        f"import sys; sys.path.insert(0, {str(source)!r})\n"
        "import time\nfrom pathlib import Path\n"
        "from farcast.fleet.launcher import LocalLauncher, ProcessSpec\n"
        f"LocalLauncher().start(ProcessSpec('one', ('worker',), Path({str(log)!r})))\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    try:
        wait_for(log, "up")
        (child,) = psutil.Process(parent.pid).children()
    finally:
        parent.kill()
        parent.wait()
    child.wait(20)
    assert last_words(log) == "left True"


def test_a_process_that_cannot_start_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="could not be started"):
        LocalLauncher().start(ProcessSpec("one", ("worker",), tmp_path / "absent" / "log"))


def test_last_words_survive_progress_bars_and_absence(tmp_path: Path) -> None:
    assert last_words(tmp_path / "absent") == ""
    (tmp_path / "log").write_bytes(b"old\n10 %\r20 %\r30 %\n\n")
    assert last_words(tmp_path / "log") == "30 %"


def test_the_second_signal_insists() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(5)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
