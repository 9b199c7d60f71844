"""`farcast record`: an OpenAI-compatible address that records what passes through it.

    POST /v1/chat/completions, /v1/completions    passed on, answered as the engine answered
    POST /farcast/outcome                         closes a session: {"session": ..., "reward": ...}
    GET  /health                                  without a token

The header `X-Farcast-Session` says which requests are one episode; without it each is one of its
own, and the answer's header of that name says which. Recording never costs an answer: what cannot
be recorded is passed on all the same, and `X-Farcast-Recorded` says no, and why.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import uvloop
from aiohttp import ClientError, web
from yarl import URL

from farcast.errors import FarcastError, FormatError
from farcast.fleet.saying import say
from farcast.fleet.signals import StopRequest
from farcast.gateway.listening import Listener, Refused, read_body
from farcast.gateway.router import SESSION
from farcast.gateway.tokens import Token
from farcast.gateway.upstream import UnreachableError, Upstream
from farcast.interop.recording import (
    NotRecordedError,
    Recorder,
    asking_for_tokens,
    read_outcome,
)

OUTCOME_PATH = "/farcast/outcome"
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
        if request.method != "POST" or path not in (*PASSED, OUTCOME_PATH):
            raise Refused(404, "NoSuchRoute", f"There is no {request.method} {path[:80]} here.")
        body = await read_body(request)
        self.in_flight += 1
        try:
            if path == OUTCOME_PATH:
                return await self._outcome(body)
            return await self._pass_on(request, path, body)
        finally:
            self.in_flight -= 1

    async def _outcome(self, body: bytes) -> web.Response:
        try:
            outcome = read_outcome(body)
            ids = await asyncio.to_thread(self._recorder.attach, outcome)
        except NotRecordedError as error:
            raise Refused(404, "NoSuchSession", str(error)) from error
        except FormatError as error:
            raise Refused(400, "BadOutcome", str(error)) from error
        except FarcastError as error:
            if not error.retry:
                raise
            raise Refused(503, "NotStored", str(error), retry_after=2) from error
        return web.json_response({"session": outcome.session, "trajectories": ids})

    async def _pass_on(self, request: web.BaseRequest, path: str, body: bytes) -> web.Response:
        asked = _parsed(body)
        if asked.get("stream"):
            raise Refused(400, "Streaming", "Recording needs whole answers; leave out `stream`.")
        session = request.headers.get(SESSION) or self._recorder.new_session()
        started = time.time()
        status, answer, kind = await self._ask(path, asking_for_tokens(path, asked))
        headers = {SESSION: session}
        if status == 200:
            headers[RECORDED] = self._record(session, asked, answer, started)
        return web.Response(status=status, body=answer, content_type=kind, headers=headers)

    async def _ask(self, path: str, asked: dict[str, Any]) -> tuple[int, bytes, str]:
        headers = {"Content-Type": "application/json"}
        if self._options.upstream_token is not None:
            headers["Authorization"] = self._options.upstream_token.header()
        url = URL(self._options.upstream.rstrip("/") + path)
        try:
            async with self._upstream.ask(
                "POST", url, msgspec.json.encode(asked), headers
            ) as answer:
                return answer.status, await answer.read(), answer.content_type
        except (UnreachableError, ClientError, OSError) as error:
            raise Refused(
                502, "NoEngine", "The engine behind this recorder does not answer.", retry_after=2
            ) from error

    def _record(self, session: str, asked: dict[str, Any], answer: bytes, started: float) -> str:
        try:
            self._recorder.record(session, asked, answer, started=started)
        except NotRecordedError as error:
            return f"no; {error}".replace("\n", " ")[:500]
        return "yes"


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise Refused(400, "BadRequest", "The body is no JSON object.") from error


def serve_recorder(options: RecordOptions, recorder: Recorder, stop: StopRequest) -> None:
    """Record until `stop` is requested. Sessions without an outcome are gone then."""
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
