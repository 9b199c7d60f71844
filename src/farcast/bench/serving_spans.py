"""Versions go live one after another under load: was every answer written by what it says?

vLLM's real server behind `farcast replica --engine vllm`. Clients ask without a break, on a route
whose answers a commit may cross and on one where it may not. Every few versions none follows
until some answers were given: those tell how far the engine is from an exact computation.
Afterwards every answer is computed again with `transformers` and the exact weights of the versions
it names, rebuilt from the store, and judged (`farcast.bench.serving_judge`).
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from farcast.bench.serving_judge import Answer
from farcast.bench.serving_recomputed import Say, SpanReport, Weights, judged
from farcast.delta import TensorBits, words_of
from farcast.engines.http_client import HttpClient
from farcast.engines.vllm_process import ONE_THREAD, VllmProcess
from farcast.errors import EngineError, ProcessFailedError
from farcast.fleet.launcher import QUIET_CHILD
from farcast.lineage import RunRecord
from farcast.publish import Publisher
from farcast.replica.layout import read_layout
from farcast.store import open_store
from farcast.store.archive import Archive

RUN = "bench"
TOKEN_VARIABLE = "FARCAST_BENCH_TOKEN"
CROSSING, WHOLE = "/inference/v1/generate", "/v1/completions"
TOKENS = 48
SHARE = 0.01
"""Of words, their highest mantissa bit flipped: more than bf16 rounds away, so that neighbouring
versions write different texts."""

ASKERS = 4
QUIET_ROUNDS, QUIET_ANSWERS = 10, 8
"""So often no version follows until as many more answers were given."""


def check_spans(
    python: Path, model: Path, ports: Sequence[int], *, versions: int, say: Say = lambda _: None
) -> SpanReport:
    """`python` is of an environment with vLLM; `ports` are two free ones."""
    with tempfile.TemporaryDirectory(prefix="farcast-bench-") as name:
        scratch = Path(name)
        run = _Run(scratch, model)
        with _serving(python, run, scratch, ports, say) as client:
            answers, lost = _under_load(run, client, versions, say)
        weights = Weights(run.archive, run.folder)
        return judged(weights.errors, answers, lost, say)


class _Run:
    """Versions that are the base with some words changed, each in its own way."""

    def __init__(self, scratch: Path, model: Path, share: float = SHARE) -> None:
        self._share = share
        self.folder = scratch / "model"
        shutil.copytree(model, self.folder)
        layout = read_layout(self.folder)
        self._base = {n: layout.shards[file].read(n) for n, file in layout.where.items()}
        self.store = open_store((scratch / "store").as_uri())
        self.archive = Archive(self.store, RUN)
        self.archive.create_run(RunRecord(run_id=RUN, created="for a benchmark"))
        self._publisher = Publisher(self.store, RUN)
        self._publisher.publish(self._base, step=0)

    def publish(self, number: int) -> int:
        rng = np.random.default_rng(number)
        made = {}
        for name, tensor in self._base.items():
            words = words_of(tensor).copy()
            places = rng.integers(0, words.size, max(1, int(words.size * self._share)))
            words[np.unique(places)] ^= 1 << 6
            made[name] = TensorBits(tensor.dtype, tensor.shape, words.view(np.uint8))
        return self._publisher.publish(made, step=number).version


@contextlib.contextmanager
def _serving(
    python: Path, run: _Run, scratch: Path, ports: Sequence[int], say: Say
) -> Iterator[HttpClient]:
    """vLLM and the sidecar before it; a client of the sidecar."""
    token = secrets.token_urlsafe()
    arguments = ["--served-model-name", "m", "--dtype", "bfloat16", "--enforce-eager"]
    arguments += ["--max-model-len", "512", "--max-num-seqs", "16", "--enable-scale-out"]
    say("starting vLLM")
    with VllmProcess.started(
        python,
        run.folder,
        ports[0],
        log=scratch / "vllm.log",
        arguments=arguments,
        environment={**ONE_THREAD, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
    ) as engine:
        command = [sys.executable, "-m", "farcast", "replica", "--store", run.store.url]
        command += ["--engine", "vllm", "--engine-url", engine.address, "--id", "bench"]
        command += ["--model", str(run.folder), "--scratch", str(scratch / "engine")]
        command += ["--port", str(ports[1]), "--token-env", TOKEN_VARIABLE]
        environment = {**os.environ, **QUIET_CHILD, TOKEN_VARIABLE: token}
        with (scratch / "replica.log").open("wb") as log:
            sidecar = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        client = HttpClient(f"http://127.0.0.1:{ports[1]}", token=token)
        try:
            _wait_for(client, 0, sidecar)
            yield client
        finally:
            sidecar.terminate()
            sidecar.wait(150)


def _wait_for(
    client: HttpClient, version: int, sidecar: "subprocess.Popen[bytes] | None" = None
) -> None:
    """Until the sidecar serves `version`."""
    until = time.monotonic() + 300
    while time.monotonic() < until and (sidecar is None or sidecar.poll() is None):
        with contextlib.suppress(EngineError):
            if client.get("/ready")["version"] >= version:
                return
        time.sleep(0.02)
    raise ProcessFailedError(f"The sidecar does not serve version {version}; run it by hand.")


# --- load -------------------------------------------------------------------------------------


class _Load:
    """Clients that ask without a break until `over`. Published and asked from two sides, so that
    an answer knows whether a version was on its way meanwhile."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._over = threading.Event()
        self._live: int | None = 0
        self.answers: list[Answer] = []
        self.lost = 0
        self._threads = [
            threading.Thread(target=self._ask_on, args=(number,), daemon=True)
            for number in range(ASKERS)
        ]
        for thread in self._threads:
            thread.start()

    def go_to(self, publish: Callable[[], int]) -> None:
        """Publish a version and wait until it is live."""
        self._live = None
        version = publish()
        _wait_for(self._client, version)
        self._live = version

    def rest(self) -> None:
        """Wait for answers that no version is near to."""
        wanted = sum(answer.quiet for answer in self.answers) + QUIET_ANSWERS
        until = time.monotonic() + 300
        while sum(answer.quiet for answer in self.answers) < wanted and time.monotonic() < until:
            time.sleep(0.1)

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask_on(self, number: int) -> None:
        rng, path = np.random.default_rng(number), WHOLE if number == 0 else CROSSING
        while not self._over.is_set():
            prompt = tuple(int(token) for token in rng.integers(100, 20_000, 6))
            live = self._live
            try:
                answer = _ask(self._client, path, prompt)
            except EngineError:
                self.lost += 1
                continue
            # Versions only grow: one that is live before and after was so all the time.
            quiet = live == self._live and set(answer.versions) == {live}
            self.answers.append(answer._replace(quiet=quiet))


