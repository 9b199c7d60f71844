"""The adapter for SGLang, against a fake that keeps to its published routes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_sglang import FakeSglang
from group_engine import weights
from test_engine_contract import RUN, write_folder

from farcast.engines.folder_engine import EngineFolder
from farcast.engines.http_client import HttpClient
from farcast.engines.http_engine import label_of
from farcast.engines.sglang_engine import SglangEngine
from farcast.errors import (
    ConfigError,
    EngineUnreachableError,
    FarcastError,
    IntegrityError,
    TargetUncertainError,
)
from farcast.publish import Publisher
from farcast.replica import Subscriber
from farcast.store import MemoryStore


class World:
    """A fake server at version 0 and what follows a run for it."""

    def __init__(self, fake: FakeSglang, model: Path, *, pause: str = "retract") -> None:
        self.fake = fake
        self.store = MemoryStore()
        self.publisher = Publisher(self.store, RUN)
        self.engine = SglangEngine(HttpClient(fake.address), pause=pause)  # type: ignore[arg-type]
        self.target = EngineFolder(self.engine, model, drops_caches=True)
        self.subscriber = Subscriber(self.store, RUN, self.target)
        self.refs = [self.publisher.publish(weights(0), step=0)]
        self.subscriber.sync()
        self.target.adopt()

    def publish(self) -> None:
        number = len(self.refs)
        self.refs.append(self.publisher.publish(weights(number), step=number))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    model = write_folder(tmp_path / "model", weights(0))
    with FakeSglang.started(model) as fake:
        yield World(fake, model)


def test_the_routes_of_a_commit_in_their_order(world: World) -> None:
    world.publish()
    staged = world.subscriber.stage()
    assert staged is not None
    world.fake.calls.clear()
    world.subscriber.commit(staged)
    kept = [call for call in world.fake.calls if call != "/get_weights_by_name"]
    assert kept == [
        "/pause_generation",
        "/update_weights_from_disk",
        "/flush_cache",
        "/get_weight_version",
        "/continue_generation",
    ]
    assert world.engine.label() == label_of(world.refs[1])
    assert world.fake.paused is None


def test_the_same_prompt_after_a_commit_meets_no_old_prefix(world: World) -> None:
    """Case 019."""
    old = world.fake.answer("a prompt")
    world.publish()
    world.subscriber.sync()
    new = world.fake.answer("a prompt")
    assert new != old
    assert new == world.fake.answer("a prompt", extra_key="never used before")


def test_a_cache_that_can_not_be_flushed_fails_the_commit(world: World) -> None:
    world.engine = SglangEngine(HttpClient(world.fake.address), pause="in_place")
    world.target._engine = world.engine
    world.fake.running = 2
    world.publish()
    before = dict(world.fake.weights)
    with pytest.raises(TargetUncertainError):  # nor can the old version's prefixes be dropped
        world.subscriber.sync()
    assert world.fake.paused == "in_place"
    assert all((world.fake.weights[name] == before[name]).all() for name in before)


def test_requests_in_flight_survive_retracting(world: World) -> None:
    world.fake.running = 3
    world.publish()
    world.subscriber.sync()
    assert world.fake.running == 3


def test_a_load_that_ends_half_way_is_loaded_back(world: World) -> None:
    answer = world.fake.answer("a prompt")
    world.publish()
    world.fake.broken_after = 4
    with pytest.raises(FarcastError):
        world.subscriber.sync()
    world.fake.cache.clear()
    assert world.fake.answer("a prompt") == answer
    assert world.engine.label() == label_of(world.refs[0])
    assert world.subscriber.sync() == world.refs[1]


def test_a_load_that_does_nothing_is_not_believed(world: World) -> None:
    """Case 061."""
    world.publish()
    world.fake.loads_nothing = True
    with pytest.raises((IntegrityError, TargetUncertainError)):
        world.subscriber.sync()
    assert world.fake.weights["embed.weight"].tobytes() == weights(0)["embed.weight"].data.tobytes()


def test_a_server_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "model", weights(0))
    with FakeSglang.started(model) as fake:
        world = World(fake, model)
    world.publish()
    with pytest.raises(EngineUnreachableError, match="did not answer"):
        world.subscriber.sync()


def test_values_of_a_tensor_come_row_by_row(world: World) -> None:
    found = world.engine.sample("embed.weight", 11)
    assert found is not None
    assert len(found) == 11
    assert world.engine.sample("no such tensor", 4) is None


@pytest.mark.parametrize(
    "address",
    [
        "https://host:1",
        "http://user:secret@host:1",
        "http://user:secret@host:99999",
        "http://user:secret@[host",
        "host:1",
        "http://host:1/path",
        "",
    ],
)
def test_addresses_that_are_none_are_refused_without_repeating_them(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HttpClient(address)
    assert "secret" not in str(caught.value)


def test_a_unix_socket_is_an_address(tmp_path: Path) -> None:
    with pytest.raises(EngineUnreachableError, match="did not answer"):
        HttpClient(f"unix:{tmp_path / 'none.sock'}").get("/health")
