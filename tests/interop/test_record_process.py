"""Recording costs no answer, whatever a client asks, an engine says and the disk does."""

import asyncio
import json
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from msgspec.structs import replace
from test_recorder import DONE, Stop, _full, _stop
from test_recording import ENGINE_TOKEN, RUN, TOKEN, World, answer
from test_recording_streams import SAID, Life, body, events, recorded

from farcast import TrajectoryReceiver, TrajectorySender
from farcast.errors import StoreUnavailableError
from farcast.gateway.tokens import Token
from farcast.interop import record_process, streamed
from farcast.interop.answers import NotRecordedError
from farcast.interop.journal import Journal
from farcast.interop.record_process import RecordOptions, serve_recorder
from farcast.interop.recording import Recorder
from farcast.interop.streamed import StreamedAnswer
from farcast.store.testing import Fail, Rule

DEEP = b"[" * 100_000 + b"]" * 100_000
GOOD = json.dumps(answer([1, 2], [3])).encode()


class Raw(World):
    """Bodies are bytes on both sides, pieces of an answer after one another."""

    def __init__(self, journal: Journal | None = None) -> None:
        super().__init__()
        if journal is not None:
            sender = TrajectorySender(self.faults, RUN, "rec")
            self.recorder = Recorder(sender, engine="fake", journal=journal)
        self.said: list[list[bytes]] = []
        self.heard: list[tuple[bytes, Any]] = []
        self.kind = "application/json"
        self.status = 200

    async def _engine(self, request: web.Request) -> web.StreamResponse:  # type: ignore[override]
        self.heard.append((await request.read(), request.headers))
        response = web.StreamResponse(status=self.status, headers={"Content-Type": self.kind})
        response.headers["X-Farcast-Version-End"] = "7"
        response.headers["Retry-After"] = "3"
        await response.prepare(request)
        for piece in self.said.pop(0):
            await response.write(piece)
        return response

    async def ask(self, asked: bytes, *said: bytes, **headers: str) -> tuple[int, bytes, Any]:
        self.said.append(list(said))
        headers = {"Authorization": f"Bearer {TOKEN}", "X-Farcast-Session": "s", **headers}
        url = self.url + "/v1/chat/completions"
        async with self.http.post(url, data=asked, headers=headers) as response:
            return response.status, await response.read(), response.headers


