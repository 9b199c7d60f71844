"""What was acknowledged goes home, once, whatever an outcome says and wherever the recorder
ends."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from test_recording import RUN, answer
from test_recording_streams import Life, body, npy

from farcast import TrajectoryReceiver, TrajectorySender
from farcast.errors import ConfigError, FarcastError, FormatError, StoreUnavailableError
from farcast.interop import recording, sessions
from farcast.interop.answers import NotRecordedError
from farcast.interop.journal import Journal
from farcast.interop.outcomes import Feedback, Outcome
from farcast.interop.recording import ClosedError, RecordedClient, Recorder, TooManySessionsError
from farcast.interop.sessions import Entry, Session
from farcast.store import open_store
from farcast.store.testing import Fail, Rule
from farcast.trajectory.keys import TRAJECTORIES_PREFIX
from farcast.trajectory.sender import RECALLED_BATCHES

DONE = Outcome(session="s", reward=1.0)


def begun(life: Life, name: str = "s") -> None:
    life.recorder.record(name, {}, body([1, 2], [3]), started=0.0)


# --- an outcome is judged before it counts -------------------------------------------------------

UNUSABLE: dict[str, dict[str, Any]] = {
    "reward's name": {"rewards": {"x" * 65_537: 1.0}},
    "metadata's name": {"metadata": {"x" * 65_537: ""}},
    "metadata": {"metadata": {"x": "y" * 65_537}},
    "seed of 64 bits": {"seed": 1 << 63},
    "seed of 70 bits": {"seed": 1 << 70},
    "1,025 rewards": {"rewards": {str(i): 1.0 for i in range(1025)}},
    "reward of 400 digits": {"reward": 10**400},
    "no number": {"reward": "much"},
    "surrogate": {"task": "\ud800"},
    "infinite part": {"rewards": {"x": float("inf")}},
    "group's name": {"group_id": "../x"},
    "group's size": {"group_id": "g", "group_size": 0},
    "header": {"metadata": {str(i): "y" * 65_536 for i in range(256)}},
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_an_outcome_that_cannot_be_sent_leaves_the_session_open(name: str, tmp_path: Path) -> None:
    life = Life(tmp_path)
    begun(life)
    for _ in range(2):
        with pytest.raises(FarcastError) as caught:
            life.recorder.attach(msgspec.structs.replace(DONE, **UNUSABLE[name]))
        assert not caught.value.retry
        life.restart()
    assert life.recorder.pending == []
    assert len(life.recorder.attach(DONE)) == 1
    assert len(life.home()) == 1


def test_a_journalled_outcome_that_cannot_be_sent_is_given_up(tmp_path: Path) -> None:
    """As a recorder left it that checked less."""
    life = Life(tmp_path)
    begun(life)
    bad = msgspec.structs.replace(DONE, rewards={str(i): 1.0 for i in range(1025)})
    life.journal.append("s", msgspec.msgpack.encode(Entry(outcome=bad)))
    life.restart()
    assert life.recorder.pending == ["s"]
    assert life.recorder.send_pending() == 0
    assert len(life.recorder.attach(DONE)) == 1


def test_a_session_takes_no_more_turns_than_can_go_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_TURNS", 6)
    life = Life(tmp_path)
    for turn in range(3):
        prompt = [1, *range(2, 2 + 2 * turn)]
        life.recorder.record("s", {}, body(prompt, [2 + 2 * turn]), started=0.0)
    with pytest.raises(NotRecordedError, match="turns"):
        life.recorder.record("s", {}, body([1, *range(2, 8)], [9]), started=0.0)
    life.recorder.record("s", {}, body([9, 9], [9]), started=0.0)  # a new segment has room
    assert len(life.recorder.attach(DONE)) == 2


def test_a_session_has_so_many_segments_and_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_SEGMENTS", 3)
    life = Life(tmp_path)
    for first in (1, 2):
        life.recorder.record("s", {}, body([first, 5], [6]), started=0.0)
    life.recorder.record("s", {}, body([3, 5], [6]), started=0.0)
    with pytest.raises(NotRecordedError, match="anew"):
        life.recorder.record("s", {}, body([4, 5], [6]), started=0.0)
    life.recorder.record("s", {}, body([3, 5, 6], [7]), started=0.0)
    monkeypatch.setattr(sessions, "MAX_SESSION_TOKENS", 13)
    with pytest.raises(NotRecordedError, match="longer"):
        life.recorder.record("s", {}, body([3, 5, 6, 7, 8], [5] * 9), started=0.0)
    assert len(life.recorder.attach(DONE)) == 3


def test_experts_beyond_a_batch_go_home_and_those_beyond_an_object_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    experts = rng.integers(0, 256, (60_000, 20, 8), dtype=np.uint8)  # 9.6 MB that nothing shrinks
    said = answer([1] * 59_999, [5, 6], routed_experts=npy(experts))
    life = Life(tmp_path)
    life.recorder.record("s", {}, json.dumps(said).encode(), started=0.0)
    life.restart()
    life.recorder.attach(DONE)
    monkeypatch.setattr(sessions, "MAX_BODY_BYTES", sessions.MAX_HEADER_BYTES + 9_000_000)
    life.recorder.record("t", {}, json.dumps(said).encode(), started=0.0)
    life.recorder.attach(msgspec.structs.replace(DONE, session="t"))
    first, second = life.home()
    assert first.experts is not None
    assert np.array_equal(first.experts.array(), experts)
    assert second.experts is None


def test_feedback_has_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSION_FEEDBACK", 100)
    life = Life(tmp_path)
    begun(life)
    life.recorder.feed_back("s", Feedback(0, "ü" * 40))
    with pytest.raises(FormatError, match="bytes"):
        life.recorder.feed_back("s", Feedback(0, "ö" * 40))
    life.recorder.attach(DONE)


# --- many sessions -------------------------------------------------------------------------------


def test_no_session_makes_room_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_SESSIONS", 3)
    life = Life(tmp_path)
    for name in "abc":
        begun(life, name)
    with pytest.raises(TooManySessionsError, match="3 sessions"):
        begun(life, "d")
    begun(life, "a")
    assert life.recorder.forgotten == 0
    life.restart()
    for name in "abc":
        assert life.recorder.attach(msgspec.structs.replace(DONE, session=name))
    begun(life, "d")


def test_an_outcome_that_waits_for_the_store_is_not_forgotten(tmp_path: Path) -> None:
    life = Life(tmp_path)
    now = 0.0
    life.recorder._clock = lambda: now
    begun(life)
    life.store.add(
        Rule(Fail(StoreUnavailableError("away")), verb="put", prefix=TRAJECTORIES_PREFIX)
    )
    with pytest.raises(StoreUnavailableError):
        life.recorder.attach(DONE)
    now = 2 * recording.IDLE_SECONDS
    begun(life, "other")
    assert life.recorder.send_pending() == 1
    assert len(life.home()) == 1


def test_sessions_of_which_nothing_was_recorded_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MAX_SESSIONS", 2)
    life = Life(tmp_path)
    now = 0.0
    life.recorder._clock = lambda: now
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", _full)
        for name in "ab":
            with pytest.raises(NotRecordedError):
                begun(life, name)
    assert life.recorder.failed == 2
    now = 100.0
    begun(life, "c")


def _full(*_: object) -> None:
    raise OSError(28, "no space left")


# --- once ----------------------------------------------------------------------------------------


def test_sessions_of_one_name_at_two_recorders_of_one_name_both_go_home() -> None:
    store = open_store("memory://")
    for _ in range(2):
        recorder = Recorder(TrajectorySender(store, RUN, "recorder"))
        recorder.record("s", {}, body([1, 2], [3]), started=0.0)
        recorder.attach(DONE)
    receiver = TrajectoryReceiver(store, RUN)
    found = receiver.consume(10)
    receiver.close()
    assert len({t.id for t in found}) == len({t.group_id for t in found}) == 2


class Stop(BaseException):
    """The process ends here."""


def _stop(*_: object, **__: object) -> None:
    raise Stop


@pytest.mark.parametrize("others", [0, RECALLED_BATCHES + 4])
def test_cut_off_between_put_and_settle_it_is_there_once(
    others: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path)
    begun(life)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "settle", _stop)
        with pytest.raises(Stop):
            life.recorder.attach(DONE)
    elsewhere = Recorder(TrajectorySender(life.store, RUN, "rec"))
    for number in range(others):
        elsewhere.record(f"o{number}", {}, body([1], [2]), started=0.0)
        elsewhere.attach(Outcome(session=f"o{number}", reward=0.0))
    life.restart()
    assert life.recorder.pending == ["s"]
    (name,) = life.recorder.attach(DONE)
    stored = [t.id for t in life.home()]
    assert len(stored) == others + 1
    assert stored.count(name) == 1


@pytest.mark.parametrize("where", ["put", "settle"])
def test_what_was_cut_off_goes_home_by_itself(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path)
    begun(life)
    with monkeypatch.context() as patch:
        cut: tuple[Any, str] = (
            (Journal, "settle") if where == "settle" else (TrajectorySender, "submit_many")
        )
        patch.setattr(*cut, _stop)
        with pytest.raises(Stop):
            life.recorder.attach(DONE)
    life.restart()
    assert life.recorder.send_pending() == 1
    assert life.recorder.pending == []
    (one,) = life.home()
    assert life.recorder.attach(DONE) == [one.id]
    with pytest.raises(ClosedError):
        life.recorder.attach(msgspec.structs.replace(DONE, reward=0.0))


def test_a_promise_of_another_worker_is_not_kept_under_a_new_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its batches hold it already could not be known."""
    life = Life(tmp_path)
    begun(life)
    with monkeypatch.context() as patch:
        patch.setattr(TrajectorySender, "submit_many", _stop)
        with pytest.raises(Stop):
            life.recorder.attach(DONE)
    life.journal.close()
    journal = Journal(tmp_path)
    with pytest.raises(ConfigError, match="rec"):
        Recorder(TrajectorySender(life.store, RUN, "new"), journal=journal)
    journal.close()


