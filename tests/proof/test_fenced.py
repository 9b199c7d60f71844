"""A trainer that was superseded is told so, whatever it does next and however long it slept."""

from collections.abc import Callable

import pytest

from farcast.errors import StoreUnavailableError, VersionConflictError
from farcast.publish import Publisher
from farcast.store import MemoryStore
from farcast.store.archive import Archive
from farcast.store.testing import FaultStore, LoseReply, Rule
from version_world import RUN, bits_of, contents, rebuilt, tensors


def trainer(store: MemoryStore | FaultStore) -> Publisher:
    return Publisher(store, RUN, anchor_every=2, workers=1)


@pytest.mark.parametrize("versions_before_the_sleep", [0, 2])
def test_a_sleeper_cannot_write_a_version_that_was_removed_meanwhile(
    versions_before_the_sleep: int,
) -> None:
    store = MemoryStore()
    sleeper = trainer(store)
    for step in range(versions_before_the_sleep):
        sleeper.publish(tensors(step), step=step)
    other = trainer(store)
    for step in range(10, 18):
        other.publish(tensors(step), step=step)
    other.collect_garbage(keep=1, grace=0.0)
    before = contents(store, "versions/")
    for _ in range(2):
        with pytest.raises(VersionConflictError):
            sleeper.publish(tensors(3), step=3)
    assert contents(store, "versions/") == before
    newest = Archive(store, RUN).newest()
    assert newest is not None
    assert newest.step == 17
    assert other.publish(tensors(18), step=18).version == newest.version + 1


@pytest.mark.parametrize(
    "again",
    [lambda pub: pub.publish(tensors(1), step=1), lambda pub: pub.rollback(1)],
    ids=["publish", "rollback"],
)
def test_repeating_what_is_no_longer_newest_is_refused(
    again: Callable[[Publisher], object],
) -> None:
    store = MemoryStore()
    first = trainer(store)
    for step in range(2):
        first.publish(tensors(step), step=step)
    trainer(store).publish(tensors(5), step=5)
    with pytest.raises(VersionConflictError):
        again(first)
    newest = Archive(store, RUN).newest()
    assert newest is not None
    assert newest.step == 5


def test_a_rollback_past_a_commit_whose_reply_was_lost_is_published() -> None:
    store = FaultStore()
    publisher = trainer(store)
    for step in range(2):
        publisher.publish(tensors(step), step=step)
    store.add(Rule(LoseReply(), verb="put", prefix="versions/"))
    with pytest.raises(StoreUnavailableError):
        publisher.publish(tensors(2), step=2)
    assert publisher.rollback(1).version == 3
    newest = Archive(store, RUN).newest()
    assert newest is not None
    assert rebuilt(store, newest.version) == bits_of(tensors(1))
