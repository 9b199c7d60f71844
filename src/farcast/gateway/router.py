"""The gateway's HTTP side: one address before many replicas.

    the token, the route          401, 404
    whom to ask                   suits the version asked for; the session's own; the idlest
    it answers 409 or 503, or     the next one, until TRIES were asked; nothing was passed on yet
    is out of reach
    it breaks off, the request    one more, then 502: the request may be what breaks them
    in its hands
    nobody could                  what the last one said, 409 before 503, with its Retry-After

An answer passes as it comes, a stream chunk by chunk; who wrote it stands in it already. A client
that leaves ends its request at the replica too.

Refuses to decide about versions: the replica's gate does, under its lock. A wrong guess here
costs one more question.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import NamedTuple

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from farcast.engines.admission import ANY, Constraint
from farcast.gateway import constraint as asked
from farcast.gateway.bodies import split
from farcast.gateway.fleet_view import FleetView, Member
from farcast.gateway.listening import Refused, begin, counted, end, read_body, send
from farcast.gateway.metrics import Traffic
from farcast.gateway.routes import EVERY_ROUTE, Route
from farcast.gateway.streams import MEDIA_TYPE
from farcast.gateway.tokens import Token
from farcast.gateway.upstream import (
    BrokenOffError,
    Failure,
    UnreachableError,
    Upstream,
    read_answer,
)

SESSION = "X-Farcast-Session"
REPLICA = "X-Farcast-Replica"
TRIES = 4
BREAKS = 2
"""So many replicas may break off under one request: the first perhaps by chance, the second
hardly. Others are not tried on it."""

SESSIONS = 1 << 16
"""Sessions remembered; the one unused for longest is forgotten, and then starts anywhere."""

VERSION_DIGITS = 12
"""Of a version's number, at most."""

MAX_SESSION = 256
"""Characters of a session's name that count."""

_TO_REPLICA = (asked.HEADER, "X-Request-Id", "traceparent")
_FROM_REPLICA = ("Content-Type", "Retry-After")
_MENTION = b"weight_version"
_RETRIED = (409, 503)
_BROKE_OFF = 502
"""What a sidecar answers if its engine did."""


class Unsent(NamedTuple):
    """A request as it goes to any replica."""

    route: Route
    body: bytes | None
    headers: Mapping[str, str]


