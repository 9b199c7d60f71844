"""Streams are recorded as whole answers are; what was acknowledged outlives a kill."""

import asyncio
import base64
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from test_recording import RUN, World, answer, plain

from farcast import TrajectoryReceiver, TrajectorySender
from farcast.errors import ConfigError, FormatError, StoreUnavailableError
from farcast.interop.answers import NotRecordedError
from farcast.interop.journal import Journal
from farcast.interop.outcomes import Feedback, Outcome
from farcast.interop.recording import ClosedError, Recorder
from farcast.interop.streamed import StreamedAnswer
from farcast.store import open_store
from farcast.store.testing import Fail, FaultStore, Rule
from farcast.trajectory import Trajectory
from farcast.trajectory.keys import TRAJECTORIES_PREFIX


def events(said: dict[str, Any], *, chat: bool = True, end: bool = True) -> bytes:
    """As vLLM streams an answer behind a sidecar, two tokens an event."""
    (choice,) = said["choices"]
    ids, content = choice["token_ids"], choice["logprobs"]["content"]
    sent: list[Any] = [{"prompt_token_ids": said["prompt_token_ids"], "choices": [{"index": 0}]}]
    for at in range(0, len(ids), 2):
        last = at + 2 >= len(ids)
        calls = {"tool_calls": [{}]} if choice["message"].get("tool_calls") and not at else {}
        values = content[at : at + 2]
        logprobs = {"token_logprobs": [v["logprob"] for v in values]}
        sent.append(
            {
                "choices": [
                    {
                        "index": 0,
                        "delta": {"content": "ü", **calls},
                        "token_ids": ids[at : at + 2],
                        "logprobs": {"content": values} if chat else logprobs,
                        "finish_reason": choice["finish_reason"] if last else None,
                    }
                ]
            }
        )
    sent.append({"choices": [], "usage": {"total_tokens": 1}})
    body = b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in sent)
    return body + (
        b": farcast %b\n\ndata: [DONE]\n\n" % json.dumps(said["farcast"]).encode() if end else b""
    )


def recorded(*answers: bytes) -> Trajectory:
    """One session of these answers, without its times."""
    store = open_store("memory://")
    recorder = Recorder(TrajectorySender(store, RUN, "rec"))
    for one in answers:
        recorder.record("s", {}, one, started=1.0)
    recorder.attach(Outcome(session="s", reward=1.0))
    receiver = TrajectoryReceiver(store, RUN)
    (found,) = receiver.consume(10)
    receiver.close()
    found = replace(found, id=plain(found.id), group_id=plain(found.group_id))
    return replace(found, turns=tuple(replace(t, started=0.0, ended=0.0) for t in found.turns))


SAID = [
    answer([1, 2, 3], [5, 6, 7], message={"role": "assistant", "tool_calls": [{"id": "1"}]}),
    answer([1, 2, 3, 5, 6, 7, 9], [8], finish_reason="length"),
]


@given(st.booleans(), st.integers(0, 1 << 30))
@settings(max_examples=40, deadline=None)
def test_a_stream_is_recorded_as_the_whole_answer_however_it_is_cut(chat: bool, seed: int) -> None:
    draw, made = random.Random(seed), []
    for said in SAID:
        body, streamed, passed = events(said, chat=chat), StreamedAnswer(), b""
        while body:
            cut = draw.randint(1, 200)
            passed += streamed.push(body[:cut])
            body = body[cut:]
        assert b"[DONE]" not in passed
        passed += streamed.finish("yes")
        assert passed == events(said, chat=chat).replace(
            b"data: [DONE]", b": farcast-recorded yes\n\ndata: [DONE]"
        )
        made.append(streamed.answer())
    if not chat:  # only a chat's answer says that a tool was called
        made[0] = json.dumps(SAID[0]).encode()
    assert recorded(*made) == recorded(*(json.dumps(said).encode() for said in SAID))


