"""SGLang's server as an engine that reads a checkpoint folder again.

SGLang takes single tensors only as pickled bytes (`/update_weights_from_tensor`, also where a
`--custom-weight-loader` receives them), and farcast pickles nothing, so versions go through the
folder: synced while the engine serves, loaded in a pause. Written to SGLang's published routes and
tested against a fake of them: there is no build of SGLang for a machine without an accelerator.

Started with `--api-key` and `--admin-api-key` or on loopback only: these routes change weights.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from farcast.engines.http_client import HttpClient
from farcast.engines.http_engine import label_of
from farcast.errors import EngineRefusedError
from farcast.types import VersionRef

Pause = Literal["in_place", "retract"]
"""What becomes of requests in flight: `in_place` goes on with the keys and values of the old
version, `retract` computes them anew. SGLang drops cached prefixes only with `retract`."""


class SglangEngine:
    """The server that `client` talks to."""

    name = "sglang"
    salt_field = "extra_key"
    guarded_routes: tuple[str, ...] = (
        "/abort_request",
        "/check_weights",
        "/clear_hicache",
        "/close_session",
        "/configure_logging",
        "/continue_generation",
        "/destroy_weights_update_group",
        "/dump_",
        "/flush_cache",
        "/freeze_gc",
        "/get_weights_by_name",
        "/init_weights_",
        "/load_lora_adapter",
        "/open_session",
        "/pause_generation",
        "/post_process_weights",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/send_weights_",
        "/set_internal_state",
        "/slow_down",
        "/start_",
        "/stop_",
        "/unload_lora_adapter",
        "/update_weight",
    )

    def __init__(self, client: HttpClient, *, pause: Pause = "retract") -> None:
        self._client = client
        self._pause = pause

    def check_health(self) -> None:
        self._client.get("/health")

    def pause(self) -> None:
        self._client.post("/pause_generation", {"mode": self._pause})

    def resume(self) -> None:
        self._client.post("/continue_generation", {})

    def drop_caches(self) -> bool:
        try:
            self._client.post("/flush_cache")
        except EngineRefusedError:  # 400 while requests hold the cache
            return False
        return True

    def label(self) -> str:
        answer = self._client.get("/get_weight_version")
        return str(answer.get("weight_version", "")) if isinstance(answer, dict) else ""

    def salt(self, ref: VersionRef) -> Mapping[str, Any]:
        return {self.salt_field: label_of(ref)}

    def reload(self, folder: Path, label: str) -> None:
        body = {
            "model_path": str(folder),
            "weight_version": label,
            "abort_all_requests": False,
            "keep_pause": True,
            # Asked for apart, since its failure would count as one of the load.
            "flush_cache": False,
        }
        answer = self._client.post("/update_weights_from_disk", body)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise EngineRefusedError(
                "SGLang did not confirm that it loaded the folder; look into its log."
            )

    def sample(self, name: str, length: int) -> Sequence[float] | None:
        # It counts rows, and says how wide they are only by giving one.
        width = len(_flat(self._rows(name, 1)) or ())
        if not width:
            return None
        values = _flat(self._rows(name, math.ceil(length / width)))
        return None if values is None else values[:length]

    def _rows(self, name: str, count: int) -> Any:
        try:
            return self._client.post("/get_weights_by_name", {"name": name, "truncate_size": count})
        except EngineRefusedError:  # not every model can tell
            return None


def _flat(rows: Any) -> list[float] | None:
    """Numbers row by row; None if these are none."""
    if isinstance(rows, list):
        flat: list[float] = []
        for row in rows:
            values = [row] if isinstance(row, int | float) else _flat(row)
            if values is None:
                return None
            flat += values
        return flat
    return None
