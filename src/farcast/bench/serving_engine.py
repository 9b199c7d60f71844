"""What switching versions costs an engine that serves: vLLM's real server, one after another.

    pause        the engine stands still for a commit, with everything that is checked meanwhile
    reload       the same engine and version, loaded again from a folder by vLLM itself
    patches      vLLM's own `load_checkpoint_weight_patches` in the worker, applying alone
    staging      the version is fetched, decoded, verified and handed over while it serves
    tokens/s     a steady load without and with staging going on all the time
    memory       of the server's processes and this one, beyond what they had before staging

Versions are the model's weights with the last bit of some words of every tensor flipped; changes
of training are such steps for nine words out of ten.
"""

import contextlib
import shutil
import statistics
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from farcast.delta import TensorBits, words_of
from farcast.engines.http_client import HttpClient
from farcast.engines.live_engine import EngineTarget
from farcast.engines.vllm_engine import VllmEngine
from farcast.engines.vllm_process import ONE_THREAD, VllmProcess
from farcast.publish import Publisher
from farcast.replica import CheckpointDirectory, Staged, Subscriber
from farcast.replica.layout import read_layout
from farcast.store import open_store
from farcast.types import VersionRef

RUN = "bench"
SHARES = (0.0001, 0.001, 0.004, 0.01, 0.1)
"""Of words changed. Steps of reinforcement learning change 0.2 % to 0.6 %."""

TYPICAL = 0.004
_EXTENSION = "farcast.bench.vllm_patches.PatchWorker"
_LOAD = {"max_tokens": 64, "temperature": 0, "ignore_eos": True, "model": "m"}

Bits = Mapping[str, TensorBits]


