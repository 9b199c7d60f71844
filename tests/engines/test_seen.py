"""A restarted replica of an engine never goes back below what it has seen.

The world: a trainer that signs, an engine that forgets everything when it restarts, a scratch
folder that stays, and a bucket whose owner puts an old state back.
"""

from pathlib import Path

import pytest
from group_engine import GroupEngine, weights
from test_engine_contract import RUN, write_folder

from farcast.engines.live_engine import EngineTarget
from farcast.engines.seen import MAX_MARK_BYTES, SeenMark
from farcast.errors import EngineRefusedError, RollbackError, RunMismatchError, TargetError
from farcast.lineage import TIMESTAMP_KEY, Signer, version_key
from farcast.publish import Publisher
from farcast.replica import Subscriber, files
from farcast.store import MemoryStore
from farcast.types import VersionRef

SIGNER = Signer.create()


class World:
    """A signed run of three versions, and an engine that can be started again and again."""

    def __init__(self, folder: Path) -> None:
        self.model = write_folder(folder / "model", weights(0))
        self.scratch = folder / "scratch"
        self.store = MemoryStore()
        with Publisher(self.store, RUN, signer=SIGNER) as publisher:
            self.refs = [publisher.publish(weights(step), step=step) for step in range(3)]
        self.start_engine()

    def start_engine(self) -> None:
        """A new process with the weights of its folder, and a new sidecar beside it."""
        self.engine = GroupEngine(2, weights(0))
        self.start_sidecar()

    def start_sidecar(self, run: str = RUN, store: MemoryStore | None = None) -> None:
        self.target = EngineTarget(self.engine, self.model, scratch=self.scratch)
        self.subscriber = Subscriber(
            store or self.store, run, self.target, trusted_key=SIGNER.public, on_expiry="warn"
        )

    def put_back(self) -> None:
        """The bucket shows the state in which version 1 was the newest."""
        self.store.delete(version_key(2))
        self.store.delete(TIMESTAMP_KEY)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_restarted_engine_is_not_rolled_back(world: World) -> None:
    assert world.subscriber.sync() == world.refs[2]
    world.put_back()
    world.start_engine()
    with pytest.raises(RollbackError, match="verified here before"):
        world.subscriber.sync()
    assert world.target.ref is None
    assert world.engine.fingerprint() == GroupEngine(2, weights(0)).fingerprint()


def test_a_restarted_engine_goes_on_where_the_run_is(world: World) -> None:
    world.subscriber.sync()
    world.start_engine()
    assert world.target.newest == world.refs[2]
    assert world.subscriber.sync() == world.refs[2]


def test_going_back_by_name_leaves_the_mark(world: World) -> None:
    world.subscriber.sync()
    world.subscriber.sync(world.refs[0])
    world.start_engine()
    assert world.target.newest == world.refs[2]


def test_a_version_that_was_only_recognised_is_marked(world: World) -> None:
    """The engine loaded it from its folder."""
    world.subscriber.sync()
    (world.scratch / "seen.json").unlink()
    world.start_sidecar()
    assert world.subscriber.sync() == world.refs[2]
    assert SeenMark(world.scratch).read() == world.refs[2]


def test_the_mark_is_durable_before_the_version_is_live(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash() -> None:
        raise EngineRefusedError("The machine goes down here.")

    monkeypatch.setattr(world.engine, "pause", crash)
    with pytest.raises(EngineRefusedError):
        world.subscriber.sync()
    world.put_back()
    world.start_engine()
    with pytest.raises(RollbackError):
        world.subscriber.sync()


def test_another_runs_mark_is_refused_and_stays(world: World) -> None:
    """Another run of the same trainer is signed as well, and would be no smaller step back."""
    world.subscriber.sync()
    other = MemoryStore()
    with Publisher(other, "run0", signer=SIGNER) as publisher:
        publisher.publish(weights(7), step=0)
    world.engine = GroupEngine(2, weights(0))
    world.start_sidecar("run0", other)
    with pytest.raises(RunMismatchError, match=r"run1.*seen\.json"):
        world.subscriber.sync()
    with pytest.raises(RunMismatchError):
        SeenMark(world.scratch).remember(VersionRef("run0", 9, "a" * 64))
    assert SeenMark(world.scratch).read() == world.refs[2]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"format":1,"seen":{"run_id":"run1","vers',
        b'{"format":2,"seen":{"run_id":"run1","version":2,"root":"' + b"a" * 64 + b'"}}',
        b'{"format":1,"seen":{"run_id":"../run1","version":2,"root":"' + b"a" * 64 + b'"}}',
        b'{"format":1,"seen":{"run_id":"run1","version":-1,"root":"' + b"a" * 64 + b'"}}',
        b'{"format":1,"seen":null}',
        b"\xff\xfe\x00",
        b'{"format":1,"\xff":1}',
        b"[" * MAX_MARK_BYTES,
        b" " * (MAX_MARK_BYTES + 1),
    ],
    ids=["empty", "torn", "format", "path", "negative", "none", "binary", "text", "deep", "long"],
)
def test_a_damaged_mark_stops_the_replica(world: World, data: bytes) -> None:
    """Taken for none it would let the bucket choose."""
    world.subscriber.sync()
    (world.scratch / "seen.json").write_bytes(data)
    world.start_engine()
    with pytest.raises(TargetError, match="damaged") as caught:
        world.subscriber.sync()
    assert not caught.value.retry
    assert world.engine.fingerprint() == GroupEngine(2, weights(0)).fingerprint()


def test_a_crash_at_any_call_leaves_the_old_mark_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (VersionRef(RUN, n, "a" * 64) for n in (1, 2))
    calls = ("create", "write_at", "write_new", "move", "sync_folder")
    for number, name in enumerate(calls):
        folder = tmp_path / str(number)
        folder.mkdir()
        mark = SeenMark(folder)
        mark.remember(old)
        original = getattr(files, name)

        def crash(*_: object) -> None:
            raise OSError(5, "A crash that a test wants.")

        monkeypatch.setattr(files, name, crash)
        with pytest.raises(TargetError):
            mark.remember(new)
        monkeypatch.setattr(files, name, original)
        assert mark.read() == (new if name == "sync_folder" else old)
        mark.remember(new)
        assert mark.read() == new
