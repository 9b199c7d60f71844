"""vLLM's server as an engine whose weights are changed in place.

It has to be started with `VLLM_SERVER_DEV_MODE=1` and `launch_arguments()`: vLLM itself is left
as it is, farcast comes in through its plug-in (`farcast.engines.vllm_plugin`). Its development
routes let anybody who reaches them change weights, so the server must listen on loopback or on a
Unix socket, with farcast's sidecar before it.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from farcast import errors
from farcast.engines.http_client import HttpClient
from farcast.engines.http_engine import MemberLayout, Receipt, Whole, label_of
from farcast.engines.vllm_plugin import BACKEND, EXTENSION
from farcast.errors import EngineRefusedError, FarcastError, TargetUncertainError
from farcast.replica import Place
from farcast.types import VersionRef

_Answer = TypeVar("_Answer")

_FIRST_POLL, _LONGEST_POLL = 0.005, 0.1


def launch_arguments() -> tuple[str, ...]:
    """What `vllm serve` needs beside the model for farcast to come in."""
    return (
        "--weight-transfer-config",
        f'{{"backend": "{BACKEND}"}}',
        "--worker-extension-cls",
        EXTENSION,
    )


LAUNCH_ENVIRONMENT: Mapping[str, str] = {"VLLM_SERVER_DEV_MODE": "1"}


class VllmEngine:
    """The server at `address`. `stage_timeout` bounds one staging, `client`'s own every call."""

    name = "vllm"
    salt_field = "cache_salt"
    guarded_routes: tuple[str, ...] = (
        "/abort_requests",
        "/collective_rpc",
        "/finish_weight_update",
        "/init_weight_transfer_engine",
        "/is_paused",
        "/pause",
        "/reset_",
        "/resume",
        "/scale_elastic_ep",
        "/server_info",
        "/shutdown_weight_transfer_engine",
        "/sleep",
        "/start_draft_weight_update",
        "/start_weight_update",
        "/update_weight_version",
        "/update_weights",
        "/wake_up",
        "/weight_checker",
    )

    def __init__(self, client: HttpClient, *, stage_timeout: float = 600.0) -> None:
        self._client = client
        self._stage_timeout = stage_timeout
        self._members: int | None = None
        self._updating = False
        self._sleeps = False

    # --- any engine --------------------------------------------------------------------------

    def check_health(self) -> None:
        self._client.get("/health")

    def pause(self) -> None:
        """Returns once the last step's tokens were labelled, so that the next label is of what is
        computed after it. `sleep` at level 0 is vLLM's pause without the 20 ms that `/pause` adds
        to its answer for the callers' convenience; servers without it are paused as they can."""
        if self._sleeps:
            self._client.post("/sleep", query={"level": "0", "mode": "keep"})
        else:
            self._client.post("/pause", query={"mode": "keep", "clear_cache": "false"})

    def resume(self) -> None:
        if self._sleeps:
            self._client.post("/wake_up", query={"tags": "scheduling"})
        else:
            self._client.post("/resume")

    def _knows_light_sleep(self) -> bool:
        """Told by the server's own description: elsewhere level 0 may mean anything."""
        try:
            described = self._client.get("/openapi.json")
            given = described["paths"]["/sleep"]["post"]["parameters"]
            level = next(one["schema"] for one in given if one["name"] == "level")
            return level["minimum"] == 0 and any(one["name"] == "mode" for one in given)
        except (EngineRefusedError, KeyError, TypeError, StopIteration):
            return False

    def drop_caches(self) -> bool:
        answer = self._client.post("/reset_prefix_cache", query={"reset_running_requests": "true"})
        return isinstance(answer, dict) and answer.get("success") is True

    def label(self) -> str:
        answer = self._client.get("/weight_info")
        return str(answer.get("weight_version", "")) if isinstance(answer, dict) else ""

    def salt(self, ref: VersionRef) -> Mapping[str, Any]:
        return {self.salt_field: label_of(ref)}

    # --- in place ----------------------------------------------------------------------------

    def attach(self, places: Mapping[str, Place]) -> Sequence[MemberLayout]:
        world = self._client.get("/get_world_size")
        self._members = int(world["world_size"])
        self._sleeps = self._knows_light_sleep()
        self._updating = False  # it may be another process, or we may be
        text = msgspec.json.encode(dict(places)).decode()
        return self._all("farcast_attach", [text], MemberLayout)

    def stage(self, words: Path, digest: str, label: str, whole: Whole | None = None) -> None:
        rest = msgspec.json.encode(whole).decode()
        self._all("farcast_stage", [str(words), digest, label, rest], None)
        wait, until = _FIRST_POLL, time.monotonic() + self._stage_timeout
        while "busy" in self._all("farcast_stage_state", [label], str):
            if time.monotonic() > until:
                raise EngineRefusedError("The engine did not finish staging in time; restart it.")
            time.sleep(wait)
            wait = min(_LONGEST_POLL, wait * 1.5)

    def open_update(self) -> None:
        if self._updating:
            return
        try:
            self._client.post("/start_weight_update")
        except EngineRefusedError:  # a sidecar that died in a commit left one open
            with contextlib.suppress(EngineRefusedError):
                self._client.post("/finish_weight_update")
            self._client.post("/start_weight_update")
        self._updating = True

    def close_update(self) -> None:
        # farcast's transfer engine has nothing to finish, so vLLM's bookkeeping can wait until
        # the engine goes on: a call less in the pause.
        if self._updating:
            self._client.post("/finish_weight_update")
            self._updating = False

    def write(self, label: str) -> None:
        try:
            self._client.post("/update_weights", {"update_info": {"label": label}})
        except EngineRefusedError:
            # vLLM ends the update in the members that failed and leaves it open in the others.
            with contextlib.suppress(EngineRefusedError):
                self.close_update()
            self._updating = False
            self._all("farcast_failure", [], None)
            raise

    def undo(self, label: str) -> None:
        self._all("farcast_undo", [label], None)

    def name_weights(self, label: str) -> None:
        self._client.post("/update_weight_version", {"new_version": label})

    def drop(self, label: str) -> None:
        self._all("farcast_drop", [label], None)

    def receipts(self, names: Sequence[str] = ()) -> Sequence[Receipt]:
        return self._all("farcast_receipt", [msgspec.json.encode(list(names)).decode()], Receipt)

    # --- inside ------------------------------------------------------------------------------

    def _all(self, method: str, arguments: list[str], kind: type[_Answer] | None) -> list[_Answer]:
        """Every member's answer. Raises the first refusal, `TargetUncertainError` before others;
        and `EngineRefusedError` unless exactly the expected members answered."""
        answer = self._client.post("/collective_rpc", {"method": method, "args": arguments})
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list) or not all(isinstance(r, dict) for r in results):
            raise EngineRefusedError(
                f"The engine did not answer {method} as farcast's worker extension does; start it "
                f"with --worker-extension-cls {EXTENSION}."
            )
        members = sorted(result.get("member", -1) for result in results)
        if members != list(range(self._members or len(members))):
            raise EngineRefusedError(
                f"Members {members} of {self._members} answered {method}; replace the engine."
            )
        failures = [_error_of(result) for result in results if "error" in result]
        if failures:
            raise max(failures, key=lambda error: isinstance(error, TargetUncertainError))
        if kind is None:
            return []
        return [msgspec.convert(result["answer"], kind, strict=False) for result in results]


def _error_of(result: Mapping[str, Any]) -> FarcastError:
    """A member's error, of the class it had there."""
    kind = getattr(errors, str(result["error"]), None)
    message = f"Member {result.get('member')}: {result.get('message')}"
    if isinstance(kind, type) and issubclass(kind, FarcastError):
        return kind(message)
    return EngineRefusedError(message)
