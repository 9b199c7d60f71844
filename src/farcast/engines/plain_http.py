"""Any server that can read a checkpoint folder again, through six small routes.

    GET  /health                                    200 when it can serve
    POST /pause, /resume                            between two token steps; safe to repeat
    POST /reload_weights  {"path", "label"}         load the folder; 200 when it is live
    POST /reset_prefix_cache                        {"success": true}
    GET  /weight_version                            {"weight_version": label of what generates now}
    GET  /weight_sample?name=&length=               {"values": [...]}, or 404 if it can't tell

An engine that also reports `weight_versions` with each choice of `/generate` (spans of output
tokens by label, as vLLM does) lets a commit fall into its answers.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from farcast.engines.http_client import HttpClient
from farcast.engines.http_engine import label_of
from farcast.errors import EngineRefusedError
from farcast.types import VersionRef


class PlainEngine:
    """The server that `client` talks to."""

    name = "http"
    salt_field = "cache_salt"
    guarded_routes: tuple[str, ...] = (
        "/pause",
        "/resume",
        "/reload_weights",
        "/reset_prefix_cache",
    )

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    def check_health(self) -> None:
        self._client.get("/health")

    def pause(self) -> None:
        self._client.post("/pause")

    def resume(self) -> None:
        self._client.post("/resume")

    def drop_caches(self) -> bool:
        answer = self._client.post("/reset_prefix_cache")
        return isinstance(answer, dict) and answer.get("success") is True

    def label(self) -> str:
        answer = self._client.get("/weight_version")
        return str(answer.get("weight_version", "")) if isinstance(answer, dict) else ""

    def salt(self, ref: VersionRef) -> Mapping[str, Any]:
        return {self.salt_field: label_of(ref)}

    def reload(self, folder: Path, label: str) -> None:
        self._client.post("/reload_weights", {"path": str(folder), "label": label})

    def sample(self, name: str, length: int) -> Sequence[float] | None:
        query = urlencode({"name": name, "length": length})
        try:
            answer = self._client.get(f"/weight_sample?{query}")
        except EngineRefusedError:
            return None
        values = answer.get("values") if isinstance(answer, dict) else None
        if not isinstance(values, list) or not all(isinstance(v, int | float) for v in values):
            raise EngineRefusedError(
                f"The engine's sample of {name[:80]!r} is no list of numbers; correct that route."
            )
        return values
