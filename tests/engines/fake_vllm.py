"""vLLM's routes as far as farcast uses them, before members that run farcast's real worker
extension: for questions about the adapter that need no model. The real server is in tests/vllm.

    update     open in each member apart: one that fails has it ended, the others keep it open
    pause      by `/sleep` at level 0 if it `sleeps` lightly; else by `/pause`, which takes a while
    version    a label of the server's own
"""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from fake_sglang import serving
from group_engine import GroupEngine

from farcast.delta import TensorBits
from farcast.engines.vllm_plugin import residents
from farcast.engines.vllm_plugin.worker import FarcastWorker
from farcast.errors import FarcastError
from farcast.replica import Place

Reply = tuple[int, Any]


class _Member(FarcastWorker):
    """What vLLM's worker is to the extension."""

    def __init__(self, group: GroupEngine, rank: int) -> None:
        self.rank = rank
        self.updating = False
        self.vllm_config = None
        self.model_runner = SimpleNamespace(get_model=lambda: group.shards[rank])
        residents._residents[group.shards[rank]] = group.residents[rank]

    def farcast_attach(self, places: str) -> Any:
        """Without vLLM's configuration around it."""
        wanted = msgspec.json.decode(places, type=dict[str, Place])
        return self._farcast(lambda resident: resident.attach(wanted, {"BF16": torch.bfloat16}))


class FakeVllm:
    """`calls` are the paths in order; `faults` are members whose write fails."""

    def __init__(self, members: int, bits: Mapping[str, TensorBits]) -> None:
        self.group = GroupEngine(members, bits)
        self.members = [_Member(self.group, rank) for rank in range(members)]
        self.faults: set[int] = set()
        self.mute: set[int] = set()
        self.keeps_caches = self.paused = self.sleeps = False
        self.label = "default"
        self.calls: list[str] = []
        self.address = ""
        self._lock = threading.Lock()

    @classmethod
    @contextmanager
    def started(cls, members: int, bits: Mapping[str, TensorBits]) -> Iterator["FakeVllm"]:
        fake = cls(members, bits)
        with serving(fake.reply) as fake.address:
            yield fake

    def reply(self, path: str, body: Any) -> Reply:
        self.calls.append(path)
        if path == "/pause":
            self.paused = True
            time.sleep(0.02)
            return 200, {"status": "paused"}
        if path == "/openapi.json":
            return 200, {"paths": {"/sleep": {"post": {"parameters": self._sleep_parameters()}}}}
        with self._lock:
            return self._utility(path, body)

    def _sleep_parameters(self) -> Any:
        """Before there was a level 0, any number would do."""
        least = {"minimum": 0} if self.sleeps else {}
        return [{"name": "level", "schema": {"type": "integer", **least}}, {"name": "mode"}]

    def _utility(self, path: str, body: Any) -> Reply:
        if path == "/get_world_size":
            return 200, {"world_size": len(self.members)}
        if path == "/collective_rpc":
            return 200, {"results": list(self._rpc(body["method"], body.get("args", [])))}
        if path == "/sleep":
            assert self.sleeps
            self.paused = True
        elif path in ("/resume", "/wake_up"):
            self.paused = False
        elif path == "/reset_prefix_cache":
            return 200, {"success": not self.keeps_caches}
        elif path == "/update_weight_version":
            self.label = body["new_version"]
        elif path == "/weight_info":
            return 200, {"weight_version": self.label}
        elif path in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
            return self._update(path, body)
        return 200, {}

    def _rpc(self, method: str, arguments: list[str]) -> Iterator[Any]:
        for member in self.members:
            if member.rank not in self.mute:
                yield json.loads(json.dumps(getattr(member, method)(*arguments)))

    def _update(self, path: str, body: Any) -> Reply:
        failed = [m.rank for m in self.members if not self._step(m, path, body)]
        return (500, {"error": {"message": f"Workers {failed} failed"}}) if failed else (200, {})

    def _step(self, member: _Member, path: str, body: Any) -> bool:
        if path == "/update_weights":
            try:
                if member.rank in self.faults:
                    raise OSError
                self.group.residents[member.rank].write(body["update_info"]["label"])
            except (FarcastError, OSError):
                member.updating = False
                return False
            return True
        starts = path == "/start_weight_update"
        if member.updating == starts:
            return False
        member.updating = starts
        return True
