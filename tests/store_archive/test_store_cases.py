"""Faults of object stores, met with the whole of publish, sync and submit instead of one call."""

import ast
import contextlib
import io
import logging
import pickle
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import farcast
from farcast.errors import FarcastError, StoreError, VersionConflictError
from farcast.fleet.registry import REPLICAS_PREFIX, TRAINER_KEY, Registry
from farcast.lineage import RUN_KEY, TIMESTAMP_KEY, RunRecord, Signer, object_key, version_key
from farcast.publish import Publisher
from farcast.replica import CheckpointDirectory, MemoryTarget, Subscriber
from farcast.store import CountingStore, MemoryStore, Store
from farcast.store.archive import Archive
from farcast.store.testing import Fail, FaultStore, LoseReply, Rule
from farcast.trajectory import TrajectoryReceiver, TrajectorySender
from farcast.trajectory.keys import batch_key
from s3_stub import Answer, S3Stub, Seen
from servers import SECRET
from trajectory_world import episode
from version_world import RUN, bits_of, plain, rebuilt, tensors


@pytest.fixture
def stub() -> Iterator[S3Stub]:
    with S3Stub() as server:
        yield server


def follow(store: Store) -> MemoryTarget:
    target = MemoryTarget()
    Subscriber(store, RUN, target).sync()
    return target


def send(store: Store, *names: str) -> None:
    with contextlib.closing(TrajectorySender(store, RUN, "w0")) as sender:
        for name in names:
            sender.submit(episode(name))


# --- 047: a server that refuses newer checksums --------------------------------------------------


@pytest.mark.parametrize("status", [501, 401, 400])
def test_case_047_an_old_server_takes_versions_and_trajectories(stub: S3Stub, status: int) -> None:
    def respond(seen: Seen) -> Answer | None:
        newer = any(name.startswith("x-amz-checksum-") for name in seen.headers)
        chunked = "aws-chunked" in seen.headers.get("content-encoding", "")
        return Answer(status, "NotImplemented") if newer or chunked else None

    stub.respond = respond
    store = stub.open()
    with Publisher(store, RUN) as publisher:
        for step in range(3):
            publisher.publish(tensors(step), step=step)
    send(store, "a", "b")
    assert plain(follow(store).tensors) == bits_of(tensors(2))
    before = len(stub.seen)
    with (
        Publisher(stub.open(checksum="when_supported"), RUN) as publisher,
        pytest.raises(StoreError, match="checksum='when_required'"),
    ):
        publisher.publish(tensors(3), step=3)
    assert sum(seen.method == "PUT" for seen in stub.seen[before:]) <= 3 * 4  # bounded
    assert plain(follow(store).tensors) == bits_of(tensors(2))


# --- 051, 053: what is there, and who put it ------------------------------------------------------


def test_case_051_a_version_that_lost_a_chunk_is_refused_and_the_next_heals() -> None:
    store = FaultStore()
    with Publisher(store, RUN, anchor_every=2) as publisher:
        publisher.publish(tensors(0), step=0)
        publisher.publish(tensors(1), step=1)
        (ref,) = Archive(store, RUN).manifest(1).deltas[0].objects
        data = store.get(object_key(ref), max_bytes=1 << 20)
        store.inner.put(object_key(ref), data[:10] + data[20:])
        target = MemoryTarget()
        with pytest.raises(FarcastError):
            Subscriber(store, RUN, target).sync()
        assert target.ref is None
        publisher.publish(tensors(2), step=2)
    assert plain(follow(store).tensors) == bits_of(tensors(2))


def test_case_053_a_conflict_with_nothing_stored_is_no_lost_race(stub: S3Stub) -> None:
    """409 although nothing is there: tried again. 412: another publisher won, for good."""
    conflicts = [Answer(409, "ConditionalRequestConflict")] * 2

    def respond(seen: Seen) -> Answer | None:
        if seen.method == "PUT" and "versions/" in seen.key and conflicts:
            return conflicts.pop()
        return None

    stub.respond = respond
    first, second = (Publisher(stub.open(), RUN) for _ in range(2))
    assert first.publish(tensors(0), step=0).version == 0
    assert not conflicts
    with pytest.raises(VersionConflictError):
        second.publish(tensors(1), step=1)
    puts = sum(seen.method == "PUT" and "versions/" in seen.key for seen in stub.seen)
    assert puts == 4  # two refused, one taken, one lost: nobody tries a lost race again
    first.close()
    second.close()


# --- 057: credentials that end -------------------------------------------------------------------


