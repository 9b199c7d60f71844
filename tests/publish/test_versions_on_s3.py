"""Versions on a real S3 server: two trainers race, one is killed, a reader follows."""

import threading
from collections.abc import Iterator

import pytest

from farcast.errors import VersionConflictError
from farcast.publish import Publisher
from farcast.store import Store
from farcast.store.archive import Archive
from farcast.store.testing import Crash, FaultStore, LoseReply, Rule
from servers import Bucket, seaweed
from version_world import RUN, bits_of, rebuilt, tensors

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as made:
        yield made


@pytest.fixture
def store(bucket: Bucket, request: pytest.FixtureRequest) -> Store:
    return bucket.open(request.node.name)


def test_exactly_one_of_racing_trainers_wins_each_version(store: Store) -> None:
    Publisher(store, RUN).publish(tensors(0), step=0)
    trainers = [Publisher(store, RUN) for _ in range(6)]
    outcomes: list[object] = []

    def race(index: int) -> None:
        try:
            outcomes.append(trainers[index].publish(tensors(1, seed=index), step=index + 1))
        except VersionConflictError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=race, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 6
    assert sum(isinstance(outcome, VersionConflictError) for outcome in outcomes) == 5
    step = Archive(store, RUN).manifest(1).step
    assert rebuilt(store, 1) == bits_of(tensors(1, seed=step - 1))


def test_a_crash_a_restart_and_a_reader(store: Store) -> None:
    reader = Archive(store, RUN)
    faulty = FaultStore(store)
    with Publisher(faulty, RUN, anchor_every=3, squash=2, part_bytes=300) as first:
        for step in range(5):
            first.publish_async(tensors(step), step=step)
        first.publish(tensors(5), step=5)
        faulty.add(Rule(LoseReply(Crash()), verb="put", prefix="versions/"))
        with pytest.raises(Crash):
            first.publish(tensors(6), step=6)
    again = Publisher(store, RUN, anchor_every=3, squash=2, part_bytes=300)
    assert again.publish(tensors(6), step=6).version == 6
    assert again.publish(tensors(7), step=7).version == 7
    again.collect_garbage(keep=2, grace=0.0)
    newest = reader.newest()
    assert newest is not None
    assert newest.version == 7
    for version in (6, 7):
        assert rebuilt(store, version) == bits_of(tensors(version))
