"""A run of a real small model, and vLLM's real server on CPU that follows it."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np

from farcast.delta import TensorBits, words_of
from farcast.engines.http_client import HttpClient
from farcast.engines.live_engine import EngineTarget
from farcast.engines.vllm_engine import VllmEngine
from farcast.engines.vllm_process import ONE_THREAD, VllmProcess
from farcast.publish import Publisher
from farcast.replica import CheckpointDirectory, Subscriber
from farcast.replica.layout import read_layout
from farcast.store import MemoryStore
from farcast.train.models import default_cache, prepare_model
from farcast.types import VersionRef
from servers import free_ports

RUN = "run1"
ROOT = Path(__file__).parents[2]

Bits = dict[str, TensorBits]

PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time, a small robot")


def environment_python() -> Path | None:
    """Python of `make vllm-env`'s environment; `FARCAST_VLLM_PYTHON` names another."""
    python = Path(os.environ.get("FARCAST_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
    return python if python.exists() else None


def read_folder(folder: Path) -> Bits:
    layout = read_layout(folder)
    return {name: layout.shards[file].read(name) for name, file in layout.where.items()}


def changed(bits: Mapping[str, TensorBits], seed: int, share: float = 0.004) -> Bits:
    """The last bit of some words of every tensor flipped: a step of a bf16 value by one ulp."""
    rng = np.random.default_rng(seed)
    made: Bits = {}
    for name, tensor in bits.items():
        words = words_of(tensor).copy()
        count = max(1, int(words.size * share))
        words[np.unique(rng.integers(0, words.size, count))] ^= 1
        made[name] = TensorBits(tensor.dtype, tensor.shape, words.view(np.uint8))
    return made


@dataclass
class Server:
    """vLLM's own server on loopback."""

    address: str

    @classmethod
    @contextlib.contextmanager
    def started(
        cls, model: Path, log: Path, *arguments: str, faults: bool = False
    ) -> Iterator["Server"]:
        """`faults` loads the worker extension of `vllm_faults`."""
        python = environment_python()
        assert python is not None
        launch = ["--served-model-name", "m", "--dtype", "bfloat16", "--enforce-eager"]
        launch += ["--max-model-len", "1024", "--max-num-seqs", "8", "--enable-scale-out"]
        launch += ["--worker-extension-cls", "vllm_faults.FaultyWorker"] if faults else []
        environment = {
            **ONE_THREAD,
            "PYTHONPATH": str(Path(__file__).parent),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        (port,) = free_ports(1)
        with VllmProcess.started(
            python, model, port, log=log, arguments=[*launch, *arguments], environment=environment
        ) as process:
            yield cls(process.address)

    def post(self, path: str, body: Any) -> Any:
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(self.address + path, data, headers), timeout=300) as response:
            return json.loads(response.read())

    def greedy(self, prompt: str, tokens: int = 12, **fields: Any) -> dict[str, Any]:
        """Tokens and log-probs of the most likely continuation."""
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "logprobs": 0,
            "ignore_eos": True,
            **fields,
        }
        choice = self.post("/v1/completions", body)["choices"][0]
        logprobs = choice["logprobs"]
        return {"tokens": logprobs["tokens"], "logprobs": logprobs["token_logprobs"]}

    def answers(self, salt: str) -> list[dict[str, Any]]:
        """To all prompts, one after the other, without prefixes of other versions."""
        return [self.greedy(prompt, cache_salt=salt) for prompt in PROMPTS]


@dataclass
class VllmWorld:
    """`versions[v]` are the bits of version v, for the last two; `refs[v]` is its name."""

    folder: Path
    model: Path
    server: Server
    store: MemoryStore = field(default_factory=MemoryStore)
    versions: list[Bits] = field(default_factory=list)
    refs: list[VersionRef] = field(default_factory=list)

    @classmethod
    @contextlib.contextmanager
    def started(
        cls, folder: Path, *arguments: str, model: str = "smollm2"
    ) -> Iterator["VllmWorld"]:
        copy = folder / "model"
        shutil.copytree(prepare_model(model, default_cache()), copy)
        with Server.started(copy, folder / "server.log", *arguments, faults=True) as server:
            world = cls(folder, copy, server)
            world.publisher = Publisher(world.store, RUN)
            world.publish(read_folder(copy))
            world.engine = VllmEngine(HttpClient(server.address))
            world.target = world.new_target("first")
            world.subscriber = Subscriber(world.store, RUN, world.target)
            yield world

    def __post_init__(self) -> None:
        self.publisher: Publisher
        self.engine: VllmEngine
        self.target: EngineTarget
        self.subscriber: Subscriber

    def new_target(self, name: str, **options: Any) -> EngineTarget:
        return EngineTarget(self.engine, self.model, scratch=self.folder / name, **options)

    def publish(self, bits: Bits) -> VersionRef:
        self.versions.append(bits)
        for old in self.versions[:-2]:
            old.clear()
        self.refs.append(self.publisher.publish(bits, step=len(self.refs)))
        return self.refs[-1]

    def publish_change(self, **options: Any) -> VersionRef:
        return self.publish(changed(self.versions[-1], seed=len(self.versions), **options))

    def folder_of(self, version: int) -> Path:
        """A model folder with exactly that version."""
        folder = self.folder / f"version-{version}"
        if not folder.exists():
            folder.mkdir()
            for path in self.model.iterdir():
                if path.is_file() and path.suffix != ".safetensors":
                    shutil.copy(path, folder)
            directory = CheckpointDirectory(folder)
            Subscriber(self.store, RUN, directory).sync(version)
        return folder

    def rpc(self, method: str, *arguments: str) -> Sequence[Any]:
        """Call a method of the worker extension."""
        body = {"method": method, "args": list(arguments)}
        results: list[Any] = self.server.post("/collective_rpc", body)["results"]
        return results
