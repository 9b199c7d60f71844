"""`farcast record`: an OpenAI-compatible address that records what passes through it.

    POST /v1/chat/completions, /v1/completions    passed on, answered as the engine answered
    POST /farcast/feedback                        {"session": ..., "turn": 0, "text": ...}
    POST /farcast/outcome                         closes a session: {"session": ..., "reward": ...}
    GET  /health                                  without a token

The header `X-Farcast-Session` says which requests are one episode; without it each is one of its
own, and the answer's header of that name says which (`X-Session-ID`, which some harnesses send, is
taken in its place). A stream passes event by event, and says `: farcast-recorded yes`, or no and
why, before its end. Recording never costs an answer: what cannot
be recorded is passed on all the same, and `X-Farcast-Recorded` says no, and why.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import uvloop
from aiohttp import ClientError, ClientResponse, web
from yarl import URL

from farcast.errors import FarcastError, FormatError, StoreFullError
from farcast.fleet.saying import say
from farcast.fleet.signals import StopRequest
from farcast.gateway.listening import Listener, Refused, begin, end, read_body, send
from farcast.gateway.router import SESSION
from farcast.gateway.streams import MEDIA_TYPE
from farcast.gateway.tokens import Token
from farcast.gateway.upstream import UnreachableError, Upstream
from farcast.interop.answers import NotRecordedError, asking_for_tokens
from farcast.interop.outcomes import Feedback, read_feedback, read_outcome
from farcast.interop.recording import ClosedError, Recorder
from farcast.interop.streamed import StreamedAnswer

OUTCOME_PATH = "/farcast/outcome"
FEEDBACK_PATH = "/farcast/feedback"
OTHER_SESSION = "X-Session-ID"
RECORDED = "X-Farcast-Recorded"
PASSED = ("/v1/chat/completions", "/v1/completions")
STOP_SECONDS = 0.2


class RecordOptions(NamedTuple):
    upstream: str
    host: str
    port: int
    token: Token
    upstream_token: Token | None


class RecordingProxy:
    """Answers requests, in one event loop."""

    def __init__(self, options: RecordOptions, recorder: Recorder, upstream: Upstream) -> None:
        self._options = options
        self._recorder = recorder
        self._upstream = upstream
        self.in_flight = 0

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.raw_path
        if path == "/health":
            return web.json_response({"status": "ok"})
        if not self._options.token.allows(request.headers.get("Authorization")):
            raise Refused(401, "Unauthorized", "Send the recorder's token as a bearer token.")
        if request.method != "POST" or path not in (*PASSED, OUTCOME_PATH, FEEDBACK_PATH):
            raise Refused(404, "NoSuchRoute", f"There is no {request.method} {path[:80]} here.")
        body = await read_body(request)
        self.in_flight += 1
        try:
            if path in (OUTCOME_PATH, FEEDBACK_PATH):
                return await self._told(path, body)
            return await self._pass_on(request, path, body)
        finally:
            self.in_flight -= 1

    async def _told(self, path: str, body: bytes) -> web.Response:
        try:
            if path == FEEDBACK_PATH:
                said = read_feedback(body)
                await asyncio.to_thread(
                    self._recorder.feed_back, said.session, Feedback(said.turn, said.text)
                )
                return web.json_response({"session": said.session, "turn": said.turn})
            outcome = read_outcome(body)
            ids = await asyncio.to_thread(self._recorder.attach, outcome)
        except NotRecordedError as error:
            raise Refused(404, "NoSuchSession", str(error)) from error
        except ClosedError as error:
            raise Refused(409, "SessionClosed", str(error)) from error
        except FormatError as error:
            raise Refused(400, "BadOutcome", str(error)) from error
        except FarcastError as error:
            if not error.retry and not isinstance(error, StoreFullError):
                raise
            raise Refused(503, "NotStored", str(error), retry_after=2) from error
        return web.json_response({"session": outcome.session, "trajectories": ids})

    async def _pass_on(
        self, request: web.BaseRequest, path: str, body: bytes
    ) -> web.StreamResponse:
        asked = _parsed(body)
        named = request.headers.get(SESSION) or request.headers.get(OTHER_SESSION)
        turn = _Turn(named or self._recorder.new_session(), asked, time.time())
        headers = {"Content-Type": "application/json"}
        if self._options.upstream_token is not None:
            headers["Authorization"] = self._options.upstream_token.header()
        url = URL(self._options.upstream.rstrip("/") + path)
        wanted = msgspec.json.encode(asking_for_tokens(path, asked))
        try:
            async with self._upstream.ask("POST", url, wanted, headers) as answer:
                if answer.content_type == MEDIA_TYPE:
                    return await self._relay(request, answer, turn)
                data = await answer.read()
        except (UnreachableError, ClientError, OSError) as error:
            raise Refused(
                502, "NoEngine", "The engine behind this recorder does not answer.", retry_after=2
            ) from error
        said = {SESSION: turn.session}
        if answer.status == 200:
            said[RECORDED] = await self._record(turn, data)
        return web.Response(
            status=answer.status, body=data, content_type=answer.content_type, headers=said
        )

    async def _relay(
        self, request: web.BaseRequest, answer: ClientResponse, turn: "_Turn"
    ) -> web.StreamResponse:
        """Pass a stream on. One that breaks off ends without its mark, and is not recorded."""
        response = web.StreamResponse(
            status=answer.status,
            headers={SESSION: turn.session, "Content-Type": answer.headers["Content-Type"]},
        )
        await begin(request, response)
        streamed = StreamedAnswer()
        try:
            async for chunk in answer.content.iter_any():
                ready = streamed.push(chunk)
                if ready:
                    await send(request, response, ready)
        except (ClientError, OSError):
            request.protocol.force_close()
            return response
        recorded = await self._record(turn, streamed.answer())
        await send(request, response, streamed.finish(recorded))
        await end(response)
        return response

    async def _record(self, turn: "_Turn", answer: bytes) -> str:
        try:
            await asyncio.to_thread(
                self._recorder.record, turn.session, turn.asked, answer, started=turn.started
            )
        except (NotRecordedError, StoreFullError) as error:
            return f"no; {error}".replace("\n", " ")[:500]
        return "yes"


class _Turn(NamedTuple):
    """One request on its way."""

    session: str
    asked: dict[str, Any]
    started: float


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise Refused(400, "BadRequest", "The body is no JSON object.") from error


def serve_recorder(options: RecordOptions, recorder: Recorder, stop: StopRequest) -> None:
    """Record until `stop` is requested. Open sessions stay in the recorder's journal."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(options, recorder, lambda: stop.requested))


async def _serve(options: RecordOptions, recorder: Recorder, stopped: Callable[[], bool]) -> None:
    upstream = Upstream()
    proxy = RecordingProxy(options, recorder, upstream)
    listener = Listener(proxy.handle, options.host, options.port)
    await listener.start()
    say(f"listens on {listener.url} before {options.upstream}")
    try:
        while not stopped() or proxy.in_flight:
            await asyncio.sleep(STOP_SECONDS)
    finally:
        await listener.stop()
        await upstream.close()
    say(
        f"{recorder.recorded} interactions recorded, {recorder.refused} passed on only, "
        f"{recorder.open_sessions} sessions left without an outcome"
    )