def _under_load(run: _Run, client: HttpClient, versions: int, say: Say) -> tuple[list[Answer], int]:
    load = _Load(client)
    load.rest()
    for number in range(1, versions + 1):
        say(f"version {number} of {versions}")
        load.go_to(partial(run.publish, number))
        if number % max(1, versions // QUIET_ROUNDS) == 0:
            load.rest()
    load.end()
    return load.answers, load.lost


def _ask(client: HttpClient, path: str, prompt: tuple[int, ...]) -> Answer:
    asked = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    if path == CROSSING:
        sampling = {**asked, "logprobs": 0}
        body: dict[str, Any] = {"token_ids": prompt, "sampling_params": sampling, "model": "m"}
        answer = client.post(path, body)
        choice = answer["choices"][0]
        logprobs = [place["logprob"] for place in choice["logprobs"]["content"]]
    else:
        body = {**asked, "prompt": prompt, "model": "m", "logprobs": 0, "return_token_ids": True}
        answer = client.post(path, body)
        choice = answer["choices"][0]
        logprobs = choice["logprobs"]["token_logprobs"]
    tokens, said = choice["token_ids"], answer["farcast"]
    versions = [said["start"]["version"]] * len(tokens)
    for span in said["spans"]:
        versions[span["start"] : span["end"]] = [span["version"]] * (span["end"] - span["start"])
    return Answer(prompt, tuple(tokens), tuple(logprobs), tuple(versions))
