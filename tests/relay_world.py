"""Relays for tests: real ones as processes, and one that does what a test says, in a thread."""

import http.server
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from servers import free_ports
from serving_world import TOKEN, Answer, ask, wait_for

AUTHORIZATION = f"Bearer {TOKEN}"

COUNTED = """
import sys, threading
from farcast.store import local
log = open(sys.argv.pop(1), "a", buffering=1)
real = local.FileStore.get
def get(self, key, *, max_bytes):
    log.write(key + "\\n")
    return real(self, key, max_bytes=max_bytes)
local.FileStore.get = get
from farcast.cli.main import main
main(sys.argv[1:])
"""
"""`farcast` that writes each key it reads from a folder into a file."""


def payload(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def digest_of(data: bytes) -> str:
    return blake3(data).hexdigest()


class Child:
    """`farcast` as a process, what it reads from the store in a file."""

    def __init__(self, folder: Path, name: str, *arguments: str, **environment: str) -> None:
        self.log = folder / f"{name}.log"
        self.reads = folder / f"{name}.reads"
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", COUNTED, str(self.reads), *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "FARCAST_TEST_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
                | environment,
            )

    def said(self) -> str:
        return self.log.read_text()

    def objects_read(self) -> list[str]:
        lines = self.reads.read_text().splitlines() if self.reads.exists() else []
        return [line for line in lines if line.startswith("objects/")]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


class RelayProcess(Child):
    def __init__(self, folder: Path, store_url: str, *options: str, name: str = "relay") -> None:
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder / "cache"
        super().__init__(
            folder,
            name,
            *("relay", "--store", store_url, "--folder", str(self.folder)),
            *("--port", str(self.port), "--token-env", "FARCAST_TEST_TOKEN", *options),
        )
        wait_for(self._is_up)

    def _is_up(self) -> bool:
        assert self.process.poll() is None, self.said()
        return ask(self.port, "GET", "/health", token=None).status == 200

    def ask(self, digest: str, **options: Any) -> Answer:
        return ask(self.port, "GET", f"/objects/{digest}", **options)


Reply = Callable[[http.server.BaseHTTPRequestHandler], None]


class PlayedRelay:
    """Answers every request as `reply` says."""

    def __init__(self, reply: Reply) -> None:
        self.asked: list[str] = []
        played = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                played.asked.append(self.path)
                reply(self)

            def log_message(self, *_: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                """The reader hung up, as it should."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def giving(status: int, data: bytes = b"", length: int | None = None) -> Reply:
    """This answer, whatever was asked for."""

    def reply(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data) if length is None else length))
        handler.end_headers()
        handler.wfile.write(data)
        if length not in (None, len(data)):
            handler.close_connection = True

    return reply
