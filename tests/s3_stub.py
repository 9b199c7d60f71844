"""As much of S3 as one bucket needs, in this process, so that a test can script its answers.
Google's XML interface differs for what farcast asks only in the name of one header.

`respond` is asked first about every request; what it returns is sent as it is. `honest=False`
ignores conditional creates, as several gateways do.
"""

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from farcast.store import Store, open_store
from servers import SECRET


@dataclass(frozen=True)
class Seen:
    """One request. `access_key` is who signed it."""

    method: str
    key: str
    headers: dict[str, str]
    access_key: str


@dataclass(frozen=True)
class Answer:
    status: int
    code: str = "TestAnswer"
    store: bool = False
    """Act on a put before answering."""
    drop: bool = False
    """Close the connection instead of answering."""


@dataclass
class S3Stub:
    port: int = 0
    honest: bool = True
    ranges: bool = True
    page: int = 1000
    claimed_size: int | None = None
    """The Content-Length of whole objects, when it is not the true one."""
    respond: Callable[[Seen], Answer | None] = lambda _: None
    before_put: Callable[[], object] = lambda: None
    """Called between looking and writing."""
    seen: list[Seen] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    parts: dict[tuple[str, int], bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> "S3Stub":
        handler = type("Handler", (_Handler,), {"stub": self})
        self._server = _Server(("127.0.0.1", self.port), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def open(self, prefix: str = "run", **options: Any) -> Store:
        defaults = {
            "endpoint": self.endpoint,
            "access_key_id": "testkey",
            "secret_access_key": SECRET,
            "retries": 2,
        }
        return open_store(f"s3://bucket/{prefix}", **{**defaults, **options})

    def open_google(self, prefix: str = "run", **options: Any) -> Store:
        defaults = {"endpoint": self.endpoint, "bearer_token": SECRET}
        return open_store(f"gs://bucket/{prefix}", **{**defaults, **options})

    def methods(self) -> list[str]:
        return [seen.method for seen in self.seen]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is what some tests are about."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    stub: S3Stub
    protocol_version = "HTTP/1.1"

    def handle_one(self) -> None:
        url = urlsplit(self.path)
        key = unquote(url.path).removeprefix("/bucket").lstrip("/")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        signer = (self.headers.get("Authorization") or "").partition("Credential=")[2]
        headers = {name.lower(): value for name, value in self.headers.items()}
        seen = Seen(self.command, key, headers, signer.partition("/")[0])
        with self.stub.lock:
            self.stub.seen.append(seen)
            answer = self.stub.respond(seen)
            if answer is not None and answer.store:
                self.stub.objects[key] = body
        if answer is not None and answer.drop:
            self.close_connection = True
            return
        if answer is not None:
            self._send(answer.status, _error(answer.code))
        elif self.command == "POST" or "uploadId=" in url.query:
            self._put_in_parts(key, parse_qs(url.query, keep_blank_values=True), body)
        elif self.command == "PUT":
            self._put(key, body)
        elif self.command == "DELETE":
            with self.stub.lock:
                self.stub.objects.pop(key, None)
            self._send(204, b"")
        elif key:
            self._get(key)
        else:
            self._list(parse_qs(url.query))

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = handle_one

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _put(self, key: str, body: bytes) -> None:
        self.stub.before_put()
        with self.stub.lock:
            s3, google = self.headers["If-None-Match"], self.headers["x-goog-if-generation-match"]
            guarded = s3 == "*" or google == "0"
            taken = guarded and self.stub.honest and key in self.stub.objects
            if not taken:
                self.stub.objects[key] = body
        if taken:
            self._send(412, _error("PreconditionFailed"))
        else:
            self._send(200, b"", {"ETag": f'"{hash(body)}"', "x-goog-generation": "1"})

    def _put_in_parts(self, key: str, query: dict[str, list[str]], body: bytes) -> None:
        if "uploads" in query:
            text = "<InitiateMultipartUploadResult><Bucket>bucket</Bucket><Key>k</Key>"
            text += "<UploadId>1</UploadId></InitiateMultipartUploadResult>"
            self._send(200, text.encode())
        elif self.command == "PUT":
            with self.stub.lock:
                self.stub.parts[key, int(query["partNumber"][0])] = body
            self._send(200, b"", {"ETag": '"part"'})
        else:
            with self.stub.lock:
                numbers = sorted(number for other, number in self.stub.parts if other == key)
                parts = [self.stub.parts.pop((key, number)) for number in numbers]
                self.stub.objects[key] = b"".join(parts)
            text = "<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"
            self._send(200, text.encode(), {"x-goog-generation": "1"})

    def _get(self, key: str) -> None:
        data = self.stub.objects.get(key)
        if data is None:
            self._send(404, _error("NoSuchKey"))
            return
        headers = {"ETag": f'"{hash(data)}"', "Last-Modified": formatdate(usegmt=True)}
        asked = self.headers.get("Range") if self.stub.ranges else None
        if asked is None:
            self._send(200, data, headers, self.stub.claimed_size)
            return
        first, last = asked.removeprefix("bytes=").split("-")
        start, end = int(first), min(int(last) + 1, len(data))
        if start >= len(data):
            self._send(416, _error("InvalidRange"))
            return
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        self._send(206, data[start:end], headers)

    def _list(self, query: dict[str, list[str]]) -> None:
        prefix, after = query.get("prefix", [""])[0], query.get("start-after", [""])[0]
        keys = sorted(k for k in self.stub.objects if k.startswith(prefix) and k > after)
        keys = [k for k in keys if k > query.get("continuation-token", [""])[0]]
        more = len(keys) > self.stub.page
        keys = keys[: self.stub.page]
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.stub.objects[key])}</Size>"
            f"<LastModified>{datetime.now(UTC).isoformat()}</LastModified><ETag>x</ETag></Contents>"
            for key in keys
        )
        rest = f"<NextContinuationToken>{escape(keys[-1])}</NextContinuationToken>" if more else ""
        rest += f"<IsTruncated>{str(more).lower()}</IsTruncated>"
        text = f"<ListBucketResult>{rest}{rows}</ListBucketResult>"
        self._send(200, text.encode())

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        claimed: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body) if claimed is None else claimed))
        self.end_headers()
        self.close_connection = self.close_connection or claimed is not None
        if self.command != "HEAD":
            self.wfile.write(body)


def _error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>{SECRET} leaks</Message></Error>".encode()
