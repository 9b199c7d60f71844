"""Versions go live one after another under load: was every answer written by what it says?

vLLM's real server behind `farcast replica --engine vllm`. Clients ask without a break, on a route
whose answers a commit may cross and on one where it may not. Afterwards every answer is computed
again with `transformers` and the exact weights of the versions it names, rebuilt from the store:
token by token, keys and values kept across a span's border as the engine keeps them. Answers are
greedy, so each token must be the likeliest one, and have the log-prob that the engine gave.

The control computes each answer under the version before instead: if that fitted too, the check
would prove nothing.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from farcast.delta import TensorBits, from_bits, words_of
from farcast.engines.http_client import HttpClient
from farcast.engines.modules import load_module
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

TOLERANCE = 0.15
"""Mean difference of an answer's log-probs, in natural logs, and how far its tokens are from the
likeliest. Programs that round differently agree to less, neighbouring versions do not."""

Say = Callable[[str], None]


class Answer(NamedTuple):
    """`versions` says which version wrote each token, as the answer itself told."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]


class SpanReport(msgspec.Struct, frozen=True, kw_only=True):
    versions_checked: int
    answers: int
    answers_crossed: int
    span_mismatches: int
    requests_lost: int
    control_mismatches: int
    """Of as many answers, computed under the version before the one they name."""
    logprob_error_max: float
    control_error_min: float
    worst: list[tuple[float, float, tuple[int, ...]]]
    """Of the three answers that fit worst: error, that of the control, version of each token."""


def check_spans(
    python: Path, model: Path, ports: Sequence[int], *, versions: int, say: Say = lambda _: None
) -> SpanReport:
    """`python` is of an environment with vLLM; `ports` are two free ones."""
    with tempfile.TemporaryDirectory(prefix="farcast-bench-") as name:
        scratch = Path(name)
        run = _Run(scratch, model)
        with _serving(python, run, scratch, ports, say) as client:
            answers, lost = _under_load(run, client, versions, say)
        return _computed_again(run, answers, lost, say)


class _Run:
    """Versions that are the base with some words changed, each in its own way."""

    def __init__(self, scratch: Path, model: Path) -> None:
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
            places = rng.integers(0, words.size, max(1, int(words.size * SHARE)))
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


def _under_load(run: _Run, client: HttpClient, versions: int, say: Say) -> tuple[list[Answer], int]:
    answers: list[Answer] = []
    lost = [0]
    over = threading.Event()

    def ask(number: int) -> None:
        rng, path = np.random.default_rng(number), WHOLE if number == 0 else CROSSING
        while not over.is_set():
            prompt = tuple(int(token) for token in rng.integers(100, 20_000, 6))
            try:
                answers.append(_ask(client, path, prompt))
            except EngineError:
                lost[0] += 1

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for number in range(1, versions + 1):
        say(f"version {number} of {versions}")
        _wait_for(client, run.publish(number))
    over.set()
    for thread in threads:
        thread.join()
    return answers, lost[0]


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


# --- offline ----------------------------------------------------------------------------------


class _Weights:
    """One module that takes the weights of any version; the last few are kept."""

    def __init__(self, run: _Run) -> None:
        self._archive = run.archive
        self.module = load_module(run.folder).eval()
        self._held: dict[int, Mapping[str, Any]] = {}
        self._live = -1

    def use(self, version: int) -> None:
        import torch

        if version == self._live:
            return
        if version not in self._held:
            bits, like = self._archive.rebuild(version), torch.empty(0)
            self._held[version] = {name: from_bits(tensor, like) for name, tensor in bits.items()}
            while len(self._held) > 3:
                del self._held[next(iter(self._held))]
        self.module.load_state_dict(self._held[version], strict=False)
        self._live = version


def _computed_again(run: _Run, answers: Sequence[Answer], lost: int, say: Say) -> SpanReport:
    weights = _Weights(run)
    errors, control = list[float](), list[float]()
    ordered = sorted(answers, key=lambda answer: answer.versions)
    for place, answer in enumerate(ordered):
        if place % 20 == 0:
            say(f"computing again: {place} of {len(ordered)}")
        errors.append(_error(weights, answer, answer.versions))
        before = [version - 1 if version else 1 for version in answer.versions]
        control.append(_error(weights, answer, before))
    return SpanReport(
        versions_checked=len({version for answer in answers for version in answer.versions}),
        answers=len(answers),
        answers_crossed=sum(len(set(answer.versions)) > 1 for answer in answers),
        span_mismatches=sum(error > TOLERANCE for error in errors),
        requests_lost=lost,
        control_mismatches=sum(error > TOLERANCE for error in control),
        logprob_error_max=max(errors, default=0.0),
        control_error_min=min(control, default=0.0),
        worst=sorted(
            (
                (error, other, answer.versions)
                for error, other, answer in zip(errors, control, ordered, strict=True)
            ),
            reverse=True,
        )[:3],
    )


def _error(weights: _Weights, answer: Answer, versions: Sequence[int]) -> float:
    """How far the answer is from what these versions write: its log-probs from theirs, its tokens
    from the likeliest, whichever is more."""
    import torch
    from transformers import DynamicCache

    cache, found, best = DynamicCache(), [], []
    fed = [*answer.prompt, *answer.tokens[:-1]]
    start = 0
    while start < len(answer.tokens):
        end = start + 1
        while end < len(answer.tokens) and versions[end] == versions[start]:
            end += 1
        weights.use(versions[start])
        first = 0 if start == 0 else len(answer.prompt) + start - 1
        piece = torch.tensor([fed[first : len(answer.prompt) + end - 1]])
        with torch.no_grad():
            logits = weights.module(input_ids=piece, cache=cache, use_cache=True).logits
        rows = torch.log_softmax(logits[0, -(end - start) :].float(), dim=-1)
        chosen = torch.tensor(answer.tokens[start:end])
        found += rows.gather(1, chosen[:, None])[:, 0].tolist()
        best += rows.max(dim=-1).values.tolist()
        start = end
    differ = np.abs(np.array(found) - np.array(answer.logprobs)).mean()
    behind = (np.array(best) - np.array(found)).mean()
    return float(max(differ, behind))