class StreamingWorld(World):
    """Answers are bodies of event streams."""

    async def _engine(self, request: web.Request) -> web.StreamResponse:  # type: ignore[override]
        self.asked.append((await request.json(), None))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(self.answers.pop(0))  # type: ignore[arg-type]
        return response

    async def stream(self, session: str, body: bytes) -> str:
        self.answers.append(body)  # type: ignore[arg-type]
        headers = {"Authorization": f"Bearer {'t' * 20}", "X-Session-ID": session}
        asked = {"model": "m", "messages": [], "stream": True}
        url = self.url + "/v1/chat/completions"
        async with self.http.post(url, json=asked, headers=headers) as response:
            assert response.headers["X-Farcast-Session"] == session
            return (await response.read()).decode()


def test_streams_pass_and_say_whether_they_were_recorded() -> None:
    async def use(world: StreamingWorld) -> None:  # type: ignore[override]
        for said in SAID:
            told = await world.stream("s", events(said))
            assert told.endswith(": farcast-recorded yes\n\ndata: [DONE]\n\n")
        broken = await world.stream("s", events(SAID[1], end=False))
        assert "farcast-recorded no; " in broken
        assert world.asked[0][0]["return_token_ids"] is True
        feedback = {"session": "s", "turn": 0, "text": "wrong tool"}
        for _ in range(2):
            assert (await world.post("/farcast/feedback", feedback))[0] == 200
        assert (await world.post("/farcast/feedback", {**feedback, "turn": 2}))[0] == 400
        assert (await world.post("/farcast/feedback", {**feedback, "session": "x"}))[0] == 404
        assert (await world.post("/farcast/outcome", {"session": "s", "reward": 1}))[0] == 200
        assert (await world.post("/farcast/feedback", feedback))[0] == 409

    (one,) = StreamingWorld().run(use)  # type: ignore[arg-type]
    assert one.token_ids == (1, 2, 3, 5, 6, 7, 9, 8)
    assert [turn.feedback for turn in one.model_turns] == ["wrong tool", ""]
    assert one.finish_reason == "length"


@pytest.mark.parametrize(
    "body",
    [
        b"data: {broken\n\ndata: [DONE]\n\n",
        b'data: {"error": {"message": "gone"}}\n\ndata: [DONE]\n\n',
        b'data: {"choices": [{"index": 1, "token_ids": [1]}]}\n\ndata: [DONE]\n\n',
        b'data: {"choices": [3]}\n\ndata: [DONE]\n\n',
        b'data: {"choices": [{"token_ids": "abc", "logprobs": 7}]}\n\ndata: [DONE]\n\n',
        b"",
    ],
)
def test_a_stream_that_says_nonsense_is_not_recorded(body: bytes) -> None:
    streamed = StreamedAnswer()
    streamed.push(body)
    with pytest.raises(NotRecordedError):
        recorded(streamed.answer())


def npy(array: Any) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return base64.b64encode(buffer.getvalue()).decode()


def test_experts_of_an_answer_are_recorded_where_they_fit() -> None:
    chosen = np.arange(8 * 2 * 2, dtype=np.uint8).reshape(8, 2, 2)
    first = json.dumps(answer([1, 2, 3], [5, 6], routed_experts=npy(chosen[:4]))).encode()
    again = chosen[:7].copy()
    again[:4] += 100  # read anew, and routed another way
    second = json.dumps(answer([1, 2, 3, 5, 6, 9], [8, 7], routed_experts=npy(again))).encode()
    one = recorded(first, second)
    assert one.experts is not None
    assert np.array_equal(one.experts.array(), chosen[:7])
    for bad in ("!", npy(chosen[0]), npy(chosen.astype(float)), npy(np.zeros((9, 2, 2), "u1"))):
        said = answer([1, 2, 3], [5, 6], routed_experts=bad)
        assert recorded(json.dumps(said).encode()).experts is None


# --- the journal -----------------------------------------------------------------------------


