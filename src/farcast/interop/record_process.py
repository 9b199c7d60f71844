"""`farcast record`: an OpenAI-compatible address that records what passes through it.

    POST /v1/chat/completions, /v1/completions    passed on, answered as the engine answered
    POST /farcast/feedback                        {"session": ..., "turn": 0, "text": ...}
    POST /farcast/outcome                         closes a session: {"session": ..., "reward": ...}
    GET  /health                                  without a token

The header `X-Farcast-Session` says which requests are one episode; without it each is one of its
own, and the answer's header of that name says which (`X-Session-ID`, which some harnesses send, is
taken in its place). A stream passes event by event, and says `: farcast-recorded yes`, or no and
why, before its end. Recording never costs an answer: what cannot be recorded is passed on all the
same, and `X-Farcast-Recorded` says no, and why. Outcomes that could not be sent when they came are
sent as soon as the store takes them, also by the next recorder on the same journal.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import uvloop
from aiohttp import ClientError, ClientResponse, web
from yarl import URL

from farcast.errors import FarcastError, FormatError, TrajectoryTooLargeError
from farcast.fleet.saying import say
from farcast.fleet.signals import StopRequest
from farcast.gateway.constraint import HEADER
from farcast.gateway.listening import Listener, Refused, begin, end, read_body, send
from farcast.gateway.router import SESSION
from farcast.gateway.streams import MEDIA_TYPE
from farcast.gateway.tokens import Token
from farcast.gateway.upstream import UnreachableError, Upstream
from farcast.interop.answers import Asked, NotRecordedError, asking_for_tokens
from farcast.interop.outcomes import Feedback, read_feedback, read_outcome
from farcast.interop.recording import ClosedError, Recorder
from farcast.interop.streamed import StreamedAnswer
from farcast.types import NAME_PATTERN

OUTCOME_PATH = "/farcast/outcome"
FEEDBACK_PATH = "/farcast/feedback"
OTHER_SESSION = "X-Session-ID"
RECORDED = "X-Farcast-Recorded"
PASSED = ("/v1/chat/completions", "/v1/completions")
STOP_SECONDS = 0.2

MAX_RECORDED = 1 << 26
"""Bytes of an answer that are held to be recorded: half a million tokens of a chat. What is longer
only passes."""

RESEND_SECONDS = (1.0, 60.0)
"""Between two tries to send what waits, at first and at most."""

_TO_ENGINE = (HEADER, "X-Request-Id", "traceparent")
_FROM_ENGINE = ("content-type", "retry-after")
_LOG = logging.getLogger(__name__)


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
        except TrajectoryTooLargeError as error:
            raise Refused(413, "TooLarge", str(error)) from error
        except FarcastError as error:
            raise Refused(503, "NotStored", str(error), retry_after=2) from error
        return web.json_response({"session": outcome.session, "trajectories": ids})

    async def _pass_on(
        self, request: web.BaseRequest, path: str, body: bytes
    ) -> web.StreamResponse:
        named = request.headers.get(SESSION) or request.headers.get(OTHER_SESSION)
        asked = asking_for_tokens(path, body)
        turn = _Turn(named or self._recorder.new_session(), asked, time.time())
        headers = {"Content-Type": "application/json", **turn.header()}
        for name in _TO_ENGINE:
            if _is_plain(value := request.headers.get(name, "")):
                headers[name] = value
        if self._options.upstream_token is not None:
            headers["Authorization"] = self._options.upstream_token.header()
        url = URL(self._options.upstream.rstrip("/") + path)
        try:
            async with self._upstream.ask("POST", url, asked.body, headers) as answer:
                if answer.status == 200 and answer.content_type == MEDIA_TYPE:
                    return await self._relay(request, answer, turn)
                return await self._whole(request, answer, turn)
        except (UnreachableError, ClientError, OSError) as error:
            raise Refused(
                502, "NoEngine", "The engine behind this recorder does not answer.", retry_after=2
            ) from error

    async def _whole(
        self, request: web.BaseRequest, answer: ClientResponse, turn: "_Turn"
    ) -> web.StreamResponse:
        """An answer that is no stream; recorded unless it is too long to be held."""
        chunks, size = [], 0
        headers = _headers_of(answer, turn)
        async for chunk in answer.content.iter_any():
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_RECORDED:
                break
        else:
            if answer.status == 200:
                headers[RECORDED] = await self._record(turn, b"".join(chunks))
            return web.Response(status=answer.status, body=b"".join(chunks), headers=headers)
        headers[RECORDED] = self._not(f"the answer is over {MAX_RECORDED} bytes")
        response = web.StreamResponse(status=answer.status, headers=headers)
        await begin(request, response)
        for chunk in chunks:
            await send(request, response, chunk)
        try:
            async for chunk in answer.content.iter_any():
                await send(request, response, chunk)
        except (ClientError, OSError):
            request.protocol.force_close()
            return response
        await end(response)
        return response

    async def _relay(
        self, request: web.BaseRequest, answer: ClientResponse, turn: "_Turn"
    ) -> web.StreamResponse:
        """Pass a stream on. One that breaks off ends without its mark, and is not recorded."""
        response = web.StreamResponse(status=answer.status, headers=_headers_of(answer, turn))
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
        if turn.asked.settings is None:
            return self._not("the request is not understood")
        try:
            await asyncio.to_thread(
                self._recorder.record,
                turn.session,
                turn.asked.settings,
                answer,
                started=turn.started,
            )
        except NotRecordedError as error:
            return f"no; {_printable(str(error))}"
        return "yes"

    def _not(self, why: str) -> str:
        self._recorder.refused += 1
        return f"no; {why}"


class _Turn(NamedTuple):
    """One request on its way."""

    session: str
    asked: Asked
    started: float

    def header(self) -> dict[str, str]:
        """Which session it is of; nothing for a name that no session has."""
        return {SESSION: self.session} if NAME_PATTERN.fullmatch(self.session) else {}


def _headers_of(answer: ClientResponse, turn: _Turn) -> dict[str, str]:
    """What the engine's answer says in headers, and which session it is of."""
    ours = (SESSION.lower(), RECORDED.lower())
    said = {name.lower(): value for name, value in answer.headers.items() if _is_plain(value)}
    passed = {
        name: value
        for name, value in said.items()
        if name in _FROM_ENGINE or (name.startswith("x-farcast-") and name not in ours)
    }
    return {**passed, **turn.header()}