@pytest.mark.parametrize("calls", [1, 3, 8, 13])
@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId"])
def test_case_057_nothing_is_lost_when_credentials_end(stub: S3Stub, calls: int, code: str) -> None:
    used = 0

    def respond(seen: Seen) -> Answer | None:
        nonlocal used
        if seen.access_key == "A":
            used += 1
            return Answer(403, code) if used > calls else None
        return None if seen.access_key == "B" else Answer(403, "InvalidAccessKeyId")

    names = ["A", "B"]

    def provide() -> dict[str, Any]:
        name = names.pop(0) if len(names) > 1 else names[0]
        later = datetime.now(UTC) + timedelta(hours=1)
        return {
            "access_key_id": name,
            "secret_access_key": SECRET,
            "token": "t",
            "expires_at": later,
        }

    stub.respond = respond
    store = stub.open(credentials=provide, access_key_id="", secret_access_key="")
    with Publisher(store, RUN) as publisher:
        for step in range(4):
            assert publisher.publish(tensors(step), step=step).version == step
            send(store, f"t{step}")
    assert used > calls
    for step in range(4):
        assert rebuilt(store, step) == bits_of(tensors(step))
    receiver = TrajectoryReceiver(store, RUN)
    got = [trajectory.id for trajectory in receiver.consume(max_items=10)]
    receiver.close()
    assert got == ["t0", "t1", "t2", "t3"]


# --- 067: visible only when complete --------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fail(), LoseReply()], ids=["fail", "lose reply"])
def test_case_067_a_reader_beside_each_failing_call_sees_whole_versions(fault: Any) -> None:
    for nth in range(1, 12):
        store = FaultStore()
        publisher = Publisher(store, RUN, anchor_every=2, squash=2, signer=Signer.create())
        store.add(Rule(fault, verb="put", nth=nth))
        done = 0
        for step in range(5):
            with contextlib.suppress(StoreError):
                publisher.publish(tensors(step), step=step)
            newest = Archive(store.inner, RUN).newest()
            if newest is not None:
                assert newest.step in (done, step)
                assert rebuilt(store.inner, newest.version) == bits_of(tensors(newest.step))
                done = newest.step
        publisher.close()
        assert done == 4


# --- 097: nothing is ever unpickled ---------------------------------------------------------------


class _Bomb:
    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (Path.touch, (self._canary,))