def body(prompt: list[int], ids: list[int]) -> bytes:
    return json.dumps(answer(prompt, ids)).encode()


class Life:
    """Recorders on one folder and one store, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = FaultStore(open_store("memory://"))
        self.start()

    def start(self) -> None:
        self.journal = Journal(self.folder)
        self.recorder = Recorder(TrajectorySender(self.store, RUN, "rec"), journal=self.journal)

    def restart(self) -> None:
        self.journal.close()
        self.start()

    def home(self) -> list[Trajectory]:
        receiver = TrajectoryReceiver(self.store, RUN)
        found = receiver.consume(100)
        receiver.close()
        return found


def test_a_restart_between_any_two_calls_loses_nothing(tmp_path: Path) -> None:
    life = Life(tmp_path / "journal")
    life.recorder.record("s", {"temperature": 0.5}, body([1, 2], [3]), started=1.0)
    life.restart()
    life.recorder.record("s", {"temperature": 0.5}, body([1, 2, 3, 4], [5]), started=2.0)
    life.restart()
    life.recorder.record("s", {"temperature": 0.5}, body([9], [8]), started=3.0)  # drifts
    life.recorder.feed_back("s", Feedback(1, "good"))
    life.restart()
    outcome = Outcome(session="s", reward=0.5, feedback=(Feedback(2, "late"),))
    life.store.add(
        Rule(Fail(StoreUnavailableError("away")), verb="put", prefix=TRAJECTORIES_PREFIX)
    )
    with pytest.raises(StoreUnavailableError):
        life.recorder.attach(outcome)
    life.restart()
    with pytest.raises(ClosedError, match="on its way"):
        life.recorder.attach(Outcome(session="s", reward=0.75))
    with pytest.raises(NotRecordedError, match="has ended"):
        life.recorder.record("s", {"temperature": 0.5}, body([9, 8], [7]), started=4.0)
    names = life.recorder.attach(outcome)
    assert [plain(name) for name in names] == ["s-0", "s-1"]
    life.restart()
    assert life.recorder.attach(outcome) == names, "said again after it went home"
    with pytest.raises(ClosedError):
        life.recorder.attach(Outcome(session="s", reward=0.75))
    with pytest.raises(NotRecordedError, match="has ended"):
        life.recorder.record("s", {}, body([1], [2]), started=5.0)
    first, second = life.home()
    assert (first.token_ids, second.token_ids) == ((1, 2, 3, 4, 5), (9, 8))
    assert [t.feedback for t in (*first.model_turns, *second.model_turns)] == ["", "good", "late"]
    assert [t.started for t in first.model_turns] == [1.0, 2.0]
    assert first.temperature == 0.5
    assert sorted(p.name for p in life.folder.iterdir()) == ["closed", "lock"]


def test_an_outcome_that_does_not_fit_closes_nothing(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.recorder.record("s", {}, body([1, 2], [3]), started=1.0)
    for outcome in (
        Outcome(session="s", reward=float("nan")),
        Outcome(session="s", reward=1.0, feedback=(Feedback(1, "no such turn"),)),
    ):
        with pytest.raises(FormatError):
            life.recorder.attach(outcome)
    assert len(life.recorder.attach(Outcome(session="s", reward=1.0))) == 1


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/etc/x", "a/b", "a\0b", "x" * 101, "ü"])
def test_hostile_session_names_are_refused_and_touch_no_file(tmp_path: Path, name: str) -> None:
    life = Life(tmp_path / "journal")
    with pytest.raises(NotRecordedError):
        life.recorder.record(name, {}, body([1], [2]), started=0.0)
    with pytest.raises(NotRecordedError):
        life.recorder.attach(Outcome(session=name, reward=1.0))
    with pytest.raises(ConfigError):
        life.journal.append(name[:100] or "/", b"") if len(name) <= 100 else life.journal.append(
            "/", b""
        )
    assert [p.name for p in life.folder.iterdir()] == ["lock"]
    assert [p.name for p in tmp_path.iterdir()] == ["journal"]


@pytest.mark.parametrize("damage", ["cut", "tail"])
def test_a_torn_entry_is_cut_off_and_the_session_goes_on(tmp_path: Path, damage: str) -> None:
    life = Life(tmp_path)
    life.recorder.record("s", {}, body([1, 2], [3]), started=1.0)
    whole = (tmp_path / "s.log").read_bytes()
    life.recorder.record("s", {}, body([1, 2, 3, 4], [5]), started=1.0)
    held = bytearray((tmp_path / "s.log").read_bytes())
    if damage == "cut":
        del held[-1]
    else:
        held = bytearray(whole) + b"\xff\xff\xff\xff"
    (tmp_path / "s.log").write_bytes(held)
    life.restart()
    assert (tmp_path / "s.log").read_bytes() == whole
    life.recorder.record("s", {}, body([1, 2, 3, 4], [6]), started=1.0)
    life.recorder.attach(Outcome(session="s", reward=1.0))
    (one,) = life.home()
    assert one.token_ids == (1, 2, 3, 4, 6)


def test_two_recorders_cannot_share_a_journal(tmp_path: Path) -> None:
    Life(tmp_path)
    with pytest.raises(ConfigError, match="in use"):
        Journal(tmp_path)


KILLED = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_recording import RUN, answer
from farcast import TrajectorySender
from farcast.interop.journal import Journal
from farcast.interop.outcomes import Outcome
from farcast.interop.recording import Recorder
from farcast.store import open_store

folder, stop = Path(sys.argv[1]), int(sys.argv[3])
writes = 0
real = os.fsync
def fsync(handle):
    global writes
    writes += 1
    if writes == stop:
        os.kill(os.getpid(), signal.SIGKILL)
    real(handle)
os.fsync = fsync
sender = TrajectorySender(open_store(folder / "store"), RUN, "rec")
recorder = Recorder(sender, journal=Journal(folder / "journal"))
ids = [1]
for turn in range(4):
    body = json.dumps(answer(ids, [10 + turn])).encode()
    recorder.record("s", {}, body, started=0.0)
    ids = [*ids, 10 + turn, 50]
    print(10 + turn, flush=True)
print(recorder.attach(Outcome(session="s", reward=1.0)), flush=True)
"""


