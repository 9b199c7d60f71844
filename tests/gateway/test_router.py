"""The gateway's router before replicas that mean no good, or die of what they are asked."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import aiohttp
import pytest

from farcast.fleet.records import ReplicaRecord
from farcast.fleet.registry import Sighting
from farcast.gateway import upstream
from farcast.gateway.fleet_view import FleetView
from farcast.gateway.listening import Listener
from farcast.gateway.metrics import Traffic
from farcast.gateway.router import Router
from farcast.gateway.tokens import Token
from servers import free_ports

OUR_TOKEN, REPLICA_TOKEN = Token("of-clients-0123456789"), Token("of-replicas-0123456789")
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
BUSY = b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 2\r\n\r\n{}"
BEHIND = b"HTTP/1.1 409 Behind\r\nRetry-After: 1\r\nContent-Length: 2\r\n\r\n{}"
ENGINE_BROKE_OFF = b"HTTP/1.1 502 Broke off\r\nContent-Length: 2\r\n\r\n{}"
TORN = b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"
GARBAGE = b"no answer at all\r\n\r\n"


class Replica:
    """Reads requests and counts them; `answers` in turn, the last of them from then on. It hangs
    up after anything that is no whole answer, b"" among it, and sends `chunk` without end."""

    def __init__(self, *answers: bytes, chunk: bytes = b"") -> None:
        self.answers, self.chunk, self.asked = answers, chunk, 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"\r\n\r\n{}")
                answer = self.answers[min(self.asked, len(self.answers) - 1)]
                self.asked += 1
                writer.write(answer)
                while self.chunk:
                    writer.write(self.chunk)
                    await writer.drain()
                if not answer.endswith(b"\r\n\r\n{}"):
                    break
        writer.close()


class Answer(NamedTuple):
    status: int
    error: dict[str, Any]


class Gateway(NamedTuple):
    url: str
    client: aiohttp.ClientSession

    async def ask(self) -> Answer:
        headers = {"Authorization": OUR_TOKEN.header()}
        asked = self.client.post(f"{self.url}/v1/completions", data=b"{}", headers=headers)
        async with asked as answer:
            return Answer(answer.status, json.loads(await answer.read() or b"{}").get("error", {}))


@contextlib.asynccontextmanager
async def gateway(*replicas: Replica | None) -> AsyncIterator[Gateway]:
    """Before replicas that are asked in this order; None is one where nobody listens."""
    async with contextlib.AsyncExitStack() as stack:
        up = upstream.Upstream()
        stack.push_async_callback(up.close)
        view, sightings = FleetView(clock=lambda: 0.0, wall=lambda: 0.0), {}
        for place, replica in enumerate(replicas):
            (port,) = free_ports(1)
            if replica is not None:
                server = await asyncio.start_server(replica.serve, "127.0.0.1", 0)
                stack.callback(server.close)
                port = server.sockets[0].getsockname()[1]
            record = ReplicaRecord(
                replica_id=f"r{place}",
                state="serving",
                version=3,
                url=f"http://127.0.0.1:{port}",
                updated=1.0,
            )
            sightings[record.replica_id] = Sighting(record, 0.0)
        view.update(sightings)
        for place, member in enumerate(view.usable()):
            member.load = place
        router = Router(view, up, OUR_TOKEN, REPLICA_TOKEN, traffic=Traffic(), limit=8)
        listener = Listener(router.handle, "127.0.0.1", 0)
        await listener.start()
        stack.push_async_callback(listener.stop)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        await stack.enter_async_context(asyncio.timeout(20))
        yield Gateway(listener.url, client)


async def asked_once(*replicas: Replica | None) -> Answer:
    async with gateway(*replicas) as asked:
        return await asked.ask()


@pytest.mark.parametrize(
    "last", [b"", GARBAGE, TORN, ENGINE_BROKE_OFF], ids=["nothing", "garbage", "torn", "engine"]
)
def test_a_request_that_breaks_its_replicas_is_tried_on_two_of_them(last: bytes) -> None:
    replicas = [Replica(last) for _ in range(6)]
    answer = asyncio.run(asked_once(*replicas))
    assert answer.status == 502
    assert answer.error["type"] == "BrokenOff"
    assert answer.error["message"].endswith(".")
    assert [replica.asked for replica in replicas] == [1, 1, 0, 0, 0, 0]


def test_one_replica_that_breaks_off_costs_a_question() -> None:
    replicas = [Replica(b""), Replica(OK)]
    assert asyncio.run(asked_once(*replicas)).status == 200
    assert [replica.asked for replica in replicas] == [1, 1]


def test_the_only_replica_that_breaks_off_is_not_asked_twice() -> None:
    replica = Replica(b"", OK)
    assert asyncio.run(asked_once(replica)).status == 502
    assert replica.asked == 1


@pytest.mark.parametrize("between", [None, BUSY, BEHIND], ids=["refused", "busy", "behind"])
def test_those_that_take_no_request_do_not_count(between: bytes | None) -> None:
    others = [None if between is None else Replica(between) for _ in range(2)]
    broken = [Replica(b"") for _ in range(2)]
    assert asyncio.run(asked_once(broken[0], *others, broken[1])).status == 502
    assert [replica.asked for replica in broken] == [1, 1]
    broken = [Replica(b""), Replica(OK)]
    assert asyncio.run(asked_once(broken[0], *others, broken[1])).status == 200


def test_refusals_go_on_to_others_as_far_as_four() -> None:
    replicas = [Replica(BUSY), None, Replica(BEHIND), Replica(BUSY), Replica(OK)]
    assert asyncio.run(asked_once(*replicas)).status == 409
    assert asyncio.run(asked_once(*[None] * 4)).status == 503


def test_an_idle_connection_that_was_closed_is_replaced() -> None:
    """The same replica is asked again: it did not begin. If that fails too, it counts as one."""

    async def twice(*replicas: Replica) -> list[int]:
        async with gateway(*replicas) as asked:
            return [(await asked.ask()).status for _ in range(2)]

    replica = Replica(OK, b"", OK)
    assert asyncio.run(twice(replica)) == [200, 200]
    replicas = [Replica(OK, b""), Replica(b""), Replica(OK)]
    assert asyncio.run(twice(*replicas)) == [200, 502]
    assert [replica.asked for replica in replicas] == [3, 1, 0]


@pytest.mark.parametrize(
    ("head", "chunk", "status"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/plain", b"x" * 65536, 502),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999", b"x" * 65536, 502),
        (
            b"HTTP/1.1 200 OK\r\nX-Farcast-Version-End: " + b"9" * 5000 + b"\r\nContent-Length: 0",
            b"",
            200,
        ),
    ],
    ids=["endless", "long", "version"],
)
def test_an_answer_without_end_is_no_answer(
    head: bytes, chunk: bytes, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bounded memory; another replica is asked then."""
    monkeypatch.setattr(upstream, "MAX_ANSWER", 1 << 20)
    hostile = Replica(head + b"\r\n\r\n", chunk=chunk)
    assert asyncio.run(asked_once(hostile)).status == status
    if status != 200:
        assert asyncio.run(asked_once(hostile, Replica(OK))).status == 200
