"""SGLang's published routes, as far as farcast uses them, with the manners that matter:

    weights      read from a folder, part after part; a part that can't be read leaves a mixture
    fused        q, k and v are one tensor inside, turned over by each load as kernels want it
    cache        prefixes by (extra_key, prompt); flushing fails with 400 while something runs
    pause        abort, retract or in_place; running requests survive the last two
    version      a name without meaning to the server, changed by a load or apart

An answer is a digest of the weights and the prompt, so that stale weights or caches show.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from blake3 import blake3

from farcast.replica.layout import read_layout

Reply = tuple[int, Any]


@dataclass
class FakeSglang:
    """The state of the server. `broken_after`: the next load ends after so many tensors."""

    weights: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    version: str = "default"
    paused: str | None = None
    running: int = 0
    cache: dict[tuple[str, str], str] = field(default_factory=dict)
    broken_after: int | None = None
    loads_nothing: bool = False
    calls: list[str] = field(default_factory=list)
    address: str = ""

    ROUTES: ClassVar[dict[str, str]] = {
        "/health": "_health",
        "/generate": "_generate",
        "/pause_generation": "_pause",
        "/continue_generation": "_continue",
        "/flush_cache": "_flush",
        "/get_weight_version": "_version",
        "/update_weight_version": "_set_version",
        "/update_weights_from_disk": "_load",
        "/get_weights_by_name": "_weights",
    }

    @classmethod
    @contextmanager
    def started(cls, folder: Path) -> Iterator["FakeSglang"]:
        fake = cls()
        fake.read(folder)
        with serving(fake.reply) as fake.address:
            yield fake

    def reply(self, path: str, body: Any) -> Reply:
        self.calls.append(path)
        method = self.ROUTES.get(path)
        return (404, "") if method is None else getattr(self, method)(body)

    def read(self, folder: Path) -> None:
        layout = read_layout(folder)
        for number, (name, file) in enumerate(sorted(layout.where.items())):
            if number == self.broken_after:
                self.broken_after = None
                raise OSError("a shard could not be read")
            bits = layout.shards[file].read(name)
            self.weights[name] = bits.data.view("<u2").reshape(bits.shape)

    def answer(self, prompt: str, extra_key: str = "") -> str:
        key = (extra_key, prompt)
        if key not in self.cache:
            digest = blake3(prompt.encode())
            for name in sorted(self.weights):
                digest.update(np.ascontiguousarray(self.weights[name]).view(np.uint8).data)
            self.cache[key] = digest.hexdigest()
        return self.cache[key]

    # --- routes ------------------------------------------------------------------------------

    def _health(self, _: Any) -> Reply:
        return 200, ""

    def _generate(self, body: Any) -> Reply:
        return 200, {"text": self.answer(body["text"], body.get("extra_key") or "")}

    def _pause(self, body: Any) -> Reply:
        mode = body.get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return 422, {"detail": "Invalid mode"}
        self.paused = mode
        if mode == "abort":
            self.running = 0
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def _continue(self, _: Any) -> Reply:
        self.paused = None
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    def _flush(self, _: Any) -> Reply:
        if self.running and self.paused != "retract":
            return 400, "Cache flush failed."
        self.cache.clear()
        return 200, "Cache flushed.\nPlease check backend logs for more details."

    def _version(self, _: Any) -> Reply:
        return 200, {"weight_version": self.version}

    def _set_version(self, body: Any) -> Reply:
        self.version = body["new_version"]
        return 200, {"success": True, "new_version": self.version}

    def _load(self, body: Any) -> Reply:
        try:
            if not self.loads_nothing:
                self.read(Path(body["model_path"]))
        except (OSError, KeyError) as error:
            return 400, {"success": False, "message": str(error), "num_paused_requests": 0}
        if body.get("flush_cache", True):
            self._flush(None)
        if not body.get("keep_pause"):
            self.paused = None
        self.version = body.get("weight_version") or self.version
        return 200, {"success": True, "message": "Succeeded.", "num_paused_requests": self.running}

    def _weights(self, body: Any) -> Reply:
        words = self.weights.get(body["name"])
        if words is None:
            return 400, {"object": "error", "message": "Get parameter by name failed"}
        values = (words[: body.get("truncate_size", 100)].astype(np.uint32) << 16).view(np.float32)
        return 200, values.tolist()


@contextmanager
def serving(reply: Callable[[str, Any], Reply]) -> Iterator[str]:
    """A server on loopback that answers with `reply(path, body)`; gives its address."""
    handler = type("Handler", (_Handler,), {"reply": staticmethod(reply)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True  # connections outlive the test that kept them
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        handler.gone = True  # type: ignore[attr-defined]
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    """Keeps connections, and hangs up after an error without announcing it, as uvicorn does."""

    protocol_version = "HTTP/1.1"
    reply: Callable[[str, Any], Reply]
    gone = False

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer(json.loads(data) if data else {})

    def _answer(self, body: Any) -> None:
        if self.gone:
            self.close_connection = True
            return
        status, answer = self.reply(self.path.split("?")[0], body)
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.close_connection |= status != 200

    def log_message(self, *_: Any) -> None:
        """Quiet."""
