"""What passes between a harness and an engine becomes trajectories, over real HTTP."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from farcast import TrajectoryReceiver, TrajectorySender
from farcast.errors import StoreUnavailableError
from farcast.gateway.listening import Listener
from farcast.gateway.tokens import Token
from farcast.gateway.upstream import Upstream
from farcast.interop.answers import NotRecordedError
from farcast.interop.outcomes import Outcome, read_outcome
from farcast.interop.record_process import RecordingProxy, RecordOptions
from farcast.interop.recording import RecordedClient, Recorder
from farcast.store import open_store
from farcast.store.testing import Fail, FaultStore, Rule
from farcast.trajectory import Trajectory
from farcast.trajectory.keys import TRAJECTORIES_PREFIX

RUN, TOKEN, ENGINE_TOKEN = "run", "t" * 20, "e" * 20
ROOT = "ab" * 32


def answer(prompt: list[int], ids: list[int], **more: Any) -> dict[str, Any]:
    """As vLLM answers a chat behind a sidecar."""
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": ids,
        "logprobs": {"content": [{"token": "?", "logprob": -0.5 - i} for i in range(len(ids))]},
        "message": {"role": "assistant", "content": "text"},
    }
    at = {"version": 7, "root": ROOT}
    return {
        "prompt_token_ids": prompt,
        "choices": [{**choice, **more}],
        "farcast": {"run_id": RUN, "start": at, "end": at, "spans": []},
    }


def plain(name: str) -> str:
    """An id without what makes it the only one of its name."""
    return re.sub(r"-[0-9a-f]{12}(?=-|$)", "", name)


class World:
    """An engine that answers what it is told to, a recorder before it, and a trainer's reader."""

    def __init__(self) -> None:
        self.faults = FaultStore(open_store("memory://"))
        self.recorder = Recorder(TrajectorySender(self.faults, RUN, "rec"), engine="fake")
        self.answers: list[dict[str, Any]] = []
        self.asked: list[tuple[dict[str, Any], str | None]] = []

    async def _engine(self, request: web.Request) -> web.Response:
        self.asked.append((await request.json(), request.headers.get("Authorization")))
        return web.json_response(self.answers.pop(0))

    def run(self, use: Callable[["World"], Awaitable[None]]) -> list[Trajectory]:
        asyncio.run(self._run(use))
        receiver = TrajectoryReceiver(self.faults, RUN)
        found = receiver.consume(100)
        receiver.close()
        return found

    async def _run(self, use: Callable[["World"], Awaitable[None]]) -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._engine)
        app.router.add_post("/v1/completions", self._engine)
        upstream = Upstream()
        async with TestServer(app) as engine, aiohttp.ClientSession() as self.http:
            options = RecordOptions(
                str(engine.make_url("/")), "127.0.0.1", 0, Token(TOKEN), Token(ENGINE_TOKEN)
            )
            listener = Listener(
                RecordingProxy(options, self.recorder, upstream).handle, "127.0.0.1", 0
            )
            await listener.start()
            self.url = listener.url
            try:
                await use(self)
            finally:
                await listener.stop()
                await upstream.close()

    async def post(
        self, path: str, body: Any, *, session: str | None = None, token: str = TOKEN
    ) -> tuple[int, Any, Any]:
        headers = {"Authorization": f"Bearer {token}"}
        if session is not None:
            headers["X-Farcast-Session"] = session
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json(), response.headers

    async def chat(self, session: str | None, said: dict[str, Any], **request: Any) -> Any:
        self.answers.append(said)
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **request}
        return await self.post("/v1/chat/completions", body, session=session)


def test_turns_of_a_session_go_home_with_their_outcome() -> None:
    async def use(world: World) -> None:
        tool = {"role": "tool", "content": "4"}
        call = {"message": {"role": "assistant", "tool_calls": [{"id": "1"}]}}
        status, said, headers = await world.chat("s1", answer([1, 2, 3], [5, 6], **call))
        assert (status, headers["X-Farcast-Recorded"]) == (200, "yes")
        assert said["choices"][0]["token_ids"] == [5, 6], "the answer passes unchanged"
        await world.chat("s1", answer([1, 2, 3, 5, 6, 9], [8]), messages=[tool])
        outcome = {
            "session": "s1",
            "reward": 0.75,
            "task": "support",
            "feedback": [{"turn": 1, "text": "too short"}],
        }
        status, said, _ = await world.post("/farcast/outcome", outcome)
        assert (status, [plain(name) for name in said["trajectories"]]) == (200, ["s1-0"])

    world = World()
    (one,) = world.run(use)
    assert one.token_ids == (1, 2, 3, 5, 6, 9, 8)
    assert one.loss_mask == (False, False, False, True, True, False, True)
    assert one.logprobs == (0.0, 0.0, 0.0, -0.5, -1.5, 0.0, -0.5)
    assert [turn.role for turn in one.turns] == ["user", "tool_call", "observation", "model"]
    assert {(s.version, s.root) for s in one.spans} == {(7, ROOT)}
    assert (one.reward, one.task, one.engine) == (0.75, "support", "fake")
    assert [turn.feedback for turn in one.model_turns] == ["", "too short"]
    assert all(turn.ended >= turn.started > 0 for turn in one.turns if turn.role == "tool_call")
    asked, authorization = world.asked[0]
    assert asked["return_token_ids"] is True
    assert asked["logprobs"] is True
    assert authorization == f"Bearer {ENGINE_TOKEN}"


