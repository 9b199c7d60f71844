"""A relay as a process: each object crosses the line once, and nothing it does can harm."""

import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from farcast import open_store
from farcast.config import LinkConfig
from farcast.fleet.signals import StopRequest
from farcast.gateway.tokens import Token
from farcast.relay import serving
from farcast.relay.relay_process import RelayOptions, serve_relay
from farcast.store import CountingStore, Store
from farcast.store.relayed import RelayAddress, RelayedStore
from relay_world import AUTHORIZATION, RelayProcess, digest_of, payload
from servers import free_ports
from serving_world import ask, wait_for

SIZE = 3_000_000


class World:
    """A store with some objects of 3 MB, and relays before it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = (folder / "store").as_uri()
        self.store: Store = open_store(self.url)
        self.relays: list[RelayProcess] = []

    def put(self, seed: int, size: int = SIZE) -> tuple[str, bytes]:
        data = payload(size, seed)
        digest = digest_of(data)
        self.store.put(f"objects/{digest}", data)
        return digest, data

    def relay(self, *options: str, name: str = "relay") -> RelayProcess:
        self.relays.append(RelayProcess(self.folder, self.url, *options, name=name))
        return self.relays[-1]

    def reader(self, relay: RelayProcess) -> tuple[RelayedStore, CountingStore, list[str]]:
        behind, said = CountingStore(self.store), list[str]()
        address = RelayAddress(url=relay.url, authorization=AUTHORIZATION)
        return RelayedStore(behind, address, tell=said.append), behind, said


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    for relay in made.relays:
        relay.kill()


def metric(relay: RelayProcess, name: str) -> float:
    text = ask(relay.port, "GET", "/metrics").body.decode()
    return next(float(x.split()[1]) for x in text.splitlines() if x.startswith(f"{name} "))


def test_fifty_who_ask_at_once_cost_one_read_and_a_restart_costs_none(world: World) -> None:
    digest, data = world.put(1)
    # At 80 Mbit/s an object takes 0.3 s, in which all of them ask.
    relay = world.relay("--link", "80mbit,20ms")
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: relay.ask(digest), range(50)))
    assert all(answer.status == 200 and answer.body == data for answer in answers)
    assert relay.objects_read() == [f"objects/{digest}"]
    assert metric(relay, "farcast_relay_asked_total") == 50
    assert metric(relay, "farcast_relay_store_reads_total") == 1
    assert metric(relay, "farcast_relay_sent_bytes_total") == 50 * SIZE
    relay.kill()
    again = world.relay(name="again")
    assert "1 objects at hand" in again.said()
    assert again.ask(digest).body == data
    assert again.objects_read() == []
    assert again.stop() == 0
    assert "gave 1 objects (3000000 bytes) for 0 reads" in again.said()


def test_who_waits_hears_that_the_object_is_on_its_way(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay that fetches for long is told from one that is gone: it answers every ten seconds,
    here every 50 ms."""
    monkeypatch.setattr(serving, "WAIT_SECONDS", 0.05)
    digest, data = world.put(1)
    (port,) = free_ports(1)
    options = RelayOptions(
        store_url=world.url,
        folder=world.folder / "cache",
        token=Token(AUTHORIZATION.split()[1]),
        size=10**9,
        port=port,
        link=LinkConfig(rate=1e7, rtt=0.02),  # 0.3 s
    )
    stop = StopRequest()  # not entered: nobody sends signals here
    thread = threading.Thread(target=serve_relay, args=(options, stop))
    thread.start()
    try:
        wait_for(lambda: ask(port, "GET", "/health").status == 200)
        assert ask(port, "GET", f"/objects/{digest}").status == 202
        behind, said = CountingStore(world.store), list[str]()
        address = RelayAddress(url=f"http://127.0.0.1:{port}", authorization=AUTHORIZATION)
        reader = RelayedStore(behind, address, tell=said.append)
        assert reader.get(f"objects/{digest}", max_bytes=SIZE) == data
        assert behind.traffic.total_requests == 0
        assert said == []
    finally:
        stop._event.set()
        thread.join(20)
    assert not thread.is_alive()