def test_killed_at_any_write_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for stop in (1, 3, 5, 6, 7, 8, 9, 10, 99):
        folder = tmp_path / str(stop)
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(folder), str(Path(__file__).parent), str(stop)],
            capture_output=True,
            text=True,
            timeout=60,
            env={**env, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert done.returncode in (0, -9), done.stderr
        told = [int(line) for line in done.stdout.split() if line.isdigit()]
        store = open_store(folder / "store")
        journal = Journal(folder / "journal")
        recorder = Recorder(TrajectorySender(store, RUN, "rec"), journal=journal)
        if recorder.pending:
            assert recorder.send_pending() == 1
        if told:
            recorder.attach(Outcome(session="s", reward=1.0))
            receiver = TrajectoryReceiver(store, RUN)
            (one,) = receiver.consume(10)
            receiver.close()
            kept = [i for i, m in zip(one.token_ids, one.loss_mask, strict=True) if m]
            assert kept[: len(told)] == told
        journal.close()


def test_an_event_loop_is_not_held_up_by_the_disk(tmp_path: Path) -> None:
    """Two sessions at once, each with its own lock."""
    life = Life(tmp_path)

    async def use() -> None:
        await asyncio.gather(
            *(
                asyncio.to_thread(life.recorder.record, f"s{i}", {}, body([1], [2]), started=0.0)
                for i in range(20)
            )
        )

    asyncio.run(use())
    assert life.recorder.open_sessions == 20
    life.restart()
    assert life.recorder.open_sessions == 20
