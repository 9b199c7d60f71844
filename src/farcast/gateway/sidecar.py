"""The sidecar's HTTP side: in front of one engine, behind one gate.

What happens to a request that generates:

    the token, the route                     401, 404
    the body, what version it asks for       400, 408, 413
    the gate: the version captured           409 + Retry-After; 503 when full or not ready
    salted, passed on to the engine          503 when the engine is gone; 502 when it went with
                                             the request in its hands, which may be why
    the answer, with who wrote it            whatever the engine answered

Refuses to pass on a path or a query that a client wrote: only what `routes` has.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from farcast.engines.admission import AdmissionGate, Constraint, NotAdmittedError, Ticket
from farcast.errors import IntegrityError
from farcast.gateway import provenance
from farcast.gateway.bodies import Fields, join, salted, split, with_field
from farcast.gateway.constraint import FIELD, HEADER, constraint_of
from farcast.gateway.listening import Refused, begin, counted, end, read_body, send
from farcast.gateway.metrics import Traffic
from farcast.gateway.provenance import Provenance, Reported
from farcast.gateway.routes import Route, Table
from farcast.gateway.streams import MEDIA_TYPE, EventRelay
from farcast.gateway.tokens import Token
from farcast.gateway.upstream import (
    BrokenOffError,
    Failure,
    UnreachableError,
    Upstream,
    read_answer,
)
from farcast.types import VersionRef

_LOG = logging.getLogger(__name__)

HOLD_SECONDS = 30.0
"""How long a request waits at the gate for a commit to pass."""

RETRY_VERSION = 1
RETRY_FULL = 1
RETRY_DOWN = 5
"""Seconds, as `Retry-After`."""

_PASSED_ON = ("X-Request-Id", "traceparent")


_EXPECTED = (NotAdmittedError, IntegrityError, UnreachableError, *Failure)


class _Said(NamedTuple):
    """What every answer of one version carries, made once."""

    ref: VersionRef
    headers: Mapping[str, str]
    field: bytes


class Sidecar:
    """Answers requests, in one event loop. `suspect` is called when the engine did not behave:
    somebody has to look at it before more is served. `salts`: whether cached prefixes are kept
    apart by the version in each request, or the engine forgets them at each commit."""

    def __init__(
        self,
        gate: AdmissionGate,
        upstream: Upstream,
        engine_url: str,
        routes: Table,
        token: Token,
        *,
        engine_token: str | None,
        traffic: Traffic,
        salts: bool,
        suspect: Callable[[str], None],
        describe: Callable[[], Mapping[str, object]],
    ) -> None:
        self._gate = gate
        self._upstream = upstream
        self._routes = routes
        self._urls = {route: URL(engine_url.rstrip("/") + route.path) for route in routes.values()}
        self._token = token
        self._engine_headers = {"Content-Type": "application/json"}
        if engine_token is not None:
            self._engine_headers["Authorization"] = f"Bearer {engine_token}"
        self._traffic = traffic
        self._salts = salts
        self._suspect = suspect
        self._describe = describe
        self._life = secrets.token_hex(4)
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._said: _Said | None = None
        self._own: dict[str, Callable[[], web.Response]] = {
            "/health": self._health,
            "/ready": self._ready,
        }

    def gate_changed(self) -> None:
        """Call from any thread when those that wait at the gate should ask again."""
        self._loop.call_soon_threadsafe(self._wake)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.raw_path
        own = self._own.get(path)
        if own is not None:
            return own()
        if not self._token.allows(request.headers.get("Authorization")):
            raise Refused(401, "Unauthorized", "Send the replica's token as a bearer token.")
        if path == "/metrics":
            return web.Response(body=self._traffic.text(), content_type="text/plain")
        route = self._routes.get((request.method, path.partition("?")[0]))
        if route is None:
            raise Refused(404, "NoSuchRoute", f"This replica has no {request.method} {path[:80]}.")
        work = self._generate if route.generates else self._pass
        return await counted(self._traffic, route.path, work(request, route))

    # --- a request ---------------------------------------------------------------------------

    async def _pass(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        """A route that generates nothing."""
        body = await read_body(request) if route.method == "POST" else None
        try:
            async with self._upstream.ask(
                route.method, self._urls[route], body, self._headers(request)
            ) as answer:
                data = await read_answer(answer)
        except (UnreachableError, *Failure) as error:
            raise self._refusal(error) from error
        return web.Response(body=data, status=answer.status, headers=_type_of(answer))

    async def _generate(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        fields = split(await read_body(request))
        constraint = constraint_of(fields.pop(FIELD, None), request.headers.get(HEADER))
        visit = _Visit(self._gate, self._hold, self._loop)
        try:
            ticket = await visit.enter(constraint, crosses=route.tells_spans)
            return await self._serve(request, route, fields, visit, ticket)
        except (*_EXPECTED, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not visit.was_cut():
                raise  # the client has left
            refused = self._refusal(error)
            if visit.response is None:
                raise refused from error
            visit.abandon()  # a client that does not read must not hold up a commit any longer
            await _break_off(request, visit.response, refused)
            return visit.response
        finally:
            visit.abandon()

    async def _serve(
        self,
        request: web.BaseRequest,
        route: Route,
        fields: Fields,
        visit: "_Visit",
        ticket: Ticket,
    ) -> web.StreamResponse:
        if self._salts and route.salt is not None:
            salted(fields, route.salt, self._salt(ticket))
        async with self._upstream.ask(
            "POST", self._urls[route], join(fields), self._headers(request)
        ) as answer:
            if answer.content_type == MEDIA_TYPE:
                return await self._relay(request, answer, visit, ticket)
            data = await read_answer(answer)
        reported = provenance.reported_spans(data)
        said = await visit.leave(ticket, reported)
        if said is None:
            kept = self._kept(ticket.ref)
            headers, field = kept.headers, kept.field
        else:
            headers, field = provenance.headers(said), provenance.encode(said)
        if answer.content_type == "application/json":
            data = with_field(data, provenance.FIELD, field)
        return web.Response(
            body=data, status=answer.status, headers={**headers, **_type_of(answer)}
        )

    async def _relay(
        self,
        request: web.BaseRequest,
        answer: aiohttp.ClientResponse,
        visit: "_Visit",
        ticket: Ticket,
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            status=answer.status,
            headers={**provenance.start_headers(ticket.ref), **_type_of(answer)},
        )
        await begin(request, response)
        visit.response = response
        events = EventRelay()
        async for chunk in answer.content.iter_any():
            ready = events.push(chunk)
            if ready:
                await send(request, response, ready)
        said = await visit.leave(ticket, events.reported)
        said = said or provenance.single(ticket.ref)
        await send(request, response, events.finish(said))
        await end(response)
        return response

    # --- inside ------------------------------------------------------------------------------

    async def _hold(self, since: float) -> bool:
        """Wait for the gate to change; False once it took too long."""
        left = HOLD_SECONDS - (self._loop.time() - since)
        if left <= 0:
            return False
        try:
            await asyncio.wait_for(self._changed.wait(), left)
        except TimeoutError:
            return False
        return True

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _headers(self, request: web.BaseRequest) -> Mapping[str, str]:
        """What goes on to the engine: never the client's token."""
        given = request.headers
        passed = {name: given[name] for name in _PASSED_ON if name in given}
        return {**self._engine_headers, **passed} if passed else self._engine_headers

    def _salt(self, ticket: Ticket) -> str:
        """Names this commit of this version in this life of the sidecar, not only the version:
        what was cached while a commit passed may be of either side."""
        return f"{ticket.ref.root[:16]}.{ticket.epoch}.{self._life}"

    def _kept(self, ref: VersionRef) -> _Said:
        if self._said is None or self._said.ref is not ref:
            said = provenance.single(ref)
            self._said = _Said(ref, provenance.headers(said), provenance.encode(said))
        return self._said

    def _refusal(self, error: BaseException) -> Refused:
        """What a client is told; an engine that did not behave is looked at again."""
        if isinstance(error, NotAdmittedError):
            return _not_admitted(error)
        if isinstance(error, asyncio.CancelledError):
            return Refused(
                503,
                "CutOff",
                "A new version could wait no longer for this request; send it again.",
                retry_after=RETRY_VERSION,
            )
        if isinstance(error, IntegrityError):
            self._suspect(str(error))
            return Refused(503, "EngineUncertain", str(error), retry_after=RETRY_DOWN)
        self._suspect("The engine does not answer; it is looked at again.")
        if isinstance(error, (BrokenOffError, *Failure)):
            return Refused(
                502,
                "EngineBrokeOff",
                "The engine broke off before its answer was whole, perhaps because of this "
                "request; send it once more at most.",
                retry_after=RETRY_DOWN,
            )
        return Refused(
            503,
            "EngineUnavailable",
            "The engine behind this replica does not answer; try again, or another replica.",
            retry_after=RETRY_DOWN,
        )

    def _health(self) -> web.Response:
        return _json({"status": "ok"})

    def _ready(self) -> web.Response:
        """With what a person asks first; no token, so no more than that."""
        reason = self._gate.closed_because
        said = {"ready": reason is None, **self._describe()}
        if reason is not None:
            said["reason"] = reason
        return _json(said, 200 if reason is None else 503)


