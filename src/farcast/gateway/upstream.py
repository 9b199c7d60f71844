"""Requests to a server behind us: one session, connections kept, nothing decoded on the way.

What it raises says what became of a request: `UnreachableError` if nothing was answered, and
`BrokenOffError` if the server may have begun on it, so that it may be what broke the server.
"""

import asyncio
from collections.abc import Coroutine, Mapping
from contextvars import ContextVar

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.tracing import Trace
from yarl import URL

CONNECT_SECONDS = 5.0

IDLE_SECONDS = 4.0
"""Below the 5 s after which uvicorn, which most engines use, closes an idle connection: else we
would now and then send into a connection that is just being closed."""

_SKIPPED = ("Accept", "Accept-Encoding", "User-Agent")

MAX_ANSWER = 256 << 20
"""More than any answer with log-probs: what is longer is a server's mistake, or its malice."""

Failure = (aiohttp.ClientError, OSError)


_UNSENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL)
"""Raised before anything of a request was written."""


class UnreachableError(Exception):
    """The server did not answer."""


class BrokenOffError(UnreachableError):
    """The server was sent the request, all or part of it, and ended the connection before it
    answered."""


class Upstream:
    """To be made inside a running event loop. `socket_path`: everything goes to the server behind
    that Unix socket, whatever its URL says."""

    def __init__(self, socket_path: str | None = None) -> None:
        self._session = aiohttp.ClientSession(
            connector=_connector(socket_path),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_SKIPPED,
            requote_redirect_url=False,
        )

    async def close(self) -> None:
        await self._session.close()

    def ask(
        self, method: str, url: URL, body: bytes | None, headers: Mapping[str, str]
    ) -> "_Asked":
        """Entered, an answer's head; its body is read from it. Leaving early closes the
        connection, which is how an engine learns that nobody waits any more."""
        return _Asked(self._ask(method, url, body, headers))

    async def _ask(
        self, method: str, url: URL, body: bytes | None, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        _OPENED.set(False)
        try:
            return await self._session.request(
                method, url, data=body, headers=headers, allow_redirects=False
            )
        except _UNSENT as error:
            raise UnreachableError(type(error).__name__) from error
        except aiohttp.ServerDisconnectedError as error:
            if _OPENED.get():
                raise BrokenOffError(type(error).__name__) from error
            # An idle connection, closed while we wrote into it: most likely nothing was begun.
            return await self._again(method, url, body, headers)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise BrokenOffError(type(error).__name__) from error

    async def _again(
        self, method: str, url: URL, body: bytes | None, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        await asyncio.sleep(0)  # let a watcher hear that the server is gone
        try:
            return await self._session.request(
                method, url, data=body, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            # Out of reach, perhaps because of the request: it may have been read the first time.
            raise BrokenOffError(type(error).__name__) from error


class _Asked:
    """An answer while somebody reads it."""

    __slots__ = ("_asking", "_response")

    def __init__(self, asking: Coroutine[None, None, aiohttp.ClientResponse]) -> None:
        self._asking = asking

    async def __aenter__(self) -> aiohttp.ClientResponse:
        self._response = await self._asking
        return self._response

    async def __aexit__(self, *_: object) -> None:
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


async def read_answer(answer: aiohttp.ClientResponse) -> bytes:
    """All of an answer, within its bound; raises one of `Failure` beyond it."""
    length = answer.content_length
    if length is not None and length <= MAX_ANSWER:
        return await answer.read()
    chunks, size = [], 0
    if length is None:
        async for chunk in answer.content.iter_any():
            size += len(chunk)
            if size > MAX_ANSWER:
                break
            chunks.append(chunk)
        else:
            return b"".join(chunks)
    raise aiohttp.ClientPayloadError("The answer is too long.")


_OPENED: ContextVar[bool] = ContextVar("opened", default=False)
"""Whether a connection was opened for this task's request, instead of an idle one used."""


class _Telling(aiohttp.BaseConnector):
    """Notes in `_OPENED` what aiohttp tells to its tracing only, which costs each request 20 us."""

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        _OPENED.set(True)
        return await super()._create_connection(req, traces, timeout)


class _TcpConnector(_Telling, aiohttp.TCPConnector):
    pass


class _UnixConnector(_Telling, aiohttp.UnixConnector):
    pass


def _connector(socket_path: str | None) -> aiohttp.BaseConnector:
    if socket_path is not None:
        return _UnixConnector(socket_path, limit=0, keepalive_timeout=IDLE_SECONDS)
    return _TcpConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