def test_case_097_a_pickle_is_refused_under_every_key(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    buffer = io.BytesIO()
    pickle.dump(_Bomb(canary), buffer)
    bomb = buffer.getvalue()

    def world() -> MemoryStore:
        store = MemoryStore()
        Archive(store, RUN).create_run(RunRecord(run_id=RUN, created="now"))
        with Publisher(store, RUN) as publisher:
            publisher.publish(tensors(0), step=0)
            publisher.publish(tensors(1), step=1)
        send(store, "a")
        return store

    (delta,) = Archive(world(), RUN).manifest(1).deltas[0].objects

    def receive(store: Store) -> object:
        receiver = TrajectoryReceiver(store, RUN)
        try:
            return receiver.consume(max_items=1)
        finally:
            receiver.close()

    def restart(store: Store) -> object:
        return Publisher(store, RUN).close()

    def verified(store: Store) -> object:
        target = CheckpointDirectory(tmp_path / "m")
        return Subscriber(
            store, RUN, target, trusted_key=Signer.create().public
        ).archive.timestamp()

    readers: list[tuple[str, Callable[[Store], object]]] = [
        (RUN_KEY, lambda store: Archive(store, RUN).open_run()),
        (version_key(1), lambda store: Archive(store, RUN).manifest(1)),
        (object_key(delta), lambda store: Archive(store, RUN).rebuild(1)),
        (object_key(delta), restart),
        (TIMESTAMP_KEY, verified),
        (TRAINER_KEY, lambda store: Registry(store).trainer()),
        (f"{REPLICAS_PREFIX}w0.json", lambda store: Registry(store).replicas()),
        (batch_key("w0", 0), receive),
    ]
    for key, read in readers:
        store = world()
        store.put(key, bomb)
        with pytest.raises(FarcastError):
            read(store)
        assert not canary.exists(), key
    pickle.loads(bomb)  # noqa: S301 - it does go off
    assert canary.exists()


UNSAFE = {
    "pickle": "farcast/bench/fireworks.py",
    "cloudpickle": "",
    "dill": "",
    "marshal": "",
    "shelve": "",
    "joblib": "",
}
"""Modules that run what they read. The one exception measures a peer's format on its own output."""


def test_case_097_no_module_reads_what_it_would_run() -> None:
    root = Path(farcast.__file__).parent
    for path in sorted(root.rglob("*.py")):
        name = f"farcast/{path.relative_to(root)}"
        for node in ast.walk(ast.parse(path.read_text())):
            imported: list[str] = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                imported = [node.module or ""]
            for module in imported:
                allowed = UNSAFE.get(module.split(".")[0])
                assert allowed is None or name == allowed, f"{name} imports {module}"
            if isinstance(node, ast.Call):
                _check_call(name, node)


def _check_call(name: str, node: ast.Call) -> None:
    """`torch.load` only with weights_only=True, `np.load` only with allow_pickle=False."""
    called = ast.unparse(node.func)
    told = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if called == "torch.load":
        assert told.get("weights_only") == "True", name
    if called in ("np.load", "numpy.load"):
        assert told.get("allow_pickle") == "False", name
    assert called not in ("eval", "exec"), name
    assert told.get("trust_remote_code", "False") == "False", name


# --- 103: secrets --------------------------------------------------------------------------------


def said(error: BaseException) -> str:
    texts = ["".join(traceback.format_exception(error)), repr(error)]
    behind: BaseException | None = error
    while behind is not None:
        texts += [repr(behind), repr(behind.args)]
        behind = behind.__cause__ or behind.__context__
    return "\n".join(texts)


def test_case_103_no_secret_in_logs_errors_records_or_files(
    stub: S3Stub,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    signer = Signer.create()
    hidden = [SECRET, signer.secret_pem.decode().splitlines()[1]]
    store = stub.open(session_token=SECRET, retries=0)
    texts = [repr(store), repr(signer)]
    with Publisher(store, RUN, signer=signer) as publisher:
        publisher.publish(tensors(0), step=0)
        target = CheckpointDirectory(tmp_path / "model")
        subscriber = Subscriber(store, RUN, target, trusted_key=signer.public)
        subscriber.sync()
        sender = TrajectorySender(store, RUN, "w0")
        sender.submit(episode("a"))
        texts += [repr(publisher), repr(subscriber), repr(target), repr(sender)]
        for answer in (Answer(403, "AccessDenied"), Answer(500), Answer(400, "ExpiredToken")):
            stub.respond = lambda _, answer=answer: answer  # type: ignore[misc]
            calls: list[Callable[[], object]] = [
                lambda: publisher.publish(tensors(1), step=1),
                lambda: publisher.publish_async(tensors(1), step=1).result(),
                lambda: subscriber.sync(),
                lambda: Subscriber(store, RUN, MemoryTarget()).sync(),
                lambda: Registry(store).trainer(),
            ]
            for call in calls:
                with pytest.raises(FarcastError) as caught:
                    call()
                texts.append(said(caught.value))
        stub.respond = lambda _: None
        sender.close()
    out, err = capfd.readouterr()
    texts += [caplog.text, out, err, *map(str, stub.objects)]
    for word in hidden:
        assert word not in "\n".join(texts)
        assert not any(word.encode() in data for data in stub.objects.values())
        for path in tmp_path.rglob("*"):
            assert not path.is_file() or word.encode() not in path.read_bytes()


# --- steady state: how many requests -------------------------------------------------------------


@pytest.mark.parametrize("signed", [False, True], ids=["plain", "signed"])
def test_a_steady_replica_makes_two_requests_a_version_and_no_list(
    stub: S3Stub, signed: bool
) -> None:
    """Counted by the server, over HTTP: the manifest, the object, and one poll without news."""
    signer = Signer.create() if signed else None
    trusted = None if signer is None else signer.public
    writing, versions = stub.open(), 12
    with Publisher(writing, RUN, squash=4, signer=signer) as publisher:
        publisher.publish(tensors(0), step=0)
        target = MemoryTarget()
        counted = CountingStore(stub.open())
        subscriber = Subscriber(counted, RUN, target, trusted_key=trusted)
        subscriber.sync()
        before = dict(counted.traffic.requests)
        for step in range(1, versions + 1):
            publisher.publish(tensors(step), step=step)
            assert subscriber.sync().version == step
            assert subscriber.stage() is None
    spent = {verb: count - before.get(verb, 0) for verb, count in counted.traffic.requests.items()}
    assert spent.pop("list", 0) == 0
    assert spent.pop("put", 0) == 0
    assert sum(spent.values()) <= 4 * versions
    assert sum(spent.values()) == 4 * versions  # 2 to fetch, and 1 after it and 1 for each poll
    assert plain(target.tensors) == bits_of(tensors(versions))


def test_a_steady_publisher_lists_nothing() -> None:
    store = FaultStore()
    with Publisher(store, RUN, squash=4) as publisher:
        publisher.publish(tensors(0), step=0)
        before = dict(store.counts())
        for step in range(1, 13):
            publisher.publish(tensors(step), step=step)
    after = store.counts()
    assert after.get("list", 0) == before.get("list", 0)
    assert after["put"] - before["put"] <= 12 * 2 + 3  # delta and manifest; 3 squashed deltas
