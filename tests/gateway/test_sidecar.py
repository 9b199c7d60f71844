"""The sidecar as a person runs it: `farcast replica --engine http` before an engine that really
generates and really caches, in processes and over sockets of their own."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from fake_engine import expected
from farcast.gateway.listening import MAX_BODY
from serving_world import TOKEN, World, ask, ready, two_ports, wait_for, world


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, int]]:
    """One sidecar for the tests that leave it as it was; its version only goes up."""
    with world(tmp_path_factory.mktemp("served")) as made:
        made.run.publish()
        engine, port = two_ports()
        made.engine(engine)
        made.replica(engine, port)
        ready(port)
        yield made, port


def tokens_of(answer: Any) -> list[int]:
    return list(answer.json["choices"][0]["token_ids"])


# --- what passes, and what does not ----------------------------------------------------------


def test_answers_say_who_wrote_them(served: tuple[World, int]) -> None:
    made, port = served
    ref = made.run.refs[-1]
    for path, body in (
        ("/v1/completions", {"prompt": "tell me"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "tell me"}]}),
        ("/generate", {"prompt": "tell me"}),
    ):
        answer = ask(port, "POST", path, {**body, "max_tokens": 6})
        assert answer.status == 200
        assert tokens_of(answer) == made.run.expected("tell me", ref.version, 6)
        said = answer.json["farcast"]
        assert said["run_id"] == ref.run_id
        assert said["start"] == said["end"] == {"version": ref.version, "root": ref.root}
        assert said["spans"] == []
        assert answer.headers["x-farcast-version-start"] == str(ref.version)
        assert answer.headers["x-farcast-root-end"] == ref.root


def test_a_stream_passes_and_ends_with_who_wrote_it(served: tuple[World, int]) -> None:
    made, port = served
    body = {"prompt": "stream", "max_tokens": 5, "stream": True}
    answer = ask(port, "POST", "/v1/completions", body)
    lines = answer.body.decode().split("\n\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith('data: {"')]
    tokens = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert tokens == made.run.expected("stream", made.run.refs[-1].version, 5)
    comment, mark = [line for line in lines if line][-2:]
    assert mark == "data: [DONE]"
    assert json.loads(comment.removeprefix(": farcast "))["end"]["root"] == made.run.refs[-1].root


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/reload_weights"),
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("POST", "/update_weights"),
        ("POST", "/collective_rpc"),
        ("POST", "//reload_weights"),
        ("POST", "/v1/../reload_weights"),
        ("POST", "/v1/completions/../../reload_weights"),
        ("POST", "/%72eload_weights"),
        ("POST", "/v1/completions/"),
        ("POST", "/V1/completions"),
        ("GET", "/v1/completions"),
        ("PUT", "/v1/completions"),
        ("GET", "/weight_version"),
        ("GET", "/"),
        ("POST", "http://127.0.0.1/reload_weights"),
    ],
)
def test_only_listed_routes_pass(served: tuple[World, int], method: str, path: str) -> None:
    made, port = served
    assert ask(port, method, path, {"path": "/tmp", "label": "x"}).status == 404
    answer = ask(port, "POST", "/v1/completions", {"prompt": "x", "max_tokens": 3})
    assert tokens_of(answer) == made.run.expected("x", made.run.refs[-1].version, 3)


@pytest.mark.parametrize("token", [None, "", "x", TOKEN + "x", TOKEN[:-1], TOKEN.upper()])
def test_without_the_token_nothing_happens(served: tuple[World, int], token: str | None) -> None:
    """Case 099."""
    made, port = served
    before = len(made.jobs())
    for method, path in (("POST", "/v1/completions"), ("GET", "/metrics"), ("POST", "/pause")):
        answer = ask(port, method, path, {"prompt": "steal", "max_tokens": 1}, token=token)
        assert answer.status == 401
        assert answer.json["error"]["type"] == "Unauthorized"
    url = f"/v1/completions?token={TOKEN}"
    assert ask(port, "POST", url, {"prompt": "steal"}, token=token).status == 401
    assert len(made.jobs()) == before


def test_it_listens_on_loopback_only(served: tuple[World, int]) -> None:
    made, _ = served
    for program in made.programs:
        for connection in psutil.Process(program.process.pid).net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip == "127.0.0.1"


def test_the_token_is_in_no_output_and_on_no_command_line(served: tuple[World, int]) -> None:
    made, port = served
    ask(port, "POST", "/v1/completions", b"{")
    for program in made.programs:
        assert TOKEN not in program.output()
        assert TOKEN not in " ".join(psutil.Process(program.process.pid).cmdline())
    for path in Path(made.folder).rglob("*"):
        if path.is_file():
            assert TOKEN.encode() not in path.read_bytes(), path


def test_readiness_health_models_and_metrics(served: tuple[World, int]) -> None:
    made, port = served
    assert ask(port, "GET", "/health", token=None).json == {"status": "ok"}
    assert ready(port)["version"] == made.run.refs[-1].version
    assert ask(port, "GET", "/v1/models").json["data"][0]["id"] == "fake"
    ask(port, "POST", "/v1/completions", {"prompt": "count me", "max_tokens": 1})
    text = ask(port, "GET", "/metrics").body.decode()
    assert 'farcast_requests_total{path="/v1/completions",status="200"}' in text
    assert f"farcast_version {made.run.refs[-1].version}.0" in text
    assert "farcast_commit_pause_seconds_count" in text


# --- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b'{"prompt": "x", "weight_version": 3}', 400),
        (b'{"prompt": "x", "weight_version": {"min_version": "3"}}', 400),
        (b'{"prompt": "x", "weight_version": {"exact_version": 1, "min_version": 1}}', 400),
        (b'{"prompt": "x", "cache_salt": 1}', 400),
        (b'{"prompt": "x", "weight_version": {"min_version": 999}}', 409),
        (b'{"prompt": "x", "weight_version": {"exact_version": 999}}', 409),
    ],
)
def test_bad_input_is_one_clear_sentence(
    served: tuple[World, int], body: bytes, status: int
) -> None:
    _, port = served
    answer = ask(port, "POST", "/v1/completions", body)
    assert answer.status == status
    assert answer.json["error"]["message"].endswith(".")
    assert ("retry-after" in answer.headers) == (status == 409)


def test_a_header_asks_for_a_version_too(served: tuple[World, int]) -> None:
    made, port = served
    body = {"prompt": "x", "max_tokens": 1}
    now = made.run.refs[-1].version
    for text, status in ((f"min={now}", 200), (f"exact={now}", 200), ("min=900", 409), ("x", 400)):
        headers = {"X-Farcast-Weight-Version": text}
        assert ask(port, "POST", "/v1/completions", body, headers=headers).status == status


@pytest.mark.parametrize("announced", [True, False])
def test_an_oversized_body_is_refused_and_not_kept(
    served: tuple[World, int], announced: bool
) -> None:
    made, port = served
    process = psutil.Process(made.programs[1].process.pid)
    before, most = process.memory_info().rss, 0
    piece = b" " * (1 << 20)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        size = f"Content-Length: {MAX_BODY * 3}" if announced else "Transfer-Encoding: chunked"
        client.sendall(f"{head}{size}\r\n\r\n".encode())
        with contextlib.suppress(OSError):
            for _ in range(3 * MAX_BODY >> 20):
                client.sendall(piece if announced else b"%x\r\n%b\r\n" % (len(piece), piece))
                most = max(most, process.memory_info().rss - before)
        with contextlib.suppress(ConnectionResetError):  # it hung up while we were sending
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 413")
    assert most < 2 * MAX_BODY
    assert ready(port)


# --- clients that leave, and clients that dawdle ---------------------------------------------


def test_a_client_that_leaves_ends_its_request_at_the_engine(served: tuple[World, int]) -> None:
    made, port = served
    for stream in (False, True):
        prompt = f"left alone {stream}"
        body = json.dumps({"prompt": prompt, "max_tokens": 100_000, "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(_post(body))
            if stream:
                assert client.recv(1)
            else:
                time.sleep(0.2)
        job = wait_for(
            lambda p=prompt: next((j for j in made.jobs() if j["prompt"] == list(p.encode())), None)
        )
        assert job["aborted"]
        assert len(job["tokens"]) < 50_000
    wait_for(lambda: ready(port)["in_flight"] == 0)


def test_a_slow_client_holds_up_nobody(served: tuple[World, int]) -> None:
    made, port = served
    body = json.dumps({"prompt": "slow", "max_tokens": 3}).encode()
    sent = _post(body)
    with socket.create_connection(("127.0.0.1", port)) as slow:
        for place in range(0, len(sent), 40):
            slow.sendall(sent[place : place + 40])
            began = time.monotonic()
            assert ask(port, "POST", "/generate", {"prompt": "q", "max_tokens": 1}).status == 200
            assert time.monotonic() - began < 2
        answer = slow.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 200")
    assert str(made.run.expected("slow", made.run.refs[-1].version, 3)[0]).encode() in answer


def test_a_client_that_leaves_in_its_body_is_no_error(served: tuple[World, int]) -> None:
    made, port = served
    sent = _post(json.dumps({"prompt": "half", "max_tokens": 3}).encode())
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(sent[:-5])
        time.sleep(0.1)
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n")
        assert b" 400 " in client.recv(1 << 16)
    assert ask(port, "POST", "/generate", {"prompt": "q", "max_tokens": 1}).status == 200
    assert "Traceback" not in made.programs[1].output()


def _post(body: bytes, path: str = "/v1/completions") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


# --- versions come ---------------------------------------------------------------------------


def test_the_cache_never_crosses_versions(tmp_path: Path) -> None:
    """Case 019: the same prompt before and after, on an engine that caches prefixes."""
    for caches in ("salt", "flush"):
        folder = tmp_path / caches
        folder.mkdir()
        with world(folder) as made:
            made.run.publish()
            engine, port = two_ports()
            made.engine(engine)
            made.replica(engine, port, "--caches", caches)
            for version in range(3):
                ready(port, version)
                for _ in range(2):
                    body = {"prompt": "the same prompt", "max_tokens": 4, "cache_salt": "mine"}
                    answer = ask(port, "POST", "/v1/completions", body)
                    assert tokens_of(answer) == made.run.expected("the same prompt", version, 4)
                made.run.publish()
            salts = {job["salt"] for job in made.jobs()}
            assert len(salts) == (3 if caches == "salt" else 1)
            assert all(salt.endswith("mine") for salt in salts)


@pytest.mark.parametrize("option", ["--reload-does-nothing", "--reset-refuses"])
def test_an_engine_that_did_not_do_it_is_never_said_to_hold_it(tmp_path: Path, option: str) -> None:
    """Cases 061 and 019: a reload that loads nothing; a reset that is not confirmed."""
    with world(tmp_path) as made:
        made.run.publish()
        engine, port = two_ports()
        made.engine(engine, option)
        replica = made.replica(engine, port, "--caches", "flush")
        if option == "--reload-does-nothing":
            assert ready(port, 0)
            made.run.publish()
        wait_for(
            lambda: replica.process.poll() is not None or "could be staged" in replica.output()
        )
        assert "serves run1@1" not in replica.output()
        assert ("serves run1@0" in replica.output()) == (option == "--reload-does-nothing")


def test_every_answer_among_commits_is_right(tmp_path: Path) -> None:
    """64 at a time, while versions go live: the spans of each answer give its tokens when they
    are computed again offline with the weights of the versions named, and are what the engine
    logged. Nothing is lost."""
    with world(tmp_path) as made:
        made.run.publish()
        engine, port = two_ports()
        made.engine(engine, "--step-ms", "3")
        replica = made.replica(engine, port)
        ready(port)
        answers = asyncio.run(_storm(made, port, publishes=5))
        assert replica.process.poll() is None, replica.output()
        assert len(answers) >= 200
        crossed = 0
        for prompt, path, tokens, said in answers:
            versions = _versions(said, len(tokens))
            crossed += versions[0] != versions[-1]
            keys = [made.run.keys[version] for version in versions]
            start, ids = said["start"]["version"], prompt.encode()
            if start == versions[0]:
                assert tokens == expected(ids, keys), (path, said)
            else:  # let in under `start`, begun after the commit: perhaps on a prefix of `start`
                old = [made.run.keys[start]] * len(ids)
                assert any(
                    tokens == expected(ids, keys, old[:known]) for known in range(len(ids) + 1)
                ), (path, said)
        assert crossed > 10, "no commit fell into an answer: this shows nothing"
        _compare_with_log(made, answers)


def _versions(said: dict[str, Any], count: int) -> list[int]:
    """Which version wrote each token, as an answer tells it."""
    assert said["spans"] is not None, "an answer whose versions are unknown"
    if not said["spans"]:
        assert said["start"] == said["end"]
        return [said["start"]["version"]] * count
    versions = [s["version"] for s in said["spans"] for _ in range(s["start"], s["end"])]
    assert said["end"]["version"] == versions[-1]
    assert len(versions) == count
    return versions


async def _storm(
    made: World, port: int, *, publishes: int
) -> list[tuple[str, str, list[int], dict[str, Any]]]:
    answers: list[tuple[str, str, list[int], dict[str, Any]]] = []
    over = asyncio.Event()

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        count = 0
        while not over.is_set():
            count += 1
            path = ("/generate", "/v1/completions")[number % 4 == 0]
            prompt = f"client {number} question {count}"
            stream = number % 3 == 0
            body = {"prompt": prompt, "max_tokens": 12 + 7 * (number % 5), "stream": stream}
            if number % 8 == 1:
                newest = made.run.refs[-1].version
                body["weight_version"] = {"min_version": max(0, newest - 1)}
            async with session.post(f"http://127.0.0.1:{port}{path}", json=body) as response:
                data = await response.read()
            if response.status == 409:
                await asyncio.sleep(0.05)
                continue
            assert response.status == 200, data
            answers.append((prompt, path, *_read(data, stream)))

    headers = {"Authorization": f"Bearer {TOKEN}"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
        clients = [asyncio.create_task(client(session, number)) for number in range(64)]
        for _ in range(publishes):
            ref = await asyncio.to_thread(made.run.publish)
            await asyncio.to_thread(ready, port, ref.version)
            await asyncio.sleep(0.1)
        over.set()
        await asyncio.gather(*clients)
    return answers


def _read(data: bytes, stream: bool) -> tuple[list[int], dict[str, Any]]:
    if not stream:
        answer = json.loads(data)
        return answer["choices"][0]["token_ids"], answer["farcast"]
    lines = data.decode().split("\n\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith('data: {"')]
    said = [line for line in lines if line.startswith(": farcast ")]
    tokens = [token for event in events for token in event["choices"][0]["token_ids"]]
    return tokens, json.loads(said[0][10:])


def _compare_with_log(
    made: World, answers: list[tuple[str, str, list[int], dict[str, Any]]]
) -> None:
    """What was said of each answer is what the engine wrote down token by token."""
    jobs = {bytes(job["prompt"]).decode(): job for job in made.jobs()}
    assert len(jobs) == len(answers)
    for prompt, _, tokens, said in answers:
        job = jobs[prompt]
        assert job["tokens"] == tokens
        told = [int(label.split("@")[1].split(":")[0]) for label in job["labels"]]
        assert _versions(said, len(tokens)) == told


@pytest.mark.full
def test_drain_mode_lets_no_commit_into_an_answer(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        made.run.publish()
        engine, port = two_ports()
        made.engine(engine, "--step-ms", "3")
        made.replica(engine, port, "--mode", "drain")
        ready(port)
        answers = asyncio.run(_storm(made, port, publishes=2))
        assert len(answers) > 60
        assert all(said["spans"] == [] for *_, said in answers)
        _compare_with_log(made, answers)


def test_what_holds_up_a_version_for_too_long_is_ended(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        made.run.publish()
        engine, port = two_ports()
        made.engine(engine)
        made.replica(engine, port, "--drain-seconds", "0.5")
        ready(port)
        long = {"prompt": "endless", "max_tokens": 10_000_000}
        for stream in (False, True):
            made.run.publish()
            answer = ask(port, "POST", "/v1/completions", {**long, "stream": stream}, timeout=20)
            if stream:
                assert b'"type":"CutOff"' in answer.body
                assert b"[DONE]" not in answer.body
                assert "incomplete" in answer.headers
            else:
                assert answer.status == 503
                assert answer.json["error"]["type"] == "CutOff"
        ready(port, 2)
        assert [job["aborted"] for job in made.jobs()] == [True, True]


def test_a_client_that_stops_reading_does_not_hold_up_a_version(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        made.run.publish()
        engine, port = two_ports()
        made.engine(engine)
        made.replica(engine, port, "--drain-seconds", "1")
        ready(port)
        body = {"prompt": "unread", "max_tokens": 1_000_000, "stream": True, "pad": 100_000}
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(_post(json.dumps(body).encode()))
            assert client.recv(1)
            time.sleep(0.5)  # what lies between the engine and us is full now
            made.run.publish()
            ready(port, 1)
        assert wait_for(lambda: made.jobs())[0]["aborted"]


# --- engines die -----------------------------------------------------------------------------


def test_an_engine_that_is_killed_and_comes_back_is_served_only_after_a_check(
    tmp_path: Path,
) -> None:
    """kill -9 of the engine: those in flight are told, the replica is not ready, and the new
    engine (which holds other weights) answers nobody until it was brought to the version."""
    with world(tmp_path) as made:
        made.run.publish()
        port_of_engine, port = two_ports()
        engine = made.engine(port_of_engine)
        replica = made.replica(port_of_engine, port)
        ready(port)
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            body = {"prompt": "cut short", "max_tokens": 1_000_000, "stream": True}
            client.sendall(_post(json.dumps(body).encode()))
            assert client.recv(1)
            with socket.create_connection(("127.0.0.1", port), timeout=20) as whole:
                whole.sendall(_post(json.dumps({**body, "stream": False}).encode()))
                wait_for(lambda: ready(port)["in_flight"] == 2)
                time.sleep(0.1)  # on its way from the gate to the engine
                engine.kill()
                told = whole.recv(1 << 16)
            rest = b""
            while chunk := client.recv(1 << 16):
                rest += chunk
        assert told.startswith(b"HTTP/1.1 502 ")
        assert b'"type":"EngineBrokeOff"' in told
        assert b'"type":"EngineBrokeOff"' in rest
        assert b"[DONE]" not in rest
        wait_for(lambda: ask(port, "GET", "/ready", token=None).status == 503)
        question = {"prompt": "again", "max_tokens": 4}
        answer = ask(port, "POST", "/v1/completions", question)
        assert answer.status == 503
        assert "retry-after" in answer.headers
        assert ask(port, "GET", "/health", token=None).status == 200

        made.engine(port_of_engine, name="engine2")
        wrong: list[Any] = []

        def answered() -> bool:
            found = ask(port, "POST", "/v1/completions", question)
            if found.status != 200:
                return False
            if tokens_of(found) != made.run.expected("again", 0, 4):
                wrong.append(found)
            return True

        wait_for(answered)
        assert not wrong
        assert replica.process.poll() is None


def test_a_store_that_is_gone_does_not_stop_service(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        made.run.publish()
        engine, port = two_ports()
        made.engine(engine)
        replica = made.replica(engine, port)
        ready(port)
        (tmp_path / "store").rename(tmp_path / "moved")
        time.sleep(1.5)
        answer = ask(port, "POST", "/v1/completions", {"prompt": "still", "max_tokens": 2})
        assert answer.status == 200
        (tmp_path / "moved").rename(tmp_path / "store")
        made.run.publish()
        ready(port, 1)
        assert replica.stop() == 0


def test_an_engine_on_a_unix_socket_is_served_and_watched(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        made.run.publish()
        engine_port, port = two_ports()
        path = tmp_path / "s"
        engine = made.engine(engine_port, "--socket", str(path))
        made.replica(engine_port, port, "--engine-url", f"unix:{path}")
        ready(port)
        answer = ask(port, "POST", "/v1/completions", {"prompt": "socket", "max_tokens": 3})
        assert tokens_of(answer) == made.run.expected("socket", 0, 3)
        engine.kill()
        wait_for(lambda: ask(port, "GET", "/ready", token=None).status == 503)


def test_a_stopped_replica_lets_those_in_flight_finish(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        made.run.publish()
        engine, port = two_ports()
        made.engine(engine)
        replica = made.replica(engine, port)
        ready(port)
        body = json.dumps({"prompt": "finish me", "max_tokens": 400}).encode()
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            client.sendall(_post(body))
            wait_for(lambda: ready(port)["in_flight"] == 1)
            replica.process.terminate()
            wait_for(lambda: ask(port, "GET", "/ready", token=None).status == 503)
            assert ask(port, "POST", "/v1/completions", {"prompt": "late"}).status == 503
            answer = client.recv(1 << 20)
        assert answer.startswith(b"HTTP/1.1 200")
        assert replica.process.wait(20) == 0


def test_a_folder_that_is_none_and_a_run_that_is_none(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        engine, port = two_ports()
        made.engine(engine)
        gone = made.replica(engine, port, "--model", str(tmp_path / "none"), name="a")
        assert gone.process.wait(20) == 2
        assert "There is no folder" in gone.output()
        other = tmp_path / "model-c"
        other.mkdir()
        (other / ".farcast").mkdir()
        state = {"format": 1, "run_id": "another-run"}
        (other / ".farcast" / "state.json").write_text(json.dumps(state))
        made.run.publish()
        strange = made.replica(engine, port, name="c")
        assert strange.process.wait(20) == 5
        assert "belongs to the run 'another-run'" in strange.output()
        made.run.url = (tmp_path / "empty").as_uri()
        lost = made.replica(engine, port, name="b")
        assert lost.process.wait(20) == 4
        assert "There is no run in" in lost.output()
