"""How many replicas a run wants, for an autoscaler to ask: `farcast advise`.

    GET /wanted    {"wanted": 5, "serving": 3, ...}    0 once the trainer is done
    GET /metrics   the same for Prometheus
    GET /health    open to everybody; the others ask for the bearer token

Answers from what was last seen, at once, also while the store is away.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import msgspec
import uvloop
from aiohttp import web

from farcast.fleet.advising import Advisor, because
from farcast.fleet.finding import run_in
from farcast.fleet.load import serving_replicas
from farcast.fleet.observe import FleetSnapshot
from farcast.fleet.saying import say
from farcast.fleet.scaling import Limits, Load
from farcast.fleet.signals import StopRequest
from farcast.gateway.listening import Listener, Refused, settle_memory
from farcast.gateway.metrics import Traffic
from farcast.gateway.tokens import Token
from farcast.store import open_store

LOOK_SECONDS = 1.0
STOP_SECONDS = 0.1
_NOTHING = FleetSnapshot(None, (), {}, 0.0)


@dataclass(frozen=True, kw_only=True)
class AdviceOptions:
    """What `farcast advise` is told. Replicas whose names do not begin with `prefix` belong to
    others: they count as there, and are not asked for again."""

    store_url: str
    token: Token
    limits: Limits
    prefix: str = ""
    host: str = "127.0.0.1"
    port: int = 0


class Advice:
    """What was last seen, and what follows from it. Used by one event loop."""

    def __init__(self, advisor: Advisor, limits: Limits, prefix: str) -> None:
        self._advisor = advisor
        self._limits = limits
        self._prefix = prefix
        self._snapshot = _NOTHING

    def look(self) -> None:
        snapshot = self._advisor.look()
        if snapshot is None:
            return
        before, self._snapshot = self.wanted, snapshot
        self._advisor.advise(snapshot)
        if before != self.wanted:
            say(f"{before} -> {self.wanted} replicas: {because(self._load)}")

    @property
    def wanted(self) -> int:
        trainer = self._snapshot.trainer
        if trainer is not None and trainer.state == "done":
            return 0
        serving = serving_replicas(self._snapshot)
        others = sum(not name.startswith(self._prefix) for name in serving)
        return min(max(self._advisor.wanted - others, 0), self._limits.most)

    @property
    def _load(self) -> Load:
        return self._advisor.load or Load(serving=0)

    def figures(self) -> Mapping[str, float]:
        """By the names under which Prometheus gets them, without their prefix `farcast_`."""
        seen, load = self._snapshot, self._load
        lives = [seen.life(name) for name in seen.replicas]
        behind = [seen.staleness(name) or 0 for name in serving_replicas(seen)]
        return {
            "wanted_replicas": self.wanted,
            "serving_replicas": load.serving,
            "dead_replicas": lives.count("dead"),
            "backlog_steps": load.backlog,
            "trainer_waiting_ratio": load.waiting,
            "stale_ratio": load.stale,
            "demand_trajectories_per_second": load.demand,
            "replica_trajectories_per_second": load.throughput,
            "tokens_per_second": seen.tokens_per_second,
            "newest_version": seen.version,
            "staleness_versions": max(behind, default=0),
            "trainer_step": seen.step,
            "trainer_alive": seen.trainer_life == "alive",
        }

    def figure(self, name: str) -> float:
        return float(self.figures()[name])

    def answer(self) -> Mapping[str, object]:
        load = self._load
        return {"wanted": self.wanted, "serving": load.serving, "load": load}


_HELP = {
    "wanted_replicas": "Replicas that the run wants here.",
    "serving_replicas": "Replicas that sample, or would if they might.",
    "dead_replicas": "Replicas not heard of for a minute.",
    "backlog_steps": "Unread trajectories, in steps of the trainer.",
    "trainer_waiting_ratio": "Share of its time that the trainer waited for trajectories.",
    "stale_ratio": "Share of trajectories dropped as too old.",
    "demand_trajectories_per_second": "What the trainer uses while it does not wait.",
    "replica_trajectories_per_second": "What one replica makes while nothing holds it up.",
    "tokens_per_second": "Of all replicas that are alive.",
    "newest_version": "The newest version.",
    "staleness_versions": "Versions that the last serving replica is behind.",
    "trainer_step": "Optimizer steps taken.",
    "trainer_alive": "Whether the trainer was heard of in the last ten seconds.",
}


def serve_advice(options: AdviceOptions, stop: StopRequest) -> None:
    """Serve until `stop` is requested."""
    store = open_store(options.store_url)
    if run_in(store) is None:
        say(f"there is no run in {store.url} yet")
    advice = Advice(Advisor(store, options.limits, tell=say), options.limits, options.prefix)
    advice.look()
    settle_memory()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(options, advice, stop))


async def _serve(options: AdviceOptions, advice: Advice, stop: StopRequest) -> None:
    traffic = Traffic()
    for name, text in _HELP.items():
        traffic.gauge(f"farcast_{name}", text, partial(advice.figure, name))

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        path = request.raw_path
        if path == "/health":
            return web.Response(body=b'{"status":"ok"}', content_type="application/json")
        if not options.token.allows(request.headers.get("Authorization")):
            raise Refused(401, "Unauthorized", "Send the token as a bearer token.")
        if request.method == "GET" and path == "/metrics":
            return web.Response(body=traffic.text(), content_type="text/plain")
        if request.method == "GET" and path == "/wanted":
            body = msgspec.json.encode(advice.answer())
            return web.Response(body=body, content_type="application/json")
        raise Refused(404, "NoSuchRoute", "There are GET /wanted, /metrics and /health.")

    listener = Listener(handle, options.host, options.port)
    await listener.start()
    say(f"listens on {listener.url}")
    looking = asyncio.ensure_future(_look(advice))
    try:
        while not stop.requested:
            if looking.done():
                await looking
            await asyncio.sleep(STOP_SECONDS)
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking
        await listener.stop()


async def _look(advice: Advice) -> None:
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        await asyncio.to_thread(advice.look)
