"""A relay's HTTP side.

    GET /objects/<digest>    200  the object, hashed as it goes; its last part is held back until
                                  the hash is right, so nobody gets a whole answer that is wrong:
                                  the connection is closed before its end
                             202  it is on its way here: ask again
                             404  the store has no such object, or that is no digest
                             413  it is over the limit for objects
                             502  the store does not give it; the asker may have more luck
                             503  too many ask at once
    GET /health              200  open to everybody
    GET /metrics                  for Prometheus

All but /health ask for the bearer token. Refuses ranges, since a part has no digest, and anything
but objects: a manifest says what is newest, and that is asked of the store itself.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web
from blake3 import blake3

from farcast.errors import FarcastError, LimitError, ObjectNotFoundError
from farcast.gateway.listening import Refused, begin, counted, end, send
from farcast.gateway.metrics import Traffic
from farcast.gateway.tokens import Token
from farcast.relay.cache import Held, ObjectCache, is_digest
from farcast.relay.fetching import Fetcher, Tally

WAIT_SECONDS = 10.0
"""An asker hears this often that its object is still on its way: silence means that we are gone."""

CHUNK_BYTES = 1 << 20
MAX_FLIGHTS = 256
TRIES = 4
"""An object may go for others between its coming and its being read."""

_OBJECTS = "/objects/"


class Relay:
    """Answers requests, in one event loop."""

    def __init__(
        self,
        cache: ObjectCache,
        fetcher: Fetcher,
        tally: Tally,
        token: Token,
        *,
        traffic: Traffic,
        limit: int,
        tell: Callable[[str], None],
    ) -> None:
        self._cache = cache
        self._fetcher = fetcher
        self._tally = tally
        self._token = token
        self._traffic = traffic
        self._limit = limit
        self._tell = tell
        self._leaving = False
        self.in_flight = 0

    def leave(self) -> None:
        """Let nothing more in."""
        self._leaving = True

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.raw_path
        if path == "/health":
            return web.Response(body=b'{"status":"ok"}', content_type="application/json")
        if not self._token.allows(request.headers.get("Authorization")):
            raise Refused(401, "Unauthorized", "Send the relay's token as a bearer token.")
        if path == "/metrics":
            return web.Response(body=self._traffic.text(), content_type="text/plain")
        digest = path.removeprefix(_OBJECTS)
        if request.method != "GET" or not path.startswith(_OBJECTS) or not is_digest(digest):
            raise Refused(404, "NoSuchRoute", "This relay only has GET /objects/<digest>.")
        if self._leaving or self.in_flight >= self._limit:
            kind = "Leaving" if self._leaving else "Full"
            raise Refused(503, kind, "This relay takes no more; try again.", retry_after=1)
        self.in_flight += 1
        try:
            return await counted(self._traffic, "/objects", self._object(request, digest))
        finally:
            self.in_flight -= 1

    async def _object(self, request: web.BaseRequest, digest: str) -> web.StreamResponse:
        self._tally.asked += 1
        came = False
        for _ in range(TRIES):
            held = await asyncio.to_thread(self._cache.open, digest)
            if held is not None:
                answer = await self._pass_on(request, digest, held)
                if answer is not None:
                    self._tally.from_disk += not came
                    return answer
            if self._fetcher.under_way >= MAX_FLIGHTS:
                break
            flight, came = self._fetcher.flight(digest), True
            landed, _ = await asyncio.wait([flight], timeout=WAIT_SECONDS)
            if not landed:
                return web.Response(status=202, headers={"Retry-After": "0"})
            try:
                data = flight.result()
            except FarcastError as error:
                raise _refusal(error) from error
            if data is not None:
                self._tally.bytes_out += len(data)
                return web.Response(body=data, content_type="application/octet-stream")
        raise Refused(503, "Full", "Too many objects are asked for at once.", retry_after=1)

    async def _pass_on(
        self, request: web.BaseRequest, digest: str, held: Held
    ) -> web.StreamResponse | None:
        """None where it was found damaged before anything of it had left."""
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(held.size)}
        response = web.StreamResponse(headers=headers)
        try:
            last = b""
            async for chunk in _hashed(held, digest):
                if last:
                    await _send(request, response, last)
                last = chunk
            await _send(request, response, last)
            await end(response)
        except (OSError, _DamagedError):
            self._tell(f"{digest[:12]} is damaged on the disk, and fetched anew when asked for")
            await asyncio.to_thread(self._cache.drop_damaged, digest, held)
            if not response.prepared:
                return None
            request.protocol.force_close()  # without its last part: it is not whole
        else:
            self._tally.bytes_out += held.size
        finally:
            os.close(held.descriptor)
        return response


async def _send(request: web.BaseRequest, response: web.StreamResponse, data: bytes) -> None:
    if not response.prepared:
        await begin(request, response)
    if data:
        await send(request, response, data)


async def _hashed(held: Held, digest: str) -> AsyncIterator[bytes]:
    """The object in parts; raises `_DamagedError` at the end if they are not what it names."""
    hasher, offset = blake3(), 0
    while offset < held.size:
        chunk = await asyncio.to_thread(_read, held.descriptor, offset, hasher)
        if not chunk:
            break
        offset += len(chunk)
        yield chunk
    if offset != held.size or hasher.hexdigest() != digest:
        raise _DamagedError


class _DamagedError(Exception):
    pass


def _read(descriptor: int, offset: int, hasher: Any) -> bytes:
    chunk = os.pread(descriptor, CHUNK_BYTES, offset)
    hasher.update(chunk)
    return chunk


def _refusal(error: FarcastError) -> Refused:
    """What the store said, without its words: they name places that are not the asker's."""
    if isinstance(error, ObjectNotFoundError):
        return Refused(404, "NoObject", "The store has no such object.")
    if isinstance(error, LimitError):
        return Refused(413, "TooLarge", "The object is over the limit.")
    return Refused(502, "Store", f"The store does not give it ({type(error).__name__}).")
