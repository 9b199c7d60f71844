"""What a sidecar is told. Imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from farcast.engines.admission import Mode
from farcast.fleet.connecting import Reach
from farcast.gateway.routes import EngineKind
from farcast.gateway.tokens import Token

Caches = Literal["salt", "flush"]
"""How cached prefixes are kept from crossing versions: each request is salted with its version,
or the engine drops them at each commit and confirms it."""


@dataclass(frozen=True, kw_only=True)
class SidecarOptions:
    """What `farcast replica --engine` is told."""

    kind: EngineKind
    engine_url: str
    model: Path
    reach: Reach
    replica_id: str
    token: Token
    engine_token: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    mode: Mode = "in_place"
    caches: Caches = "salt"
    limit: int = 256
    drain_seconds: float = 120.0
    engine_seconds: float = 600.0
    poll_seconds: float = 1.0
    scratch: Path | None = None
