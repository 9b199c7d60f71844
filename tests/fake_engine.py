"""An inference engine for tests, as a process of its own: it really generates, token by token,
from the weights it holds, and really caches prefixes.

The "model": a digest of all weight bytes is mixed with each token into a running state, so every
token depends on the weights and on everything before it, and a state that was cached under other
weights gives other tokens. What it did goes to a log, line by line, for tests to compare with.

    python fake_engine.py PORT LOG [--step-ms N] [--socket PATH] ...; see --help
"""

import argparse
import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from blake3 import blake3

MASK = (1 << 61) - 1


def weights_key(tensors: Mapping[str, bytes]) -> int:
    """What stands for a model: all names and bytes of its tensors."""
    hasher = blake3()
    for name in sorted(tensors):
        hasher.update(name.encode() + b"\0" + tensors[name])
    return int.from_bytes(hasher.digest()[:7], "big") | 1


def mix(state: int, token: int, key: int) -> int:
    state = (state * 6364136223846793005 + token * key + key) & MASK
    return state ^ (state >> 29)


def token_of(state: int) -> int:
    return state % 997


def expected(prompt: Iterable[int], keys: Iterable[int], cached: Iterable[int] = ()) -> list[int]:
    """The tokens that weights `keys` write, one for each token. `cached` are the weights behind
    the first tokens of the prompt; the rest of it is computed with the first of `keys`."""
    keys, behind, state = list(keys), list(cached), 0
    for place, token in enumerate(prompt):
        state = mix(state, token, behind[place] if place < len(behind) else keys[0])
    tokens = [token_of(state)]
    for key in keys[1:]:
        state = mix(state, tokens[-1], key)
        tokens.append(token_of(state))
    return tokens[: len(keys)]


def read_tensors(folder: Path) -> dict[str, bytes]:
    index = folder / "model.safetensors.index.json"
    names = (
        sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if index.exists()
        else ["model.safetensors"]
    )
    tensors = {}
    for name in names:
        data = (folder / name).read_bytes()
        size = int.from_bytes(data[:8], "little")
        for tensor, entry in json.loads(data[8 : 8 + size]).items():
            if tensor != "__metadata__":
                start, end = entry["data_offsets"]
                tensors[tensor] = data[8 + size + start : 8 + size + end]
    return tensors


@dataclass
class Job:
    prompt: list[int]
    want: int
    salt: str
    state: int | None = None
    tokens: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: bool = False
    pad: int = 0
    """Bytes of nothing after each token's text."""

    @property
    def done(self) -> bool:
        return self.aborted or len(self.tokens) >= self.want