class _Visit:
    """One request's way through the gate, whatever ends it."""

    __slots__ = ("_cut", "_gate", "_hold", "_loop", "_task", "_ticket", "response")

    def __init__(
        self,
        gate: AdmissionGate,
        hold: Callable[[float], Awaitable[bool]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._gate = gate
        self._hold = hold
        self._loop = loop
        self._task = asyncio.current_task(loop)
        self._cut = False
        self._ticket: Ticket | None = None
        self.response: web.StreamResponse | None = None
        """Set once its status has gone out."""

    def cut(self) -> None:
        """End the request; from any thread."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._ticket is not None and self._task is not None and not self._cut:
            self._cut = True
            self._task.cancel()

    def was_cut(self) -> bool:
        """Whether it was `cut` that cancelled the request; then it goes on to say so."""
        return self._cut and self._task is not None and self._task.uncancel() == 0

    async def enter(self, constraint: Constraint, *, crosses: bool) -> Ticket:
        since = 0.0
        while True:
            ticket = self._gate.enter(constraint, crosses=crosses, cut=self.cut)
            if ticket is not None:
                self._ticket = ticket
                return ticket
            since = since or self._loop.time()
            if not await self._hold(since):
                raise NotAdmittedError(
                    "A new version is about to go live and takes its time; try again.", "full"
                )

    async def leave(self, ticket: Ticket, reported: Reported) -> Provenance | None:
        """Who wrote the answer; None if its first version wrote all of it."""
        since = self._loop.time()
        while ticket.crosses and self._gate.phase == "committing":
            if not await self._hold(since):
                break
        end = self._gate.leave(ticket)
        self._ticket = None
        if not end.same_engine:
            raise BrokenOffError("The engine was restarted while it answered.")
        if end.epoch == ticket.epoch:
            if reported:
                provenance.check(reported, ticket.ref, self._gate.served)
            return None
        return provenance.crossed(ticket.ref, end.ref, reported, self._gate.served)

    def abandon(self) -> None:
        if self._ticket is not None:
            self._gate.leave(self._ticket)
            self._ticket = None


async def _break_off(
    request: web.BaseRequest, response: web.StreamResponse, refused: Refused
) -> None:
    """The status has gone out: say in the stream that it is not whole, and hang up without the
    mark of its end."""
    try:
        await send(request, response, b"data: %b\n\n" % refused.body())
    finally:
        request.protocol.force_close()


def _type_of(answer: aiohttp.ClientResponse) -> dict[str, str]:
    kind = answer.headers.get("Content-Type")
    return {} if kind is None else {"Content-Type": kind}


def _not_admitted(error: NotAdmittedError) -> Refused:
    if error.refusal in ("behind", "passed"):
        return Refused(409, "WeightVersionNotReady", str(error), retry_after=RETRY_VERSION)
    wait = RETRY_FULL if error.refusal == "full" else RETRY_DOWN
    kind = "Full" if error.refusal == "full" else "NotReady"
    return Refused(503, kind, str(error), retry_after=wait)


def _json(said: Mapping[str, object], status: int = 200) -> web.Response:
    body = msgspec.json.encode(said)
    return web.Response(body=body, status=status, content_type="application/json")