REQUESTS = {
    "deep": (b'{"messages": [], "x": ' + DEEP + b"}", False),
    "temperature of 400 digits": (b'{"temperature": ' + b"9" * 400 + b"}", False),
    "id beyond 64 bits": (b'{"id": 36893488147419103232, "x": 1.50}', True),
    "seed of 70 bits": (b'{"seed": 1180591620717411303424}', True),
    "no JSON": (b"{", False),
    "no object": (b"[]", False),
    "no text": (b"\xff", False),
    "messages of another kind": (b'{"messages": {"role": 1}}', False),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_whatever_is_asked_the_engine_answers(name: str) -> None:
    asked, is_recorded = REQUESTS[name]

    async def use(world: Raw) -> None:
        status, data, headers = await world.ask(asked, GOOD)
        assert (status, data) == (200, GOOD)
        assert headers["X-Farcast-Recorded"].startswith("yes" if is_recorded else "no; ")
        assert (world.recorder.recorded, world.recorder.refused) == (is_recorded, not is_recorded)
        sent = world.heard[0][0]
        if sent != asked:
            more = {"return_token_ids": True, "logprobs": True}
            assert json.loads(sent) == {**json.loads(asked), **more}
            assert asked[1:-1].replace(b": ", b":").replace(b", ", b",") in sent

    Raw().run(use)  # type: ignore[arg-type]


def said_with(**changes: Any) -> bytes:
    return json.dumps({**answer([1, 2], [3]), **changes}).encode()


ANSWERS = {
    "id beyond 64 bits": (said_with(id=1 << 70), True),
    "token beyond 64 bits": (json.dumps(answer([1], [1 << 70])).encode(), False),
    "deep": (GOOD[:-1] + b', "x": ' + DEEP + b"}", False),
    "deep farcast": (GOOD[:-1] + b', "farcast": ' + DEEP + b"}", False),
    "no JSON": (b"<html>", False),
    "empty": (b"", False),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_whatever_is_answered_passes(name: str) -> None:
    said, is_recorded = ANSWERS[name]

    async def use(world: Raw) -> None:
        status, data, headers = await world.ask(b"{}", said)
        assert (status, data) == (200, said)
        assert headers["X-Farcast-Recorded"].startswith("yes" if is_recorded else "no; ")

    Raw().run(use)  # type: ignore[arg-type]


STREAMS = {
    "deep event": b'data: {"choices": ' + DEEP + b"}\n\n",
    "deep comment": b": farcast " + DEEP + b"\n\n",
    "token beyond 64 bits": b'data: {"choices": [{"token_ids": [1180591620717411303424]}]}\n\n',
    "comment of another kind": b": farcast [1]\n\n",
}


@pytest.mark.parametrize("name", STREAMS)
def test_whatever_is_streamed_passes(name: str) -> None:
    whole = STREAMS[name] + events(SAID[0])

    async def use(world: Raw) -> None:
        world.kind = "text/event-stream"
        status, data, _ = await world.ask(b"{}", whole)
        assert status == 200
        kept, _, rest = data.partition(b": farcast-recorded ")
        assert kept + rest.partition(b"\n\n")[2] == whole
        assert rest.startswith(b"no; ")

    Raw().run(use)  # type: ignore[arg-type]


@pytest.mark.parametrize("trouble", ["gone", "full", "bug"])
def test_whatever_the_disk_does_the_client_is_answered(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(world: Raw) -> None:
        assert (await world.ask(b"{}", GOOD))[2]["X-Farcast-Recorded"] == "yes"
        if trouble == "gone":
            shutil.rmtree(tmp_path / "journal")
        else:
            fail = _full if trouble == "full" else _bug
            monkeypatch.setattr(Journal, "append", fail)
        for session in ("s", "new"):
            status, data, headers = await world.ask(b"{}", GOOD, **{"X-Farcast-Session": session})
            assert (status, data) == (200, GOOD)
            assert headers["X-Farcast-Recorded"].startswith("no; The recorder failed.")
        assert (world.recorder.recorded, world.recorder.failed) == (1, 2)

    Raw(Journal(tmp_path / "journal")).run(use)  # type: ignore[arg-type]


def _bug(*_: object) -> None:
    raise KeyError("\r\n\ud800 of ours")


def test_an_outcome_on_a_journal_that_is_gone_is_said_to_be_not_stored(tmp_path: Path) -> None:
    async def use(world: Raw) -> None:
        await world.ask(b"{}", GOOD)
        shutil.rmtree(tmp_path / "journal")
        status, _, _ = await world.post("/farcast/outcome", {"session": "s", "reward": 1})
        assert status == 503

    Raw(Journal(tmp_path / "journal")).run(use)  # type: ignore[arg-type]


OUTCOMES = [
    b'{"session": "s", "reward": 1, "seed": 1180591620717411303424}',
    b'{"session": "s", "reward": 1e999}',
    b'{"session": "s", "reward": ' + b"9" * 400 + b"}",
    b'{"session": "s", "reward": 1, "metadata": ' + DEEP + b"}",
    json.dumps({"session": "s", "reward": 1, "metadata": {"k" * 65_537: ""}}).encode(),
]


@pytest.mark.parametrize("number", range(len(OUTCOMES)))
def test_odd_outcomes_are_refused_and_a_good_one_is_taken(number: int) -> None:
    async def use(world: Raw) -> None:
        await world.ask(b"{}", GOOD)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        url = world.url + "/farcast/outcome"
        async with world.http.post(url, data=OUTCOMES[number], headers=headers) as response:
            assert response.status == 400, await response.text()
        assert (await world.post("/farcast/outcome", {"session": "s", "reward": 1}))[0] == 200

    assert len(Raw().run(use)) == 1  # type: ignore[arg-type]


def test_an_answer_too_long_to_hold_passes_unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_process, "MAX_RECORDED", 1 << 20)
    piece = b"x" * (1 << 18)

    async def use(world: Raw) -> None:
        status, data, headers = await world.ask(b"{}", *[piece] * 64)
        assert (status, len(data)) == (200, 64 << 18)
        assert headers["X-Farcast-Recorded"].startswith("no; the answer is over")
        assert world.recorder.refused == 1

    Raw().run(use)  # type: ignore[arg-type]


def test_headers_pass_both_ways() -> None:
    async def use(world: Raw) -> None:
        world.status = 409
        more = {"X-Farcast-Weight-Version": "min=3", "X-Request-Id": "r"}
        status, _, headers = await world.ask(b"{}", b"{}", **more)
        assert status == 409
        assert (headers["Retry-After"], headers["X-Farcast-Version-End"]) == ("3", "7")
        asked = world.heard[0][1]
        assert asked["X-Farcast-Weight-Version"] == "min=3"
        assert (asked["X-Request-Id"], asked["X-Farcast-Session"]) == ("r", "s")
        assert "X-Farcast-Recorded" not in headers

    Raw().run(use)  # type: ignore[arg-type]


def test_a_session_name_of_odd_bytes_is_not_repeated() -> None:
    async def use(world: Raw) -> None:
        world.said.append([GOOD])
        host, port = world.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"
            b"Connection: close\r\nAuthorization: Bearer %b\r\n"
            b"X-Farcast-Session: \xff\xc3(\r\n\r\n{}" % TOKEN.encode()
        )
        said = await reader.read()
        writer.close()
        assert said.startswith(b"HTTP/1.1 200")
        assert b"X-Farcast-Recorded: no; " in said
        assert said.endswith(GOOD)

    Raw().run(use)  # type: ignore[arg-type]


# --- streams are bounded -------------------------------------------------------------------------


def test_a_stream_without_lines_takes_linear_time_and_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streamed, "MAX_EVENT", 4 << 20)
    one, passed, chunk = StreamedAnswer(), 0, b"x" * 64
    began = time.process_time()
    for _ in range(1 << 17):  # 8 MiB
        passed += len(one.push(chunk))
    assert time.process_time() - began < 5.0
    passed += len(one.push(b"\ndata: [DONE]\n\n"))
    assert passed == (64 << 17) + len(b"\ndata: [DONE]\n\n")
    assert one.finish("no") == b": farcast-recorded no\n\n"
    with pytest.raises(NotRecordedError, match="too long"):
        recorded(one.answer())


