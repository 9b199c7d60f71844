"""Replicas with a relay: their bits are the trainer's, whatever the relay does, and an honest one
reads each object once for all of them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from farcast import open_store
from farcast.fleet.registry import Registry
from farcast.lineage import RunRecord
from farcast.publish import Publisher
from farcast.replica import CheckpointDirectory, Subscriber
from farcast.store.archive import Archive
from farcast.types import VersionRef
from relay_world import Child, PlayedRelay, RelayProcess, giving
from serving_world import wait_for
from version_world import RUN, tensors

TOKEN_OPTION = ("--relay-token-env", "FARCAST_TEST_TOKEN")


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = (folder / "store").as_uri()
        self.store = open_store(self.url)
        self.archive = Archive(self.store, RUN)
        config = self.archive.put_object(b'{"of": "the run"}')
        self.archive.create_run(
            RunRecord(run_id=RUN, created="now", assets={"config.json": config})
        )
        self.publisher = Publisher(self.store, RUN)
        self.newest: VersionRef | None = None
        self.children: list[Child] = []

    def publish(self, version: int) -> VersionRef:
        self.newest = self.publisher.publish(tensors(version), version)
        return self.newest

    def relay(self, *options: str, name: str = "relay") -> RelayProcess:
        relay = RelayProcess(self.folder, self.url, *options, name=name)
        self.children.append(relay)
        return relay

    def replica(self, name: str, url: str, *options: str) -> Child:
        arguments = ("replica", "--store", self.url, "--id", name, "--relay", url, *options)
        child = Child(self.folder, name, *arguments, "--dir", str(self.folder / f"dir-{name}"))
        self.children.append(child)
        return child

    def verified(self, name: str) -> VersionRef | None:
        """What a replica's folder is found to be by hashing."""
        target = CheckpointDirectory(self.folder / f"dir-{name}")
        return Subscriber(self.store, RUN, target).plan().have

    def objects(self) -> set[str]:
        return {info.key for info in self.store.list("objects/")}

    def reached(self, names: list[str]) -> bool:
        assert self.newest is not None
        held = Registry(self.store).replicas()
        return all(n in held and held[n].record.root == self.newest.root for n in names)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    for child in made.children:
        child.kill()


def test_four_replicas_cost_the_line_one(world: World) -> None:
    world.publish(0)
    relay = world.relay()
    names = [f"r{i}" for i in range(4)]
    replicas = [world.replica(name, relay.url, *TOKEN_OPTION) for name in names]
    for version in (1, 2):
        wait_for(lambda: world.reached(names))
        world.publish(version)
    wait_for(lambda: world.reached(names))
    read = relay.objects_read()
    assert len(read) == len(set(read))  # each once, for four
    assert set(read) <= world.objects()
    for name, replica in zip(names, replicas, strict=True):
        assert replica.objects_read() == []
        assert "gives" not in replica.said()
        assert world.verified(name) == world.newest
        record = Registry(world.store).replicas()[name].record
        assert 0 < record.bytes_relayed < record.bytes_fetched


def test_replicas_go_on_without_their_relay_and_use_the_next(world: World) -> None:
    world.publish(0)
    relay = world.relay()
    names = ["r0", "r1"]
    replicas = [world.replica(name, relay.url, *TOKEN_OPTION) for name in names]
    wait_for(lambda: world.reached(names))
    relay.kill()
    world.publish(1)
    wait_for(lambda: world.reached(names))
    for name, replica in zip(names, replicas, strict=True):
        assert len(replica.objects_read()) == 1
        assert "does not answer" in replica.said()
        assert "objects come from the store itself" in replica.said()
        assert world.verified(name) == world.newest


@pytest.mark.parametrize(
    ("status", "words"), [(200, "gave other bytes than"), (401, "does not take the token")]
)
def test_a_lying_relay_and_a_wrong_token_cost_one_try(
    world: World, status: int, words: str
) -> None:
    world.publish(0)
    world.publish(1)
    liar = PlayedRelay(giving(status, b"lies"))
    result = world.folder / "out.json"
    replica = world.replica("r0", liar.url, *TOKEN_OPTION, "--once", "--json", str(result))
    assert replica.process.wait(30) == 0, replica.said()
    liar.close()
    assert json.loads(result.read_text())["root"] == world.archive.manifest(1).root
    assert world.verified("r0") == world.newest
    assert len(liar.asked) == 1
    assert replica.said().count(words) == 1
    assert Registry(world.store).replicas()["r0"].record.bytes_relayed == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--relay", "http://h:1"), "--relay-token-file FILE or with --relay-token-env"),
        (("--relay", "here", *TOKEN_OPTION), "A relay's address is http://HOST:PORT"),
        (TOKEN_OPTION, "A relay's token goes with --relay URL"),
    ],
)
@pytest.mark.parametrize("command", ["worker", "up", "replica"])
def test_what_cannot_be_meant_is_said_before_anything_is_done(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: str,
    options: tuple[str, ...],
    words: str,
) -> None:
    from farcast.cli.main import main

    monkeypatch.setenv("FARCAST_TEST_TOKEN", "a-token-of-tests-0123456789")
    monkeypatch.chdir(tmp_path)
    more = ("--dir", "d") if command == "replica" else ()
    with pytest.raises(SystemExit) as left:
        main([command, "--store", "st", *options, *more])
    assert left.value.code == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_workers_of_up_are_told_of_the_relay(tmp_path: Path) -> None:
    from farcast.cli.options import ReachOptions

    token = tmp_path / "token"
    told = ReachOptions("s3://b/r", None, "http://h:1", token, None, None)
    assert told.arguments() == ("--relay", "http://h:1", "--relay-token-file", str(token))
    told = ReachOptions("s3://b/r", "1mbit,1ms", None, None, None, token, "warn")
    expected = ("--link", "1mbit,1ms", "--trusted-key", str(token), "--expired", "warn")
    assert told.arguments() == expected