def test_entries_that_no_recorder_writes_are_set_aside(tmp_path: Path) -> None:
    life = Life(tmp_path)
    begun(life)
    begun(life, "t")
    life.journal.append("s", b"\xc1 no msgpack")
    life.restart()
    assert (life.recorder.open_sessions, life.recorder.set_aside) == (1, 1)
    assert (tmp_path / "s.log.damaged").exists()


# --- the answer comes first ----------------------------------------------------------------------


def test_whatever_fails_a_client_gets_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer:
        def __init__(self, text: str) -> None:
            self.text = text

        def model_dump_json(self) -> str:
            return self.text

    class Client:
        def __init__(self) -> None:
            self.chat = self.completions = self

        def create(self, **_: Any) -> Answer:
            return Answer(answers.pop(0))

    refused: list[FarcastError] = []
    recorder = Recorder(TrajectorySender(open_store("memory://"), RUN, "rec"))
    client = RecordedClient(Client(), recorder, on_refused=refused.append)
    good = json.dumps(answer([1], [2]))
    answers = ["[" * 10_000, "\ud800", good, good]
    assert client.chat("s").text == "[" * 10_000
    assert client.chat("s").text == "\ud800"
    client.chat("s", temperature=10**400)
    monkeypatch.setattr(Session, "apply", _full)
    client.chat("s")
    assert len(refused) == 4
    assert (recorder.recorded, recorder.failed) == (0, 1)


def test_a_full_disk_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    life = Life(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", _full)
        for _ in range(3):
            with pytest.raises(NotRecordedError):
                begun(life)
    begun(life)
    begun(life, "t")
    said = [record.message for record in caplog.records]
    assert len(said) == 2
    assert "no space left" in said[0]
    assert said[1] == "Answers are recorded again."
    assert (life.recorder.recorded, life.recorder.failed, life.recorder.refused) == (2, 3, 3)
