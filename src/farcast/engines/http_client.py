"""JSON calls to an engine's own server, over TCP or a Unix socket. Blocking, one at a time.

An address is `http://127.0.0.1:8001` or `unix:/run/engine.sock`. Answers are read up to a bound.
Calls that follow one another at once share a connection; an older one may be closed on the other
side, and then nobody could tell whether a call had reached the server.
Refuses redirects and any scheme but these two: the engine stands beside the sidecar.
"""

import http.client
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec

from farcast.errors import ConfigError, EngineRefusedError, EngineUnreachableError

MAX_ANSWER_BYTES = 1 << 28
"""The layout of a quarter of a million tensors as JSON."""

_FRESH_SECONDS = 0.5
"""A connection used this short ago is used again; servers keep an idle one for five and more."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class HttpClient:
    """Calls to one server. `token` is sent as a bearer token if given."""

    def __init__(self, address: str, *, timeout: float = 120.0, token: str | None = None) -> None:
        self._address = address
        self._timeout = timeout
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._connection()
        self._own = threading.local()

    @property
    def address(self) -> str:
        return self._address

    def get(self, path: str) -> Any:
        return self.call("GET", path)

    def post(self, path: str, body: Any = None, *, query: Mapping[str, str] | None = None) -> Any:
        return self.call("POST", f"{path}?{urlencode(query)}" if query else path, body)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The decoded answer, None if it is empty. Raises `EngineUnreachableError` if there was
        none, `EngineRefusedError` with the engine's words for a status other than 200."""
        data = None if body is None else msgspec.json.encode(body)
        headers = {**self._headers, **({"Content-Type": "application/json"} if data else {})}
        connection = self._fresh()
        try:
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            answer = response.read(MAX_ANSWER_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise EngineUnreachableError(
                f"The engine at {self._address} did not answer {path.split('?')[0]} "
                f"({type(error).__name__}); see whether it still runs."
            ) from error
        if len(answer) > MAX_ANSWER_BYTES or response.status != http.client.OK:
            connection.close()  # servers hang up after an error without a word
        self._own.used = time.monotonic()
        return self._decoded(path.split("?")[0], response.status, answer)

    def _decoded(self, path: str, status: int, answer: bytes) -> Any:
        if status != http.client.OK:
            text = answer[:300].decode("utf-8", "replace")
            raise EngineRefusedError(
                f"The engine at {self._address} answered {status} to {path}: {text!r}; look "
                "into its log."
            )
        if len(answer) > MAX_ANSWER_BYTES:
            raise EngineRefusedError(f"The engine's answer to {path} is too long to be right.")
        try:
            return msgspec.json.decode(answer) if answer.strip() else None
        except msgspec.DecodeError:
            return answer.decode("utf-8", "replace")  # health checks answer in plain words

    def _fresh(self) -> http.client.HTTPConnection:
        """This thread's connection if it was used just now, else a new one."""
        kept: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if kept is None or time.monotonic() - self._own.used > _FRESH_SECONDS:
            if kept is not None:
                kept.close()
            kept = self._own.connection = self._connection()
            self._own.used = time.monotonic()
        return kept

    def _connection(self) -> http.client.HTTPConnection:
        if self._address.startswith("unix:"):
            return _UnixConnection(self._address.removeprefix("unix:"), self._timeout)
        wrong = ConfigError(
            "An engine's address is http://HOST:PORT or unix:PATH, without anything more."
        )
        try:
            parts = urlsplit(self._address)
            port = parts.port or 80
        except ValueError:  # brackets that do not close, a port that is none
            raise wrong from None
        if parts.scheme != "http" or not parts.hostname or parts.username or parts.path.strip("/"):
            raise wrong
        return http.client.HTTPConnection(parts.hostname, port, timeout=self._timeout)
