"""A follower that is told to leave does so between two commits."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from farcast.engines.following import Commit, Follower
from farcast.publish import Publisher
from farcast.replica import MemoryTarget, Subscriber
from farcast.store import MemoryStore
from version_world import RUN, tensors


class World:
    """A run of one version, and a gate that is shut until a test lets a commit through."""

    def __init__(self) -> None:
        store = MemoryStore()
        with Publisher(store, RUN) as publisher:
            self.ref = publisher.publish(tensors(0), step=0)
        self.target = MemoryTarget()
        self.subscriber = Subscriber(store, RUN, self.target)
        self.entered, self.open = threading.Event(), threading.Event()
        self.commits: list[Commit] = []
        self.follower = Follower(
            self.subscriber, self.gate, poll_seconds=0.01, on_commit=self.commits.append
        )

    @contextlib.contextmanager
    def gate(self) -> Iterator[None]:
        self.entered.set()
        assert self.open.wait(10)
        yield


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.open.set()
    made.follower.close()


def test_it_waits_for_a_commit_that_is_under_way(world: World) -> None:
    """A process that ended here would leave the engine paused, between two versions."""
    world.follower.start()
    assert world.entered.wait(10)
    assert not world.follower.leave(0.05)
    threading.Timer(0.1, world.open.set).start()
    assert world.follower.leave(10)
    assert world.target.ref == world.ref


def test_what_is_staged_meanwhile_is_not_committed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage: Callable[[], Any] = world.subscriber.stage
    staging, go_on = threading.Event(), threading.Event()

    def slow() -> Any:
        staging.set()
        assert go_on.wait(10)
        return stage()

    monkeypatch.setattr(world.subscriber, "stage", slow)
    world.open.set()
    world.follower.start()
    assert staging.wait(10)
    began = time.monotonic()
    assert world.follower.leave(10)
    assert time.monotonic() - began < 5, "staging may take minutes"
    go_on.set()
    world.follower.close()
    assert not world.entered.is_set()
    assert world.target.ref is None