class FakeEngine:
    def __init__(self, log: Path, options: argparse.Namespace) -> None:
        self.log = log.open("a", buffering=1)
        self.options = options
        self.key, self.label = 1, ""
        self.tensors: dict[str, bytes] = {}
        self.cache: dict[tuple[str, tuple[int, ...]], int] = {}
        self.jobs: list[Job] = []
        self.running = asyncio.Event()
        self.running.set()

    # --- generating --------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            await self.running.wait()
            for job in list(self.jobs):
                self.step(job)
            self.jobs = [job for job in self.jobs if not job.done]
            await asyncio.sleep(self.options.step_ms / 1e3)

    def step(self, job: Job) -> None:
        if job.done:
            return
        if job.state is None:
            job.state = self.prefill(job)
        else:
            job.state = mix(job.state, job.tokens[-1], self.key)
        job.tokens.append(token_of(job.state))
        job.labels.append(self.label)
        job.news.set()

    def prefill(self, job: Job) -> int:
        prompt = tuple(job.prompt)
        known = len(prompt)
        while known and (job.salt, prompt[:known]) not in self.cache:
            known -= 1
        state = self.cache.get((job.salt, prompt[:known]), 0)
        for end in range(known + 1, len(prompt) + 1):
            state = mix(state, prompt[end - 1], self.key)
            self.cache[(job.salt, prompt[:end])] = state
        return state

    def finish(self, job: Job) -> None:
        line = {"prompt": job.prompt, "tokens": job.tokens, "labels": job.labels, "salt": job.salt}
        self.log.write(json.dumps({**line, "aborted": job.aborted}) + "\n")

    # --- routes ------------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body.get("prompt") or "".join(m["content"] for m in body.get("messages", ()))
        ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        job = Job(ids, int(body.get("max_tokens", 4)), str(body.get("cache_salt", "")))
        assert "weight_version" not in body, "the proxy's own field reached the engine"
        job.pad = int(body.get("pad", 0))
        self.jobs.append(job)
        try:
            if body.get("stream"):
                return await self.stream(request, job)
            while not job.done:
                await job.news.wait()
                job.news.clear()
            usage = {"completion_tokens": len(job.tokens), "prompt_tokens": len(ids)}
            return web.json_response(
                {"choices": [self.choice(request.path, job, job.tokens)], "usage": usage}
            )
        except asyncio.CancelledError:
            job.aborted = True
            raise
        finally:
            job.aborted = not job.done or job.aborted
            self.finish(job)

    async def stream(self, request: web.Request, job: Job) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sent = 0
        while sent < job.want:
            await job.news.wait()
            job.news.clear()
            new, sent = job.tokens[sent:], len(job.tokens)
            chunk = {"choices": [self.choice(request.path, job, new)]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def choice(self, path: str, job: Job, tokens: list[int]) -> dict[str, Any]:
        text = "".join(f" {token}" + " " * job.pad for token in tokens)
        said: dict[str, Any] = {"index": 0, "text": text, "token_ids": tokens}
        if path == "/generate" and job.done:
            said["weight_versions"] = spans(job.labels)
        return said

    async def pause(self, request: web.Request) -> web.Response:  # noqa: ARG002
        self.running.clear()
        return web.json_response({})

    async def resume(self, request: web.Request) -> web.Response:  # noqa: ARG002
        self.running.set()
        return web.json_response({})

    async def reload(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.label = body["label"]
        if not self.options.reload_does_nothing or not self.tensors:
            self.tensors = read_tensors(Path(body["path"]))
            self.key = weights_key(self.tensors)
        return web.json_response({})

    async def reset(self, request: web.Request) -> web.Response:  # noqa: ARG002
        self.cache.clear()
        return web.json_response({"success": not self.options.reset_refuses})

    async def version(self, request: web.Request) -> web.Response:  # noqa: ARG002
        return web.json_response({"weight_version": self.label})

    async def sample(self, request: web.Request) -> web.Response:
        """The weights of tests are float32."""
        data = self.tensors[request.query["name"]][: 4 * int(request.query["length"])]
        return web.json_response({"values": np.frombuffer(data, "<f4").astype(float).tolist()})

    async def ok(self, request: web.Request) -> web.Response:  # noqa: ARG002
        return web.json_response({"data": [{"id": "fake"}]})

    async def harm(self, request: web.Request) -> web.Response:
        """What an engine would do for anybody: nobody but the sidecar may come here."""
        self.label, self.key = "harmed", 3
        return web.json_response({"path": request.path})


def spans(labels: list[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for place, label in enumerate(labels):
        if found and found[-1]["version"] == label:
            found[-1]["end"] = place + 1
        else:
            found.append({"version": label, "start": place, "end": place + 1})
    return found


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("log", type=Path)
    parser.add_argument("--socket", help="also listen on this Unix socket")
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--reload-does-nothing", action="store_true")
    parser.add_argument("--reset-refuses", action="store_true")
    options = parser.parse_args()
    engine = FakeEngine(options.log, options)
    app = web.Application(client_max_size=1 << 28)
    for path in ("/v1/completions", "/v1/chat/completions", "/generate"):
        app.router.add_post(path, engine.generate)
    app.router.add_post("/pause", engine.pause)
    app.router.add_post("/resume", engine.resume)
    app.router.add_post("/reload_weights", engine.reload)
    app.router.add_post("/reset_prefix_cache", engine.reset)
    app.router.add_get("/weight_version", engine.version)
    app.router.add_get("/weight_sample", engine.sample)
    app.router.add_get("/health", engine.ok)
    app.router.add_get("/v1/models", engine.ok)
    app.router.add_route("*", "/{path:.*}", engine.harm)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", options.port).start()
    if options.socket:
        await web.UnixSite(runner, options.socket).start()
    print("ready", flush=True)
    await engine.run()


if __name__ == "__main__":
    asyncio.run(main())
