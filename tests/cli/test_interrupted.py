"""Ctrl-C on a terminal: the first is answered at once, the second ends at once and says what was
left. Each program runs behind a terminal of its own, and the test types."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


class Terminal:
    """A program behind a terminal: what it shows, and a keyboard."""

    def __init__(self, program: str, where: Path) -> None:
        self._ours, theirs = pty.openpty()

        def own_terminal() -> None:
            os.setsid()
            os.close(os.open(os.ttyname(theirs), os.O_RDWR))  # becomes the controlling one

        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=where,
            preexec_fn=own_terminal,
        )
        os.close(theirs)
        self.shown = ""

    def press_ctrl_c(self) -> float:
        os.write(self._ours, b"\x03")
        return time.monotonic()

    def read_until(self, words: str, seconds: float = 60.0) -> float:
        """Returns when it was shown."""
        deadline = time.monotonic() + seconds
        while words not in self.shown:
            left = deadline - time.monotonic()
            assert left > 0, f"{words!r} is not in {self.shown!r}"
            if select.select([self._ours], [], [], left)[0]:
                try:
                    self.shown += os.read(self._ours, 4096).decode(errors="replace")
                except OSError:  # the program has ended
                    assert words in self.shown, self.shown
        return time.monotonic()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


UP = """
import sys, time
from farcast.cli import boundary
from farcast.cli.main import app
from farcast.fleet.launcher import Handle

class Stubborn:
    def start(self, spec):
        print("up", flush=True)
        return Handle(spec.name, 1)
    def list(self): return [Handle("w-1", 1)]
    def poll(self, handle): return None
    def words(self, handle): return ""
    def ask(self, handle): print("asked to leave", flush=True)
    def stop(self, handle, grace): time.sleep(120)
    def close(self): print("closed", flush=True)

sys.modules["farcast.cli.up"]._launcher = lambda *_: Stubborn()
from farcast.lineage import RunRecord
from farcast.store import open_store
from farcast.store.archive import Archive
Archive(open_store("store"), "run").create_run(RunRecord(run_id="run", created="now"))
boundary.run(lambda args: app(args), ["up", "--store", "store", "--name", "w"])
"""

TRAIN = """
import time
from pathlib import Path
from farcast.cli.train import _stop_request
from farcast.config import RunConfig
run = RunConfig(run_id="run", store="memory://", model="tiny", out="out")
Path("out/checkpoint/step-000000000004").mkdir(parents=True)
with _stop_request(run) as stop:
    try:
        print("up", flush=True)
        while True:  # a step that takes long
            time.sleep(0.05)
    finally:
        time.sleep(120)  # unwinding would wait for a store
"""


@pytest.mark.parametrize(
    ("program", "waits_for", "left"),
    [
        (UP, "workers send what they have sampled", "Ended at once: w-1 was killed."),
        (TRAIN, "the step under way ends", "the newest checkpoint is of step 4, go on from it"),
    ],
    ids=["up", "train"],
)
def test_the_first_is_answered_and_the_second_ends_at_once(
    tmp_path: Path, program: str, waits_for: str, left: str
) -> None:
    if program is TRAIN:
        pytest.importorskip("torch")
    terminal = Terminal(program, tmp_path)
    try:
        terminal.read_until("up\r\n")
        pressed = terminal.press_ctrl_c()
        assert terminal.read_until("Ctrl-C again ends at once") - pressed < 5
        assert waits_for in terminal.shown
        terminal.press_ctrl_c()
        terminal.read_until(left, 10)
        assert terminal.process.wait(10) == 130
        assert "Traceback" not in terminal.shown
    finally:
        terminal.close()


def test_a_termination_by_a_supervisor_is_answered_the_same_way(tmp_path: Path) -> None:
    terminal = Terminal(UP, tmp_path)
    try:
        terminal.read_until("up\r\n")
        terminal.process.send_signal(signal.SIGTERM)
        terminal.read_until("stopping: ", 5)
        assert terminal.process.poll() is None
    finally:
        terminal.close()