def _is_plain(value: str) -> bool:
    return bool(value) and value.isascii() and value.isprintable()


def _printable(text: str) -> str:
    """Text as it can stand in a header and in a comment of a stream."""
    return "".join(c if _is_plain(c) else " " for c in text[:500])


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
    if recorder.set_aside:
        say(f"{recorder.set_aside} sessions of the journal are damaged; their files are kept")
    sending = asyncio.create_task(_send_pending(recorder))
    try:
        while not stopped() or proxy.in_flight:
            await asyncio.sleep(STOP_SECONDS)
    finally:
        sending.cancel()
        await listener.stop()
        await upstream.close()
    if recorder.pending:
        say(f"{len(recorder.pending)} outcomes wait in the journal for the store")
    say(
        f"{recorder.recorded} interactions recorded, {recorder.refused} passed on only, "
        f"{recorder.open_sessions - len(recorder.pending)} sessions left without an outcome"
    )


async def _send_pending(recorder: Recorder) -> None:
    """Send what waits for the store, for as long as the recorder runs."""
    first, most = RESEND_SECONDS
    pause = first
    while True:
        try:
            if recorder.pending:
                sent = await asyncio.to_thread(recorder.send_pending)
                _LOG.info("%d outcomes that had waited went home.", sent)
            pause = first
        except Exception as error:  # noqa: BLE001 - answers pass meanwhile, and the next try may succeed
            _LOG.warning("Outcomes wait: %s", error)
            pause = min(2 * pause, most)
        await asyncio.sleep(pause)