def test_who_has_no_token_learns_and_changes_nothing(world: World) -> None:
    digest, _ = world.put(1)
    relay = world.relay()
    for headers in ({}, {"Authorization": "Bearer wrong-token-0123456789"}, {"Authorization": "x"}):
        for path in (f"/objects/{digest}", f"/objects/{digest}?token=a-token", "/metrics", "/x"):
            answer = ask(relay.port, "GET", path, token=None, headers=headers)
            assert answer.status == 401
    assert relay.objects_read() == []
    assert "a-token-of-tests" not in relay.said()


PATHS = [
    "/objects/",
    "/objects/..%2f..%2frun.json",
    "/objects/../run.json",
    "/run.json",
    "/objects/" + "A" * 64,
    "/objects/" + "a" * 63 + "/",
    "/objects/" + "a" * 64 + "?x",
    "//objects/" + "a" * 64,
    "/objects/%61" + "a" * 63,
    "/versions/000000000000.json",
    "/objects/" + "a" * 9000,
]


def test_what_is_no_digest_is_no_path(world: World) -> None:
    relay = world.relay()
    for path in PATHS:
        assert ask(relay.port, "GET", path).status in (400, 404), path
    assert ask(relay.port, "POST", "/objects/" + "a" * 64).status == 404
    assert relay.objects_read() == []
    assert not list((relay.folder / "objects").iterdir())


def test_what_the_store_does_not_have_or_has_damaged(world: World) -> None:
    digest, data = world.put(1)
    relay = world.relay()
    assert relay.ask("0" * 64).status == 404
    world.store.put(f"objects/{digest}", data[:-1] + b"!")
    assert relay.ask(digest).status == 502
    assert not list((relay.folder / "objects").glob("*/*"))
    reader, behind, said = world.reader(relay)
    assert reader.get(f"objects/{digest}", max_bytes=SIZE) == data[:-1] + b"!"  # the store's word
    assert behind.traffic.requests["get"] == 1
    assert "answers with status 502" in said[0]


def kept(relay: RelayProcess, digest: str) -> Path:
    (path,) = (relay.folder / "objects").glob(f"*/{digest}.*")
    return path


def spoil(path: Path, left: int | None) -> None:
    """Change one byte, or cut a file to `left`."""
    data = path.read_bytes()
    changed = bytes([data[0] ^ 1]) + data[1:]
    path.write_bytes(changed if left is None else data[:left])


