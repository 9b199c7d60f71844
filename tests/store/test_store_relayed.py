"""A store with a relay nearby gives exactly what the store alone would, whatever the relay does."""

import http.server
import time
from collections.abc import Callable, Iterator

import pytest

from farcast.errors import ConfigError, IntegrityError, LimitError, ObjectNotFoundError
from farcast.store import CountingStore, MemoryStore, relayed
from farcast.store.relayed import (
    AWAY_SECONDS,
    DISTRUST_SECONDS,
    LONGEST_AWAY_SECONDS,
    RelayAddress,
    RelayedStore,
)
from relay_world import AUTHORIZATION, PlayedRelay, Reply, digest_of, giving, payload

DATA = payload(300_000)
KEY = f"objects/{digest_of(DATA)}"


class World:
    """A store with one object, behind a relay that does what the test says."""

    def __init__(self, reply: Reply) -> None:
        self.relay = PlayedRelay(reply)
        self.store = CountingStore(MemoryStore())
        self.store.put(KEY, DATA)
        self.said: list[str] = []
        self.now = 100.0
        address = RelayAddress(url=self.relay.url, authorization=AUTHORIZATION)
        self.relayed = RelayedStore(
            self.store, address, tell=self.said.append, clock=lambda: self.now
        )

    def get(self) -> bytes:
        return self.relayed.get(KEY, max_bytes=len(DATA))

    @property
    def reads(self) -> int:
        return self.store.traffic.requests.get("get", 0)


@pytest.fixture
def world() -> Iterator[Callable[[Reply], World]]:
    made: list[World] = []

    def make(reply: Reply) -> World:
        made.append(World(reply))
        return made[-1]

    yield make
    for one in made:
        one.relay.close()


Make = Callable[[Reply], World]


def test_objects_come_from_the_relay_and_nothing_else_does(world: Make) -> None:
    near = world(giving(200, DATA))
    assert near.get() == DATA
    assert near.get() == DATA
    assert near.reads == 0
    assert near.relayed.bytes_relayed == 2 * len(DATA)
    assert near.relay.asked == [f"/{KEY}"] * 2
    for key in ("versions/000000000001.json", "fleet/trainer.json", f"{KEY}x", "objects/a/b"):
        near.relayed.put(key, b"x", if_absent=True)
        assert near.relayed.get(key, max_bytes=9) == b"x"
    assert near.relayed.get_range(KEY, 1, 2) == DATA[1:3]
    assert len(list(near.relayed.list("objects/"))) == 3
    near.relayed.delete(KEY)
    assert len(near.relay.asked) == 2
    assert near.said == []


@pytest.mark.parametrize(
    ("reply", "pause", "words"),
    [
        (giving(200, DATA[:-1] + b"!"), DISTRUST_SECONDS, "gave other bytes than"),
        (giving(200, b""), DISTRUST_SECONDS, "gave other bytes than"),
        (giving(200, DATA + b"!"), DISTRUST_SECONDS, "gave more bytes than the object has"),
        (giving(200, DATA, length=1 << 62), DISTRUST_SECONDS, "gave more bytes"),
        (giving(200, DATA[:-1], length=len(DATA)), AWAY_SECONDS, "does not answer (Incomplete"),
        (giving(401), DISTRUST_SECONDS, "does not take the token"),
        (giving(302), AWAY_SECONDS, "answers with status 302"),
        (giving(502), AWAY_SECONDS, "answers with status 502"),
        (giving(503, b"x" * 9000), AWAY_SECONDS, "does not answer (HTTPException)"),
    ],
    ids=["lie", "empty", "longer", "huge", "broken", "token", "redirect", "502", "long"],
)
def test_a_relay_that_fails_costs_one_try_and_is_left_alone_for_a_while(
    world: Make, reply: Reply, pause: float, words: str
) -> None:
    near = world(reply)
    for _ in range(3):
        assert near.get() == DATA
    assert near.reads == 3
    assert len(near.relay.asked) == 1
    assert len(near.said) == 1
    assert words in near.said[0]
    assert f"asked again in {pause:.0f} s" in near.said[0]
    near.now += pause
    assert near.get() == DATA
    assert len(near.relay.asked) == 2
    assert len(near.said) == 1  # no news
    assert near.relayed.bytes_relayed == 0