def test_a_stream_that_goes_on_behind_its_end_passes_unrecorded() -> None:
    whole = events(SAID[0]) + b": on and on\n" * 10_000
    one, passed = StreamedAnswer(), b""
    for at in range(0, len(whole), 1000):
        passed += one.push(whole[at : at + 1000])
    assert passed == whole
    with pytest.raises(NotRecordedError, match="behind its end"):
        recorded(one.answer())


def test_an_endless_stream_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "MAX_TOKENS", 100)
    one = StreamedAnswer()
    event = b'data: {"choices": [{"token_ids": [1], "logprobs": {"token_logprobs": [-1]}}]}\n\n'
    for _ in range(200):
        assert one.push(event) == event
    one.push(b"data: [DONE]\n\n")
    with pytest.raises(NotRecordedError, match="too long"):
        recorded(one.answer())


# --- the process ---------------------------------------------------------------------------------


def test_a_recorder_that_starts_again_sends_what_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody says the outcome again, and the store is away for a moment."""
    monkeypatch.setattr(record_process, "RESEND_SECONDS", (0.05, 0.1))
    life = Life(tmp_path)
    for name in ("s", "t"):
        life.recorder.record(name, {}, body([1, 2], [3]), started=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(TrajectorySender, "submit_many", _stop)
        for name in ("s", "t"):
            with pytest.raises(Stop):
                life.recorder.attach(replace(DONE, session=name))
    life.restart()
    life.store.add(Rule(Fail(StoreUnavailableError("away")), verb="put"))
    stop = SimpleNamespace(requested=False)
    options = RecordOptions("http://127.0.0.1:9", "127.0.0.1", 0, Token(TOKEN), Token(ENGINE_TOKEN))
    serving = threading.Thread(
        target=serve_recorder,
        args=(options, life.recorder, stop),
    )
    serving.start()
    try:
        deadline = time.monotonic() + 20
        while life.recorder.pending and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        stop.requested = True
        serving.join(20)
    receiver = TrajectoryReceiver(life.store, RUN)
    assert len({t.id for t in receiver.consume(10)}) == 2
    receiver.close()