@pytest.mark.parametrize("restarted", [False, True])
def test_a_disk_that_rots_is_found_out_and_made_good(world: World, restarted: bool) -> None:
    """More than one part has left before the hash is wrong: the answer breaks off."""
    digest, data = world.put(1)
    relay = world.relay()
    assert relay.ask(digest).body == data
    for before in range(2):
        spoil(kept(relay, digest), None)
        if restarted:
            relay.kill()
            relay = world.relay(name=f"again{before}")
        if before:
            answer = relay.ask(digest)
            assert answer.headers["incomplete"] == "yes"
            assert len(answer.body) < int(answer.headers["content-length"]) == SIZE
        else:
            reader, behind, said = world.reader(relay)
            assert reader.get(f"objects/{digest}", max_bytes=SIZE) == data
            assert behind.traffic.requests["get"] == 1  # nothing whole was to be had there
            assert "does not answer" in said[0]
        answer = relay.ask(digest)
        assert (answer.body, "incomplete" in answer.headers) == (data, False)
        assert kept(relay, digest).read_bytes() == data
    assert metric(relay, "farcast_relay_damaged_total") == (1 if restarted else 2)


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize(
    ("size", "left"),
    [(SIZE, 0), (SIZE, SIZE // 2), (1000, 0), (1000, 999), (1000, None)],
    ids=["empty", "half", "small-empty", "small-cut", "small-rotten"],
)
def test_what_is_cut_or_short_enough_to_hash_first_costs_no_reader_anything(
    world: World, size: int, left: int | None, restarted: bool
) -> None:
    digest, data = world.put(1, size)
    relay = world.relay()
    assert relay.ask(digest).body == data
    spoil(kept(relay, digest), left)
    if restarted:
        relay.kill()
        relay = world.relay(name="again")
        assert ("1 objects were cut on the disk" in relay.said()) == (left is not None)
    for _ in range(2):
        reader, behind, said = world.reader(relay)
        assert reader.get(f"objects/{digest}", max_bytes=SIZE) == data
        assert (behind.traffic.total_requests, said) == (0, [])
    assert kept(relay, digest).read_bytes() == data
    assert metric(relay, "farcast_relay_damaged_total") == 1
    assert metric(relay, "farcast_relay_from_disk_total") == 1


def test_a_relay_killed_in_the_middle_costs_nobody_anything_but_the_line(world: World) -> None:
    digest, data = world.put(1, 8_000_000)
    relay = world.relay("--link", "16mbit,20ms")  # 4 s
    readers = [world.reader(relay) for _ in range(4)]
    got: list[bytes] = []

    def read(reader: RelayedStore) -> None:
        got.append(reader.get(f"objects/{digest}", max_bytes=len(data)))

    threads = [threading.Thread(target=read, args=(reader,)) for reader, _, _ in readers]
    for thread in threads:
        thread.start()
    wait_for(relay.objects_read)
    relay.kill()
    for thread in threads:
        thread.join(10)
    assert got == [data] * 4
    assert all(len(said) == 1 and "does not answer" in said[0] for _, _, said in readers)
    assert not list((relay.folder / "objects").glob("*/*"))  # half an object has no name


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """A real file system of `size` bytes, where that is allowed."""
    folder.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(options, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_makes_a_relay_pass_on_what_it_cannot_keep(world: World) -> None:
    with small_disk(world.folder / "cache", 4_000_000):
        (first, one), (second, two) = world.put(1), world.put(2)
        third, three = world.put(3, 5_000_000)
        relay = world.relay("--size", "1GB")
        assert relay.ask(first).body == one
        assert relay.ask(second).body == two  # in the place of the first
        assert [p.stem for p in (relay.folder / "objects").glob("*/*")] == [second]
        assert relay.ask(third).body == three
        assert relay.ask(third).body == three
        assert "without being kept: No space left on device" in relay.said()
        assert relay.said().count("without being kept") == 1
        assert metric(relay, "farcast_relay_unkept_total") == 2
        assert relay.ask(first).body == one


def test_two_relays_do_not_share_a_folder_and_others_files_are_safe(world: World) -> None:
    relay = world.relay()
    command = [sys.executable, "-m", "farcast", "relay", "--store", world.url, "--port", "0"]
    command += ["--token-env", "FARCAST_TEST_TOKEN"]
    environment = {**os.environ, "FARCAST_TEST_TOKEN": AUTHORIZATION}
    for folder, words in ((relay.folder, "Another relay works in"), (world.folder, "other files")):
        second = subprocess.run(
            [*command, "--folder", str(folder)], capture_output=True, text=True, env=environment
        )
        assert second.returncode == 2
        assert words in second.stderr


def test_memory_stays_small_while_many_take_a_large_object_slowly(world: World) -> None:
    """What is passed on is read in pieces: 32 slow readers of 64 MB hold no 2 GB."""
    digest, data = world.put(1, 64_000_000)
    relay = world.relay()
    assert len(relay.ask(digest).body) == len(data)
    before = _resident(relay)
    with contextlib.ExitStack() as stack:
        for _ in range(32):
            connection = stack.enter_context(contextlib.closing(_begin(relay, digest)))
            assert connection.recv(1000)
        assert _resident(relay) - before < 300_000_000
    assert relay.ask(digest).status == 200


def _resident(relay: RelayProcess) -> int:
    pages = Path(f"/proc/{relay.process.pid}/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def _begin(relay: RelayProcess, digest: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", relay.port))
    head = [f"GET /objects/{digest} HTTP/1.1", "Host: x", f"Authorization: {AUTHORIZATION}", "", ""]
    connection.sendall("\r\n".join(head).encode())
    return connection