def test_one_that_is_not_there_is_asked_less_and_less_often(world: Make) -> None:
    near = world(giving(200, DATA))
    near.relay.close()
    for pause in (5.0, 10.0, 20.0, 40.0, LONGEST_AWAY_SECONDS, LONGEST_AWAY_SECONDS):
        assert near.get() == DATA
        near.now += pause - 0.1
        began = time.monotonic()
        assert near.get() == DATA  # not asked
        assert time.monotonic() - began < 1
        near.now += 0.1
    assert len(near.said) == 1


def test_one_that_comes_back_is_used_again(world: Make) -> None:
    answers = [giving(500), giving(200, DATA)]
    near = world(lambda handler: answers.pop(0)(handler))
    assert near.get() == DATA
    near.now += AWAY_SECONDS
    assert near.get() == DATA
    assert near.reads == 1
    assert near.said[1] == f"the relay {near.relay.url} gives objects again"


def test_what_it_does_not_have_is_read_from_the_store_and_it_is_asked_again(world: Make) -> None:
    near = world(giving(404))
    assert near.get() == DATA
    assert near.get() == DATA
    assert len(near.relay.asked) == 2
    assert near.said == []
    near.store.delete(KEY)
    with pytest.raises(ObjectNotFoundError):
        near.get()


def test_what_is_on_its_way_is_waited_for(world: Make) -> None:
    answers = [giving(202), giving(202), giving(200, DATA)]
    near = world(lambda handler: answers.pop(0)(handler))
    assert near.get() == DATA
    assert near.reads == 0


def test_no_relay_holds_anybody_up_for_long(world: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that says for ever that it is on its way, nor one that gives a byte now and then,
    in its head or in its body, nor one that says nothing."""
    monkeypatch.setattr(relayed, "PATIENCE_SECONDS", 0.4)
    monkeypatch.setattr(relayed, "SLOWEST_RATE", 1e9)

    def drip(handler: http.server.BaseHTTPRequestHandler, first: bytes, more: bytes) -> None:
        handler.wfile.write(first)
        for _ in range(100):
            handler.wfile.write(more)
            time.sleep(0.05)

    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n" % len(DATA)
    for reply in (
        giving(202),
        lambda handler: drip(handler, head + b"\r\n", b"x"),
        lambda handler: drip(handler, head + b"Connection: close\r\n\r\n", b"x"),
        lambda handler: drip(handler, head, b"A"),
        lambda handler: drip(handler, b"", b""),
    ):
        near = world(reply)
        began = time.monotonic()
        assert near.get() == DATA
        assert time.monotonic() - began < 3
        assert len(near.said) == 1


def test_the_stores_own_refusals_stay(world: Make) -> None:
    near = world(giving(404))
    with pytest.raises(LimitError):
        near.relayed.get(KEY, max_bytes=len(DATA) - 1)
    near.store.put(KEY, b"damaged")
    from farcast.lineage import ObjectRef
    from farcast.store.archive import Archive

    with pytest.raises(IntegrityError):
        Archive(near.relayed, "r").get_object(ObjectRef(digest=digest_of(DATA), size=len(DATA)))


def test_a_key_that_is_none_asks_nobody(world: Make) -> None:
    from farcast.errors import InvalidKeyError

    near = world(giving(200, DATA))
    for key in ("objects/../run.json", f"objects/{'a' * 63}/", "/objects", "objects/a b"):
        with pytest.raises(InvalidKeyError):
            near.relayed.get(key, max_bytes=9)
    assert near.relay.asked == []


@pytest.mark.parametrize(
    "url",
    [
        "ftp://h:1",
        "http://",
        "http://user:word@h:1",
        "http://h:1/path",
        "http://h:x",
        "http://[::1",
        "http://h?q",
        "h:1",
    ],
)
def test_an_address_is_an_address(url: str) -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        RelayAddress(url=url, authorization=AUTHORIZATION)


def test_the_token_is_in_no_text(world: Make) -> None:
    near = world(giving(401))
    near.get()
    for text in (repr(near.relayed), *near.said):
        assert AUTHORIZATION.split()[1] not in text
    address = RelayAddress(url="http://h:1", authorization=AUTHORIZATION)
    assert AUTHORIZATION.split()[1] not in repr(address)
