"""`farcast gateway` before real replicas: found through the store, chosen by version, passed over
when they can't or won't."""

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import aiohttp
import psutil
import pytest

from fake_engine import expected
from farcast.fleet.records import ReplicaRecord
from farcast.fleet.registry import Registry
from servers import free_ports
from serving_world import TOKEN, Program, World, ask, ready, wait_for, world

URL = "/v1/completions"


class Fleet:
    """Replicas by name, each with its engine, and a gateway."""

    def __init__(self, made: World) -> None:
        self.world = made
        self.engines: dict[str, Program] = {}
        self.replicas: dict[str, Program] = {}
        self.ports: dict[str, int] = {}
        (self.port,) = free_ports(1)
        self.gateway = made.start(
            *("gateway", "-m", "farcast", "gateway", "--store", made.run.url),
            *("--port", str(self.port), "--token-env", "FARCAST_TEST_TOKEN"),
        )

    def add(self, name: str, *options: str) -> None:
        engine, self.ports[name] = free_ports(2)
        self.engines[name] = self.world.engine(engine, name=f"engine-{name}")
        self.replicas[name] = self.world.replica(engine, self.ports[name], *options, name=name)

    def seen(self) -> dict[str, Any]:
        return dict(ask(self.port, "GET", "/ready", token=None).json["replicas"])

    def wait(self, *names: str, version: int | None = None) -> None:
        for name in names:
            ready(self.ports[name], version)
        wait_for(
            lambda: (
                set(names) == set(seen := self.seen())
                and version in (None, *(member["version"] for member in seen.values()))
            )
        )

    def ask(self, prompt: str = "x", *, session: str | None = None, **fields: Any) -> Any:
        headers = {} if session is None else {"X-Farcast-Session": session}
        body = {"prompt": prompt, "max_tokens": 3, **fields}
        return ask(self.port, "POST", URL, body, headers=headers)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with world(tmp_path_factory.mktemp("fleet")) as made:
        made.run.publish()
        found = Fleet(made)
        for name in ("r0", "r1"):
            found.add(name)
        found.wait("r0", "r1")
        yield found


def test_work_is_spread_and_answers_are_right(fleet: Fleet) -> None:
    made = fleet.world.run
    asked = [fleet.ask("spread") for _ in range(8)]
    assert {answer.status for answer in asked} == {200}
    assert len(Counter(answer.headers["x-farcast-replica"] for answer in asked)) == 2
    version = made.refs[-1].version
    for answer in asked:
        assert answer.json["choices"][0]["token_ids"] == made.expected("spread", version, 3)
        assert answer.json["farcast"]["end"]["root"] == made.refs[-1].root


def test_a_session_stays_on_its_replica(fleet: Fleet) -> None:
    for session in ("a", "b", "c", "d", "e" * 1000):
        found = {fleet.ask(session=session).headers["x-farcast-replica"] for _ in range(4)}
        assert len(found) == 1


def test_a_stream_passes_whole(fleet: Fleet) -> None:
    answer = fleet.ask("stream", stream=True)
    assert answer.body.count(b"data: {") == 3
    assert answer.body.rstrip().endswith(b"data: [DONE]")
    assert b": farcast {" in answer.body


def test_what_nobody_serves_yet_is_409_with_the_time_to_wait(fleet: Fleet) -> None:
    for asked in ({"min_version": 900}, {"exact_version": 900}):
        answer = fleet.ask(weight_version=asked)
        assert answer.status == 409
        assert answer.headers["retry-after"] == "1"
        assert answer.json["error"]["type"] == "WeightVersionNotReady"
    assert fleet.ask(weight_version={"min_version": "x"}).status == 400