class Router:
    """Answers requests, in one event loop."""

    def __init__(
        self,
        fleet: FleetView,
        upstream: Upstream,
        token: Token,
        replica_token: Token,
        *,
        traffic: Traffic,
        limit: int,
    ) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._token = token
        self._authorization = replica_token.header()
        self._traffic = traffic
        self._limit = limit
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._urls: dict[tuple[str, str], URL] = {}
        self._leaving = False
        self.in_flight = 0
        self._own: dict[str, Callable[[], web.Response]] = {
            "/health": lambda: _json({"status": "ok"}),
            "/ready": self._ready,
        }

    def leave(self) -> None:
        """Let nothing more in."""
        self._leaving = True

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.raw_path
        own = self._own.get(path)
        if own is not None:
            return own()
        if not self._token.allows(request.headers.get("Authorization")):
            raise Refused(401, "Unauthorized", "Send the gateway's token as a bearer token.")
        if path == "/metrics":
            return web.Response(body=self._traffic.text(), content_type="text/plain")
        route = EVERY_ROUTE.get((request.method, path.partition("?")[0]))
        if route is None:
            raise Refused(404, "NoSuchRoute", f"This gateway has no {request.method} {path[:80]}.")
        if self._leaving or self.in_flight >= self._limit:
            kind = "Leaving" if self._leaving else "Full"
            raise Refused(503, kind, "This gateway takes no more; try again.", retry_after=1)
        self.in_flight += 1
        try:
            return await counted(self._traffic, route.path, self._route(request, route))
        finally:
            self.in_flight -= 1

    async def _route(self, request: web.BaseRequest, route: Route) -> web.StreamResponse:
        body = await read_body(request) if route.method == "POST" else None
        unsent = Unsent(route, body, self._headers(request))
        constraint = _constraint(unsent)
        session = request.headers.get(SESSION, "")[:MAX_SESSION] or None
        preferred = None if session is None else self._sessions.get(session)
        refused: web.StreamResponse | None = None
        broken = 0
        for member, _ in self._fleet.ordered(constraint, preferred)[:TRIES]:
            try:
                answer = await self._try(request, unsent, member)
            except UnreachableError as error:
                self._fleet.shun(member)
                broken += isinstance(error, BrokenOffError)
                if broken == BREAKS:
                    break
                continue
            if answer.status not in _RETRIED or answer.prepared:
                if session is not None:
                    self._remember(session, member.name)
                return answer
            if refused is None or answer.status < refused.status:
                refused = answer  # 409 says more than 503
        if refused is not None and broken < BREAKS:
            return refused
        raise _unanswered(broken)

    async def _try(
        self, request: web.BaseRequest, unsent: Unsent, member: Member
    ) -> web.StreamResponse:
        """A replica's answer; raises `UnreachableError` if it gave none."""
        member.load += 1
        response: web.StreamResponse | None = None
        try:
            async with self._upstream.ask(
                unsent.route.method, self._url(member, unsent.route), unsent.body, unsent.headers
            ) as answer:
                if answer.status == _BROKE_OFF:
                    raise BrokenOffError("The engine behind the replica broke off.")
                headers = _headers_of(answer, member)
                if answer.content_type != MEDIA_TYPE:
                    data = await read_answer(answer)
                    return web.Response(body=data, status=answer.status, headers=headers)
                response = web.StreamResponse(status=answer.status, headers=headers)
                await begin(request, response)
                async for chunk in answer.content.iter_any():
                    await send(request, response, chunk)
                await end(response)
                return response
        except Failure as error:
            if response is None:
                raise BrokenOffError(type(error).__name__) from error
            request.protocol.force_close()  # without the mark of the end: it is not whole
            return response
        finally:
            member.load -= 1

    # --- inside ------------------------------------------------------------------------------

    def _url(self, member: Member, route: Route) -> URL:
        key = (member.url, route.path)
        url = self._urls.get(key)
        if url is None:
            if len(self._urls) > SESSIONS:
                self._urls.clear()
            url = self._urls[key] = URL(member.url + route.path)
        return url

    def _headers(self, request: web.BaseRequest) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Authorization": self._authorization}
        given = request.headers
        for name in _TO_REPLICA:
            if name in given:
                headers[name] = given[name]
        return headers

    def _remember(self, session: str, name: str) -> None:
        self._sessions[session] = name
        self._sessions.move_to_end(session)
        if len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)

    def _ready(self) -> web.Response:
        usable = self._fleet.usable()
        ready = bool(usable) and not self._leaving
        said = {
            "ready": ready,
            "replicas": {m.name: {"version": m.version, "load": m.load} for m in usable},
        }
        return _json(said, 200 if ready else 503)


def _constraint(unsent: Unsent) -> Constraint:
    """What the request asks for. A body is only read if it could say something: a field whose
    name is hidden by escapes is found by the replica, which decides."""
    header = unsent.headers.get(asked.HEADER)
    body = unsent.body
    if not unsent.route.generates or body is None:
        return ANY
    if _MENTION not in body:
        return ANY if header is None else asked.constraint_of(None, header)
    return asked.constraint_of(split(body).get(asked.FIELD), header)


def _headers_of(answer: aiohttp.ClientResponse, member: Member) -> dict[str, str]:
    headers = {REPLICA: member.name}
    for name, value in answer.headers.items():
        if name in _FROM_REPLICA or name[:10].lower() == "x-farcast-":
            headers[name] = value
    version = headers.get("X-Farcast-Version-End", headers.get("X-Farcast-Version-Start"))
    if version is not None and version.isdecimal() and len(version) <= VERSION_DIGITS:
        member.version = int(version)
    return headers


def _unanswered(broken: int) -> Refused:
    if not broken:
        return Refused(503, "NoReplica", "No replica of the run answers; try again.", retry_after=2)
    return Refused(
        502,
        "BrokenOff",
        "Each replica that took this request broke off before it answered, perhaps because of the "
        "request; look at it before you send it again.",
    )


def _json(said: Mapping[str, object], status: int = 200) -> web.Response:
    body = msgspec.json.encode(said)
    return web.Response(body=body, status=status, content_type="application/json")
