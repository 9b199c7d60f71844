"""A relay's process: a listener before a cache, and what it counts."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop

from farcast.config import LinkConfig
from farcast.fleet.claim import claimed
from farcast.fleet.connecting import Reach
from farcast.fleet.finding import run_in
from farcast.fleet.saying import say
from farcast.fleet.signals import StopRequest
from farcast.gateway.listening import Listener, settle_memory
from farcast.gateway.metrics import Traffic
from farcast.gateway.tokens import Token
from farcast.relay.cache import ObjectCache, check_folder
from farcast.relay.fetching import Fetcher, Tally
from farcast.relay.serving import Relay
from farcast.store import Store

STOP_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class RelayOptions:
    """What `farcast relay` is told. `size` is the cache's limit in bytes; `workers` bounds the
    objects that are read from the store at once."""

    store_url: str
    folder: Path
    token: Token
    size: int
    host: str = "127.0.0.1"
    port: int = 0
    workers: int = 4
    limit: int = 1024
    drain_seconds: float = 120.0
    link: LinkConfig | None = None


def serve_relay(options: RelayOptions, stop: StopRequest) -> None:
    """Serve until `stop` is requested, then let those in flight finish."""
    store = Reach(store_url=options.store_url, link=options.link).open()
    if run_in(store) is None:
        say(f"there is no run in {store.url} yet")
    check_folder(options.folder)
    with claimed(options.folder / "lock", "relay"):
        cache = ObjectCache(options.folder, options.size)
        settle_memory()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(options, store, cache, stop))


async def _serve(
    options: RelayOptions, store: Store, cache: ObjectCache, stop: StopRequest
) -> None:
    tally, traffic = Tally(), Traffic()
    fetcher = Fetcher(store, cache, tally, workers=options.workers, tell=say)
    relay = Relay(
        cache,
        fetcher,
        tally,
        options.token,
        traffic=traffic,
        limit=options.limit,
        tell=say,
    )
    _show(traffic, tally, cache, fetcher)
    listener = Listener(relay.handle, options.host, options.port)
    await listener.start()
    say(f"listens on {listener.url} with {len(cache)} objects at hand")
    if cache.damaged:
        say(f"{cache.damaged} objects were cut on the disk, and are fetched anew when asked for")
    try:
        while not stop.requested:
            await asyncio.sleep(STOP_SECONDS)
        relay.leave()
        say(f"stops after {relay.in_flight} requests")
        until = time.monotonic() + options.drain_seconds
        while relay.in_flight and time.monotonic() < until:
            await asyncio.sleep(STOP_SECONDS)
    finally:
        await listener.stop()
    say(
        f"gave {tally.asked} objects ({tally.bytes_out} bytes) for {tally.reads} reads of the "
        f"store ({tally.bytes_in} bytes)"
    )


def _show(traffic: Traffic, tally: Tally, cache: ObjectCache, fetcher: Fetcher) -> None:
    count, gauge = traffic.count, traffic.gauge
    count("farcast_relay_asked", "Objects asked for.", lambda: tally.asked)
    count("farcast_relay_from_disk", "Answered from the disk.", lambda: tally.from_disk)
    count("farcast_relay_store_reads", "Objects read from the store.", lambda: tally.reads)
    count("farcast_relay_store_failures", "Reads without an object.", lambda: tally.failed)
    count("farcast_relay_store_bytes", "Bytes read from the store.", lambda: tally.bytes_in)
    count("farcast_relay_sent_bytes", "Bytes given to neighbours.", lambda: tally.bytes_out)
    count("farcast_relay_unkept", "Passed on without being kept.", lambda: tally.unkept)
    count("farcast_relay_damaged", "Found damaged on the disk.", lambda: cache.damaged)
    count("farcast_relay_evicted", "Gone for others.", lambda: cache.evicted)
    gauge("farcast_relay_bytes", "Bytes on the disk.", lambda: float(cache.held_bytes))
    gauge("farcast_relay_objects", "Objects on the disk.", lambda: float(len(cache)))
    gauge("farcast_relay_flights", "Reads under way.", lambda: float(fetcher.under_way))
