"""The gateway's process: a listener, and a look at the fleet's records every second."""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

import uvloop

from farcast.errors import FarcastError, FormatError
from farcast.fleet.finding import open_archive
from farcast.fleet.registry import Registry
from farcast.fleet.saying import say
from farcast.fleet.signals import StopRequest
from farcast.gateway.fleet_view import FleetView
from farcast.gateway.listening import Listener, settle_memory
from farcast.gateway.metrics import Traffic
from farcast.gateway.router import Router
from farcast.gateway.tokens import Token
from farcast.gateway.upstream import Upstream
from farcast.store import open_store

LOOK_SECONDS = 1.0
STOP_SECONDS = 0.1
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GatewayOptions:
    """What `farcast gateway` is told."""

    store_url: str
    token: Token
    replica_token: Token
    host: str = "127.0.0.1"
    port: int = 0
    limit: int = 4096
    drain_seconds: float = 120.0
    look_seconds: float = LOOK_SECONDS


def serve_gateway(options: GatewayOptions, stop: StopRequest) -> None:
    """Serve until `stop` is requested, then let those in flight finish."""
    store = open_store(options.store_url)
    run_id = open_archive(store).run_id
    settle_memory()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(options, run_id, Registry(store), stop))


async def _serve(
    options: GatewayOptions, run_id: str, registry: Registry, stop: StopRequest
) -> None:
    fleet, traffic, upstream = FleetView(), Traffic(), Upstream()
    router = Router(
        fleet,
        upstream,
        options.token,
        options.replica_token,
        traffic=traffic,
        limit=options.limit,
    )
    traffic.gauge("farcast_replicas", "Replicas in use.", lambda: float(len(fleet.usable())))
    traffic.gauge("farcast_in_flight", "Requests under way.", lambda: float(router.in_flight))
    listener = Listener(router.handle, options.host, options.port)
    await listener.start()
    say(f"listens on {listener.url} for the replicas of {run_id}")
    looking = asyncio.ensure_future(_look(fleet, registry, options.look_seconds))
    try:
        while not stop.requested:
            if looking.done():
                await looking
            await asyncio.sleep(STOP_SECONDS)
        router.leave()
        say(f"stops after {router.in_flight} requests")
        until = time.monotonic() + options.drain_seconds
        while router.in_flight and time.monotonic() < until:
            await asyncio.sleep(STOP_SECONDS)
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking
        await listener.stop()
        await upstream.close()


async def _look(fleet: FleetView, registry: Registry, seconds: float) -> None:
    """Until cancelled. A store that is away changes nothing; a record that is damaged, or a stray
    file, is left out and logged once."""
    told: set[str] = set()

    def leave_out(key: str, error: FormatError) -> None:
        if key not in told:
            told.add(key)
            _LOG.warning("%s is left out: %s", key, error)

    while True:
        try:
            fleet.update(await asyncio.to_thread(registry.replicas, damaged=leave_out))
        except FarcastError as error:
            if not error.retry:
                raise
            _LOG.warning("The fleet's records could not be read: %s", error)
        await asyncio.sleep(seconds)
