"""Load for an HTTP server, and an upstream that costs next to nothing.

Both run in one uvloop process on a core of their own, so that the server between them has its
core to itself. The upstream writes one canned answer for each request it has read; the client
sends the next request when the answer to the last one is complete. Requests and answers are
parsed by httptools, which also parses for uvicorn.
"""

import asyncio
import contextlib
import socket
import statistics
import time
from typing import Any, NamedTuple

import msgspec

ANSWER = msgspec.json.encode(
    {
        "id": "cmpl-0",
        "object": "text_completion",
        "created": 0,
        "model": "policy",
        "choices": [{"index": 0, "text": " four", "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6},
    }
)
QUESTION = msgspec.json.encode(
    {
        "model": "policy",
        "prompt": "two plus two is",
        "max_tokens": 1,
        "temperature": 0.0,
        "weight_version": {"min_version": 0},
    }
)
PATH = "/v1/completions"


class Load(NamedTuple):
    """What one run of a load found."""

    requests: int
    requests_per_s: float
    ms_p50: float
    ms_p99: float
    failed: int


def request_bytes(token: str) -> bytes:
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: farcast\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(QUESTION)}\r\n\r\n"
    )
    return head.encode() + QUESTION


class Engine:
    """What all connections to the upstream share: it "holds" what it was told to load."""

    def __init__(self) -> None:
        self.label = ""

    def answer(self, path: bytes, body: bytes) -> bytes:
        if path == PATH.encode():
            return _CANNED
        if path == b"/reload_weights":
            self.label = msgspec.json.decode(body)["label"]
        if path.startswith(b"/weight_sample"):  # it has no weights to look into
            return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
        return _message(msgspec.json.encode({"weight_version": self.label, "success": True}))


class _Served(asyncio.Protocol):
    """One connection to the upstream."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def connection_made(self, transport: Any) -> None:
        from httptools import HttpRequestParser

        self._transport = transport
        self._parser = HttpRequestParser(self)
        self._path, self._body = b"", b""

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path, self._body = url, b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._transport.write(self._engine.answer(self._path, self._body))


def _message(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


_CANNED = _message(ANSWER)


class _Client(asyncio.Protocol):
    def __init__(self, request: bytes, until: float, seconds: list[float]) -> None:
        self._request = request
        self._until = until
        self._seconds = seconds
        self.failed = 0
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._ask()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        if not self.done.done():
            self.failed += 1
            self.done.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        now = time.perf_counter()
        self._seconds.append(now - self._began)
        self.failed += self._parser.get_status_code() != 200
        if now < self._until:
            self._ask()
        else:
            self.done.set_result(None)
            self._transport.close()

    def _ask(self) -> None:
        from httptools import HttpResponseParser

        self._parser = HttpResponseParser(self)
        self._began = time.perf_counter()
        self._transport.write(self._request)


async def start_upstream() -> tuple[asyncio.Server, int]:
    """The canned upstream on a free port of loopback."""
    engine, loop = Engine(), asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Served(engine), "127.0.0.1", 0)
    return server, int(server.sockets[0].getsockname()[1])


async def load(port: int, *, token: str, connections: int, seconds: float) -> Load:
    """Keep `connections` requests under way for `seconds`."""
    loop, found = asyncio.get_running_loop(), list[float]()
    began = time.perf_counter()

    def make() -> _Client:
        return _Client(request_bytes(token), began + seconds, found)

    clients = []
    for _ in range(connections):
        _, client = await loop.create_connection(make, "127.0.0.1", port)
        clients.append(client)
    await asyncio.gather(*(client.done for client in clients))
    took = time.perf_counter() - began
    return Load(
        requests=len(found),
        requests_per_s=len(found) / took,
        ms_p50=statistics.median(found or [0.0]) * 1e3,
        ms_p99=sorted(found or [0.0])[len(found) * 99 // 100 - 1] * 1e3,
        failed=sum(client.failed for client in clients),
    )


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