def test_only_listed_routes_and_only_with_the_token(fleet: Fleet) -> None:
    """Case 099."""
    for path in ("/reload_weights", "/pause", "/v1/../pause", "/update_weights", "/ready/"):
        assert ask(fleet.port, "POST", path, {}).status == 404
    for token in (None, TOKEN + "x"):
        assert ask(fleet.port, "POST", URL, {"prompt": "x"}, token=token).status == 401
        assert ask(fleet.port, "GET", "/metrics", token=token).status == 401
    process = psutil.Process(fleet.gateway.process.pid)
    listening = [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [c.laddr.ip for c in listening] == ["127.0.0.1"]
    assert "farcast_replicas 2.0" in ask(fleet.port, "GET", "/metrics").body.decode()


def test_a_client_that_leaves_ends_its_request_at_the_engine(fleet: Fleet) -> None:
    body = json.dumps({"prompt": "gone away", "max_tokens": 100_000, "stream": True}).encode()
    head = f"POST {URL} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    with socket.create_connection(("127.0.0.1", fleet.port)) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert client.recv(1)

    def aborted() -> bool:
        jobs = [job for name in ("r0", "r1") for job in fleet.world.jobs(f"engine-{name}")]
        return any(j["aborted"] and j["prompt"] == list(b"gone away") for j in jobs)

    wait_for(aborted)


def test_versions_move_one_replica_at_a_time_and_the_constraint_finds_it(fleet: Fleet) -> None:
    """Right after a publish some replica is behind: a request for the new version goes to one
    that has it, or is told to wait."""
    for _ in range(3):
        ref = fleet.world.run.publish()
        until = time.monotonic() + 20
        while (
            answer := fleet.ask("new", weight_version={"min_version": ref.version})
        ).status != 200:
            assert answer.status == 409
            assert time.monotonic() < until
            time.sleep(0.02)
        said = answer.json["farcast"]
        assert said["start"]["version"] == ref.version
        tokens = fleet.world.run.expected("new", ref.version, 3)
        assert answer.json["choices"][0]["token_ids"] == tokens


def test_a_record_that_names_a_stranger_costs_a_question(fleet: Fleet) -> None:
    """An address where nobody answers, or something that is no replica."""
    registry = Registry(fleet.world.run.store)
    (nobody,) = free_ports(1)
    for beat in range(20):
        registry.write_replica(
            ReplicaRecord(
                replica_id="ghost",
                state="serving",
                version=0,
                url=f"http://127.0.0.1:{nobody}",
                updated=float(beat),
            )
        )
        if "ghost" in fleet.seen():
            break
        time.sleep(0.2)
    assert [fleet.ask().status for _ in range(6)] == [200] * 6


def test_damaged_and_stray_records_do_not_stop_the_gateway(fleet: Fleet) -> None:
    store, registry = fleet.world.run.store, Registry(fleet.world.run.store)
    store.put("fleet/replicas/zzz.json", b"{")
    registry.write_replica(
        ReplicaRecord(replica_id="odd", state="serving", version=0, url="http://[x", updated=1.0)
    )
    time.sleep(2.5)
    assert [fleet.ask().status for _ in range(6)] == [200] * 6
    assert fleet.gateway.process.poll() is None


def test_a_killed_replica_is_passed_over_and_a_new_one_found(fleet: Fleet) -> None:
    """kill -9 among 32 clients: those it was answering are asked again elsewhere."""
    statuses = asyncio.run(_clients_while(fleet, lambda: fleet.replicas["r0"].kill()))
    assert statuses[200] > 100
    assert set(statuses) == {200}, statuses
    fleet.add("r2")
    ready(fleet.ports["r2"])
    wait_for(lambda: "r2" in fleet.seen())
    assert "r2" in {fleet.ask().headers["x-farcast-replica"] for _ in range(6)}


def test_a_stopping_replica_loses_nobody(fleet: Fleet) -> None:
    statuses = asyncio.run(_clients_while(fleet, fleet.replicas["r1"].process.terminate))
    assert set(statuses) == {200}, statuses
    assert fleet.replicas["r1"].process.wait(20) == 0


def test_without_replicas_it_says_so_and_stops_in_order(fleet: Fleet) -> None:
    fleet.replicas["r2"].kill()
    answer = fleet.ask()
    assert answer.status == 503
    assert "retry-after" in answer.headers
    assert fleet.gateway.stop() == 0


async def _clients_while(fleet: Fleet, happens: Any) -> Counter[int]:
    """32 clients ask for two seconds; in the middle something happens. What they were answered;
    every right answer is checked."""
    statuses: Counter[int] = Counter()
    until = time.monotonic() + 2

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        while time.monotonic() < until:
            body = {"prompt": f"client {number}", "max_tokens": 20}
            async with session.post(f"http://127.0.0.1:{fleet.port}{URL}", json=body) as response:
                answer = await response.json()
                statuses[response.status] += 1
                if response.status == 200:
                    keys = [fleet.world.run.keys[answer["farcast"]["start"]["version"]]] * 20
                    found = answer["choices"][0]["token_ids"]
                    assert found == expected(body["prompt"].encode(), keys)

    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(
        headers=headers, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        clients = [asyncio.create_task(client(session, number)) for number in range(32)]
        await asyncio.sleep(1)
        await asyncio.to_thread(happens)
        await asyncio.gather(*clients)
    return statuses
