"""Coming late: how many requests it takes to find the way, and that it leads to the right bits."""

import numpy as np
import pytest

from farcast.publish import Publisher
from farcast.replica import MemoryTarget, Subscriber
from farcast.store import CountingStore, MemoryStore, Store
from farcast.store.archive import Archive
from version_world import RUN, plain

VERSIONS = 128


def published(*, squash: int | None, anchor_every: int) -> Store:
    """A run whose newest version is also an anchor, far larger than the deltas before it."""
    store, rng = MemoryStore(), np.random.default_rng(5)
    weights = {"w": rng.integers(0, 1 << 16, 1 << 18, dtype=np.uint16)}
    with Publisher(store, RUN, squash=squash, anchor_every=anchor_every) as publisher:
        for step in range(VERSIONS + 1):
            publisher.publish(weights, step=step)
            weights["w"][(step * 977) % weights["w"].size] ^= 1
    return store


@pytest.mark.parametrize("anchor_every", [VERSIONS, 2048])
def test_the_way_past_many_versions_is_found_with_few_manifests(anchor_every: int) -> None:
    store = published(squash=4, anchor_every=anchor_every)
    counted = CountingStore(store)
    first = Archive(store, RUN)
    have = first.manifest(0).ref, first.rebuild(0)
    subscriber = Subscriber(counted, RUN, MemoryTarget(have[1]))
    assert subscriber.sync().version == VERSIONS
    assert subscriber.last.objects == 2, "0 -> 64 -> 128"
    assert subscriber.last.bytes_fetched < 20_000, "the anchor is half a megabyte"
    assert counted.traffic.requests["get"] <= 14
    held = {name: subscriber.target.read(name) for name in subscriber.target.entries}
    assert plain(held) == plain(Archive(store, RUN).rebuild(VERSIONS))


def test_weights_of_a_version_before_the_newest_anchor_are_recognised() -> None:
    store = published(squash=None, anchor_every=VERSIONS)
    archive = Archive(store, RUN)
    counted = CountingStore(store)
    subscriber = Subscriber(counted, RUN, MemoryTarget(archive.rebuild(VERSIONS - 40)))
    subscriber.sync()
    assert subscriber.ref == archive.manifest(VERSIONS).ref
    assert subscriber.last.bytes_fetched < 50_000, "deltas, not the anchor"


def test_who_was_sent_past_removed_versions_follows_from_there() -> None:
    store = MemoryStore()
    weights = {"w": np.zeros(100, np.uint16)}
    with Publisher(store, RUN, anchor_every=4, workers=1) as publisher:
        publisher.publish(weights, step=0)
        subscriber = Subscriber(store, RUN, MemoryTarget(), workers=1)
        subscriber.sync()
        for step in range(1, 10):
            weights["w"][step] += 1
            publisher.publish(weights, step=step)
        publisher.collect_garbage(keep=1, grace=0.0)
        subscriber.sync(to=8)
        assert subscriber.sync().version == 9