def measure_engine(
    python: Path,
    model: Path,
    port: int,
    *,
    repeats: int = 5,
    seconds: float = 20.0,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """All figures, as they go into the report. `python` is of an environment with vLLM; `model`
    a folder, which is left as it is."""
    with (
        tempfile.TemporaryDirectory(prefix="farcast-bench-") as scratch,
        _bench(python, model, port, Path(scratch), say) as bench,
    ):
        say("warming up")
        bench.commit(TYPICAL)
        commits = {share: bench.commits(share, repeats) for share in SHARES}
        typical = commits[TYPICAL]
        say("reloading")
        reload = bench.reload(repeats)
        patches = bench.patches(repeats)
        say("load without and with staging")
        figures = bench.rates(seconds)
        return {
            "model_bytes": bench.model_bytes,
            "pause_seconds": typical["pause_seconds"],
            "reload_seconds": reload,
            "pause_over_reload": typical["pause_seconds"] / reload,
            "vllm_patches_seconds": patches,
            "pause_over_vllm_patches": typical["pause_seconds"] / patches if patches else None,
            "staging_seconds": typical["staging_seconds"],
            "delta_bytes": typical["delta_bytes"],
            "extra_memory_bytes": typical["extra_memory_bytes"],
            "by_share": [{"share": share, **found} for share, found in commits.items()],
            **figures,
        }


def changed(bits: Bits, share: float, seed: int) -> dict[str, TensorBits]:
    """The last bit of some words of every tensor flipped."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, tensor in bits.items():
        words = words_of(tensor).copy()
        count = max(1, int(words.size * share))
        words[np.unique(rng.integers(0, words.size, count))] ^= 1
        made[name] = TensorBits(tensor.dtype, tensor.shape, words.view(np.uint8))
    return made


@contextlib.contextmanager
def _bench(
    python: Path, model: Path, port: int, scratch: Path, say: Callable[[str], None]
) -> Iterator["_Bench"]:
    folder = scratch / "model"
    shutil.copytree(model, folder)
    say("starting vLLM")
    with VllmProcess.started(
        python,
        folder,
        port,
        log=scratch / "vllm.log",
        arguments=[
            *("--served-model-name", "m", "--dtype", "bfloat16", "--enforce-eager"),
            *("--max-model-len", "1024", "--max-num-seqs", "8"),
            *("--worker-extension-cls", _EXTENSION),
        ],
        environment={**ONE_THREAD, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
    ) as process:
        yield _Bench(process, folder, scratch)


@dataclass
class _Bench:
    """A running server and the versions it is given."""

    process: VllmProcess
    folder: Path
    scratch: Path
    bits: Bits = field(init=False)

    def __post_init__(self) -> None:
        layout = read_layout(self.folder)
        self.bits = {name: layout.shards[file].read(name) for name, file in layout.where.items()}
        self.model_bytes = sum(tensor.data.nbytes for tensor in self.bits.values())
        self.client = HttpClient(self.process.address)
        self.engine = _TimedEngine(self.client)
        store = open_store(f"file://{self.scratch / 'store'}")
        self.publisher = Publisher(store, RUN)
        self.target = EngineTarget(self.engine, self.folder, scratch=self.scratch / "engine")
        self.subscriber = Subscriber(store, RUN, self.target)
        self.version = 0
        self.publisher.publish(self.bits, step=0)
        self.subscriber.sync()

    # --- commits -----------------------------------------------------------------------------

    def publish(self, share: float) -> VersionRef:
        self.version += 1
        self.bits = changed(self.bits, share, self.version)
        return self.publisher.publish(self.bits, step=self.version)

    def stage(self) -> Staged:
        staged = self.subscriber.stage()
        if staged is None:
            raise RuntimeError("A version was published, so there must be one to stage.")
        return staged

    def commit(self, share: float) -> dict[str, float]:
        """Publish, stage and commit one version."""
        self.publish(share)
        began = time.perf_counter()
        staged = self.stage()
        staging = time.perf_counter() - began
        self.subscriber.commit(staged)
        staged.discard()
        return {
            "pause_seconds": self.engine.paused_seconds,
            "staging_seconds": staging,
            "delta_bytes": staged.stats.bytes_fetched,
        }

    def extra_memory(self, share: float) -> int:
        """Bytes that staging a version takes: in this process what Python and numpy allocate, in
        the server's processes their growth."""
        self.publish(share)
        with _Memory(self.process.pid) as memory:
            staged = self.stage()
        self.subscriber.commit(staged)
        staged.discard()
        return memory.extra

    def commits(self, share: float, repeats: int) -> dict[str, float]:
        """Medians of several versions."""
        found = [self.commit(share) for _ in range(repeats)]
        medians = {key: statistics.median(one[key] for one in found) for key in found[0]}
        return {**medians, "extra_memory_bytes": self.extra_memory(share)}

    # --- other ways --------------------------------------------------------------------------

    def reload(self, repeats: int) -> float:
        """Seconds that the engine stands still when vLLM loads the same version from a folder."""
        other = self.scratch / "reload"
        shutil.copytree(self.folder, other, ignore=shutil.ignore_patterns("*.safetensors*"))
        Subscriber(self.subscriber.archive.store, RUN, CheckpointDirectory(other)).sync()
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(other)}}
        found = []
        for _ in range(repeats):
            self.engine.pause()
            self.client.post("/collective_rpc", body)
            self.engine.resume()
            found.append(self.engine.paused_seconds)
        self.target.verify()
        return statistics.median(found)

    def patches(self, repeats: int) -> float | None:
        """Seconds in which vLLM's own sparse loader applies the change of a typical version."""
        found = []
        for _ in range(repeats):
            self.publish(TYPICAL)
            staged = self.stage()
            words = next((self.scratch / "engine").glob("*.words"))
            answer = self.client.post(
                "/collective_rpc", {"method": "bench_patches", "args": [str(words)]}
            )
            found.append(float(answer["results"][0]["seconds"]))
            self.client.post("/collective_rpc", {"method": "bench_unpatch", "args": [str(words)]})
            self.subscriber.commit(staged)
            staged.discard()
        return statistics.median(found)

    # --- load --------------------------------------------------------------------------------

    def rates(self, seconds: float) -> dict[str, float]:
        """Tokens a second, idle and while versions are staged without a break: in turns, so that
        what else the machine does falls on both."""
        self.publish(TYPICAL)
        idle: list[float] = []
        staging: list[float] = []
        turns = 4
        for _ in range(turns):
            idle.append(self._rate(seconds / turns, lambda: time.sleep(0.05)))
            staging.append(self._rate(seconds / turns, lambda: self.stage().discard()))
        return {
            "tokens_per_s_idle": statistics.mean(idle),
            "tokens_per_s_staging": statistics.mean(staging),
            "staging_over_idle": statistics.mean(staging) / statistics.mean(idle),
        }

    def _rate(self, seconds: float, meanwhile: Callable[[], Any]) -> float:
        stop = threading.Event()
        counts = [0] * 4
        threads = [
            threading.Thread(target=self._ask, args=(stop, counts, number), daemon=True)
            for number in range(len(counts))
        ]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        while time.perf_counter() - began < seconds:
            meanwhile()
        stop.set()
        for thread in threads:
            thread.join()
        return sum(counts) / (time.perf_counter() - began)

    def _ask(self, stop: threading.Event, counts: list[int], number: int) -> None:
        while not stop.is_set():
            body = {**_LOAD, "prompt": f"Tell story {number} of a small robot:"}
            answer = self.client.post("/v1/completions", body)
            counts[number] += answer["usage"]["completion_tokens"]


class _TimedEngine(VllmEngine):
    """Knows how long the last pause took: from the wish to stop to the answer that it goes on."""

    paused_seconds = 0.0
    _began = 0.0

    def pause(self) -> None:
        self._began = time.perf_counter()
        super().pause()

    def resume(self) -> None:
        super().resume()
        self.paused_seconds = time.perf_counter() - self._began


class _Memory:
    """The most memory that was allocated inside, beyond what there was on entering. Files in the
    page cache do not count; memory that the allocator had kept from before does."""

    def __init__(self, pid: int) -> None:
        server = psutil.Process(pid)
        self._pids = [pid, *(child.pid for child in server.children(recursive=True))]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._before = self._most = self._server()
        self.extra = 0

    def __enter__(self) -> "_Memory":
        tracemalloc.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.extra = tracemalloc.get_traced_memory()[1] + self._most - self._before
        tracemalloc.stop()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self._most = max(self._most, self._server())

    def _server(self) -> int:
        return sum(private_bytes(pid) for pid in self._pids)


def private_bytes(pid: int) -> int:
    """Anonymous memory of a process, from Linux's own account of it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0
