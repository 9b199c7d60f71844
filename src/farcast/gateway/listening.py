"""A listener, and what both of ours have in common: limits, refusals, the token, the end.

One process, one event loop, aiohttp on both sides. Binds loopback unless told otherwise.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http import HttpProcessingError

from farcast.errors import ConfigError
from farcast.gateway.metrics import Traffic

MAX_BODY = 64 << 20
"""A prompt of a million token ids is about 7 MB of JSON."""

BODY_SECONDS = 30.0
"""A client that takes longer to send its body has gone, or means no good."""

STALL_SECONDS = 60.0
"""A client that takes nothing for so long while an answer streams is given up: it would hold
back the next version."""

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def settle_memory() -> None:
    """Call when everything is loaded: the collector of cycles then leaves alone what lives as long
    as the process. One look at the 50,000 objects of a sidecar took 0.2 s on a busy machine, and
    nobody is answered meanwhile."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


class Refused(Exception):
    """Ends a request with this answer. `kind` is for programs, `message` for people."""

    def __init__(
        self, status: int, kind: str, message: str, *, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.retry_after = retry_after

    def body(self) -> bytes:
        """In the form that OpenAI's clients show."""
        error = {"message": str(self), "type": self.kind, "code": self.status}
        if self.retry_after is not None:
            error["retry_after"] = self.retry_after
        return msgspec.json.encode({"error": error})

    def response(self) -> web.Response:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return web.Response(
            body=self.body(), status=self.status, headers=headers, content_type="application/json"
        )


class ClientGoneError(Exception):
    """The client hung up, or stopped reading."""


async def counted(
    traffic: Traffic, path: str, answer: Awaitable[web.StreamResponse]
) -> web.StreamResponse:
    """Wait for an answer and note how it ended; what a client may ask wrongly becomes a refusal."""
    began, status = time.perf_counter(), 499
    try:
        response = await answer
        status = response.status
        return response
    except Refused as refused:
        status = refused.status
        raise
    except ConfigError as error:
        status = 400
        raise Refused(400, "BadRequest", str(error)) from error
    except (asyncio.CancelledError, ClientGoneError):
        traffic.disconnects += 1
        raise
    finally:
        traffic.answered(path, status, time.perf_counter() - began)


class _OurFaultsOnly(logging.Filter):
    """Leaves out what clients do wrong: it is answered, and would let anybody fill the log."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError)


_LOG = logging.getLogger(__name__)
_LOG.addFilter(_OurFaultsOnly())


class Listener:
    """An HTTP server on one port. `port` 0 takes a free one; `url` says which."""

    def __init__(self, handler: Handler, host: str, port: int) -> None:
        self._handler = handler
        self._host = host
        self._port = port
        self._runner: web.ServerRunner | None = None
        self.url = ""

    async def start(self) -> None:
        server = web.Server(
            self._answer,
            request_factory=_request,
            handler_cancellation=True,
            access_log=None,
            logger=_LOG,
            keepalive_timeout=75.0,
            lingering_time=2.0,
        )
        self._runner = web.ServerRunner(server)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"Nothing can listen on {self._host} port {self._port} ({error.strerror}); "
                "choose another with --port."
            ) from error
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._handler(request)
        except Refused as refused:
            return refused.response()
        except ClientGoneError:
            raise asyncio.CancelledError from None  # nobody is there to be answered


async def read_body(request: web.BaseRequest) -> bytes:
    """The body within its bounds of size and time."""
    try:
        if request.content.is_eof():  # it came with its head: there is nothing to wait for
            return await request.read()
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise Refused(
            408, "SlowRequest", f"The body took over {BODY_SECONDS:.0f} s; send it faster."
        ) from None
    except web.HTTPRequestEntityTooLarge:
        raise Refused(
            413, "TooLarge", f"The body is over {MAX_BODY >> 20} MiB; send a smaller one."
        ) from None
    except (ConnectionError, web.RequestPayloadError):
        raise ClientGoneError from None


async def begin(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Send the head of an answer."""
    try:
        await response.prepare(request)
    except ConnectionError:
        raise ClientGoneError from None


async def end(response: web.StreamResponse) -> None:
    """Send the mark that an answer is whole."""
    try:
        await response.write_eof()
    except ConnectionError:
        raise ClientGoneError from None


async def send(request: web.BaseRequest, response: web.StreamResponse, data: bytes) -> None:
    """Write; a client that does not read is given up after a while."""
    try:
        async with asyncio.timeout(STALL_SECONDS):
            await response.write(data)
    except ConnectionError:
        raise ClientGoneError from None
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ClientGoneError from None


def _request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=MAX_BODY)
