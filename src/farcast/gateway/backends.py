"""Which engine a sidecar stands before: how it is driven, and how it takes a version."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from farcast.engines.folder_engine import EngineFolder
from farcast.engines.http_client import HttpClient
from farcast.engines.http_engine import HttpEngine
from farcast.engines.live_engine import EngineTarget
from farcast.engines.plain_http import PlainEngine
from farcast.engines.sglang_engine import SglangEngine
from farcast.engines.vllm_engine import VllmEngine
from farcast.errors import ConfigError
from farcast.gateway.routes import EngineKind
from farcast.gateway.sidecar_options import Caches
from farcast.replica import Target


class Backend(NamedTuple):
    """`adopt` makes an engine hold what its target holds already; for the reconciler's thread."""

    kind: EngineKind
    engine: HttpEngine
    target: Target
    adopt: Callable[[], object]


def open_backend(
    kind: EngineKind,
    address: str,
    model: Path,
    *,
    caches: Caches,
    engine_token: str | None,
    scratch: Path | None,
) -> Backend:
    """The engine at `address`, which was started with the folder `model`."""
    if not model.is_dir():
        raise ConfigError(
            f"There is no folder {model}; --model names the folder that the engine was started "
            "with."
        )
    client = HttpClient(address, token=engine_token)
    if kind == "vllm":
        live = VllmEngine(client)
        target = EngineTarget(
            live,
            model,
            scratch=scratch or _scratch_of(model, address),
            caches="dropped" if caches == "flush" else "salted",
        )
        return Backend(kind, live, target, adopt=lambda: None)
    reloading = (
        SglangEngine(client, pause="in_place" if caches == "salt" else "retract")
        if kind == "sglang"
        else PlainEngine(client)
    )
    folder = EngineFolder(reloading, model, drops_caches=caches == "flush")
    return Backend(kind, reloading, folder, adopt=folder.adopt)


def _scratch_of(model: Path, address: str) -> Path:
    """A folder of this engine's own, the same after a restart: what it mirrors is known again."""
    name = hashlib.sha256(f"{model.absolute()}\0{address}".encode()).hexdigest()[:16]
    return Path.home() / ".cache" / "farcast" / "engines" / name
