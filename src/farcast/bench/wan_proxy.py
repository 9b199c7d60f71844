"""A TCP proxy that makes a near server far: bytes arrive later, and no faster than a rate.

A connection costs a round trip before its first byte, as a handshake does; every byte then takes
half a round trip each way. With a rate, all connections share it, each direction for itself, in
turns of `CHUNK` bytes. Nothing is lost or reordered: TCP below would hide that, at the price of
time. Refuses to look at what it carries.

    python -m farcast.bench.wan_proxy '{"port": 1, "host": "127.0.0.1", ...}'
"""

import asyncio
import contextlib
import sys
import time

import msgspec

from farcast.fleet.launcher import leave_with_parent

CHUNK = 4096
"""Bytes that a connection sends in its turn: some packets, so that a small answer passes between
the pieces of a large one as on a router that serves flows in turn."""

_UNLIMITED_CHUNK = 1 << 16


class ProxySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Listens on 127.0.0.1:`port` for a server at `host`:`to`. `delay` is one way, in seconds;
    `rate` in bytes per second, 0 for none of its own."""

    port: int
    host: str
    to: int
    delay: float
    rate: float


class Direction:
    """One way of the link; bytes of all connections pass one after the other."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free = 0.0

    def through(self, size: int, now: float) -> float:
        """When `size` bytes that come now have left."""
        if not self._rate:
            return now
        self._free = max(self._free, now) + size / self._rate
        return self._free


async def serve(settings: ProxySettings) -> None:
    """Carry connections until cancelled."""
    up, down = Direction(settings.rate), Direction(settings.rate)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2 * settings.delay)
        try:
            far_reader, far_writer = await asyncio.open_connection(settings.host, settings.to)
        except OSError:
            writer.close()
            return
        await asyncio.gather(
            _carry(reader, far_writer, up, settings), _carry(far_reader, writer, down, settings)
        )

    server = await asyncio.start_server(connected, "127.0.0.1", settings.port)
    async with server:
        print("ready", flush=True)
        await server.serve_forever()


async def _carry(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    direction: Direction,
    settings: ProxySettings,
) -> None:
    """Read, note when it has left, and let another task write it when it arrives."""
    underway: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
    arriving = asyncio.create_task(_deliver(underway, writer))
    size = CHUNK if settings.rate else _UNLIMITED_CHUNK
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(size):
            left = direction.through(len(data), time.monotonic())
            underway.put_nowait((left + settings.delay, data))
            await asyncio.sleep(left - time.monotonic())
    underway.put_nowait((time.monotonic() + settings.delay, b""))
    await arriving


async def _deliver(
    underway: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter
) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            arrival, data = await underway.get()
            await asyncio.sleep(arrival - time.monotonic())
            if not data:
                break
            writer.write(data)
            await writer.drain()
    writer.close()


def main() -> None:
    leave_with_parent()
    settings = msgspec.json.decode(sys.argv[1], type=ProxySettings)
    asyncio.run(serve(settings))


if __name__ == "__main__":
    main()