def test_case_075_a_prompt_that_does_not_continue_begins_a_segment_that_says_so() -> None:
    """Case 075: [5, 6] came back as [7], which decodes to the same text."""

    async def use(world: World) -> None:
        await world.chat("s", answer([1, 2], [5, 6]))
        await world.chat("s", answer([1, 2, 7, 9], [8]))
        await world.post("/farcast/outcome", {"session": "s", "reward": 1})

    first, second = World().run(use)
    assert first.token_ids == (1, 2, 5, 6), "exactly what was sampled"
    assert second.token_ids == (1, 2, 7, 9, 8)
    assert "drift" not in first.metadata
    assert "token 2" in second.metadata["drift"]
    assert (first.group_id, first.group_size) == (second.group_id, second.group_size)
    assert (plain(first.group_id), first.group_size) == ("s", 2)


def test_in_a_group_each_session_has_one_place() -> None:
    async def use(world: World) -> None:
        await world.chat("a", answer([1, 2], [5, 6]))
        await world.chat("a", answer([1, 2, 7, 9], [8]))
        await world.chat("b", answer([1, 2], [5]))
        for name in ("a", "b"):
            outcome = {"session": name, "reward": 1, "group_id": "q", "group_size": 2}
            await world.post("/farcast/outcome", outcome)

    found = World().run(use)
    assert [(plain(t.id), t.group_id, t.group_size) for t in found] == [
        ("a-1", "q", 2),
        ("b-0", "q", 2),
    ]


@pytest.mark.parametrize(
    ("said", "request_", "why"),
    [
        (answer([1], [2], token_ids=None), {}, "no token ids"),
        (answer([1], [2], logprobs=None), {}, "log-prob"),
        ({**answer([1], [2]), "farcast": None}, {}, "which version"),
        (answer([1], [2]), {"temperature": 0}, "Greedy"),
        ({**answer([1], [2]), "choices": answer([1], [2])["choices"] * 2}, {}, "one choice"),
    ],
)
def test_what_cannot_be_recorded_is_answered_all_the_same(
    said: dict[str, Any], request_: dict[str, Any], why: str
) -> None:
    async def use(world: World) -> None:
        status, body, headers = await world.chat("s", said, **request_)
        assert (status, body) == (200, said)
        assert headers["X-Farcast-Recorded"].startswith("no; ")
        assert why in headers["X-Farcast-Recorded"]
        assert world.recorder.refused == 1

    assert World().run(use) == []


def test_nobody_passes_without_the_token() -> None:
    async def use(world: World) -> None:
        for path in ("/v1/chat/completions", "/farcast/outcome"):
            status, body, _ = await world.post(path, {}, token="x" * 20)
            assert status == 401
            assert TOKEN not in json.dumps(body)
        assert world.asked == []

    World().run(use)


def test_requests_of_no_session_are_episodes_of_their_own() -> None:
    async def use(world: World) -> None:
        names = [(await world.chat(None, answer([1], [2])))[2]["X-Farcast-Session"] for _ in "ab"]
        assert len(set(names)) == 2
        for name in names:
            await world.post("/farcast/outcome", {"session": name, "reward": 1})

    assert len(World().run(use)) == 2


def test_an_outcome_outlives_an_outage() -> None:
    async def use(world: World) -> None:
        await world.chat("s", answer([1], [2]))
        world.faults.add(
            Rule(Fail(StoreUnavailableError("away")), verb="put", prefix=TRAJECTORIES_PREFIX)
        )
        outcome = {"session": "s", "reward": 1}
        assert (await world.post("/farcast/outcome", outcome))[0] == 503
        status, first, _ = await world.post("/farcast/outcome", outcome)
        assert status == 200
        status, body, _ = await world.post("/farcast/outcome", outcome)
        assert (status, body) == (200, first), "said again, the same"
        status, body, _ = await world.post("/farcast/outcome", {**outcome, "reward": 2})
        assert status == 409
        assert "closed" in body["error"]["message"]
        assert (await world.post("/farcast/outcome", {"session": "s"}))[0] == 400

    assert [plain(t.id) for t in World().run(use)] == ["s-0"]


def test_sessions_of_which_nothing_is_heard_are_forgotten() -> None:
    now = 0.0
    recorder = Recorder(TrajectorySender(open_store("memory://"), RUN, "rec"), clock=lambda: now)
    body = json.dumps(answer([1], [2])).encode()
    recorder.record("old", {}, body, started=0.0)
    now = 4000.0
    recorder.record("new", {}, body, started=0.0)
    assert (recorder.open_sessions, recorder.forgotten) == (1, 1)
    with pytest.raises(NotRecordedError, match="idle"):
        recorder.attach(Outcome(session="old", reward=1.0))


def test_a_client_object_is_recorded_as_an_endpoint_is() -> None:
    store = open_store("memory://")
    recorder = Recorder(TrajectorySender(store, RUN, "rec"))

    class Answer:
        def model_dump_json(self) -> str:
            return json.dumps(answer([1, 2], [3]))

    class Client:
        """As `openai.OpenAI`."""

        asked: dict[str, Any]

        def __init__(self) -> None:
            self.chat = self.completions = self

        def create(self, **request: Any) -> Answer:
            self.asked = request
            return Answer()

    client = Client()
    RecordedClient(client, recorder).chat("s", model="m", messages=[], temperature=0.7)
    assert client.asked["extra_body"] == {"return_token_ids": True}
    sent = recorder.attach(read_outcome(b'{"session": "s", "reward": 2}'))
    receiver = TrajectoryReceiver(store, RUN)
    (one,) = receiver.consume(10)
    receiver.close()
    assert sent == [one.id]
    assert (one.token_ids, one.temperature, one.reward) == ((1, 2, 3), 0.7, 2.0)
