"""What somebody can do who may write anything into the bucket: withhold, and be found out.

Each test is one attack of docs/trust.md. The world: a trainer that signs, a replica that pins its
public key, and a store that says whatever the attacker likes.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from farcast.errors import (
    ConfigError,
    FarcastError,
    FormatError,
    FreezeError,
    IntegrityError,
    RollbackError,
    SignatureError,
    UnknownVersionError,
    VersionConflictError,
)
from farcast.lineage import (
    RUN_KEY,
    TIMESTAMP_KEY,
    VERSIONS_PREFIX,
    Manifest,
    RunRecord,
    Signer,
    Timestamp,
    TrustedKey,
    decode_timestamp,
    encode_manifest,
    encode_timestamp,
    object_key,
    parse_version_key,
    version_key,
)
from farcast.publish import Publisher
from farcast.publish.timestamps import REFRESHES, Timestamps
from farcast.replica import CheckpointDirectory, MemoryTarget, Subscriber, Target
from farcast.store import CountingStore, MemoryStore
from farcast.store.archive import Archive
from farcast.types import VersionRef
from version_world import RUN, bits_of, clone, contents, keys, plain, rebuilt, tensors

SIGNER = Signer.create()
STRANGER = Signer.create()


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


class World:
    """A run with signed versions 0 to `versions` - 1."""

    def __init__(self, versions: int = 3, **options: Any) -> None:
        self.store = MemoryStore()
        self.clock = Clock()
        self.refs: list[VersionRef] = []
        with Publisher(self.store, RUN, signer=SIGNER, **options) as publisher:
            for step in range(versions):
                self.refs.append(publisher.publish(tensors(step), step=step))

    def subscriber(
        self,
        target: Target | None = None,
        *,
        store: Any = None,
        key: TrustedKey | None = SIGNER.public,
        **options: Any,
    ) -> Subscriber:
        return Subscriber(
            self.store if store is None else store,
            RUN,
            MemoryTarget() if target is None else target,
            trusted_key=key,
            clock=self.clock,
            **options,
        )

    def manifest(self, version: int) -> Manifest:
        return Archive(self.store, RUN).manifest(version)

    def forge(self, version: int, make: Callable[[Manifest], Manifest]) -> None:
        self.store.put(version_key(version), encode_manifest(make(self.manifest(version))))


def signed_elsewhere(versions: int = 3, *, signer: Signer | None = STRANGER) -> MemoryStore:
    """The same run as an attacker would make it, with weights of their own."""
    store = MemoryStore()
    with Publisher(store, RUN, signer=signer) as publisher:
        for step in range(versions):
            publisher.publish(tensors(step, seed=666), step=step)
    return store


def test_a_signed_run_is_followed() -> None:
    world, target = World(), MemoryTarget()
    subscriber = world.subscriber(target)
    assert subscriber.sync() == world.refs[2]
    assert subscriber.warning is None
    assert plain(target.tensors) == bits_of(tensors(2))


# --- forged content ------------------------------------------------------------------------------


@pytest.mark.parametrize("signer", [None, STRANGER], ids=["unsigned", "foreign key"])
def test_a_run_written_by_somebody_else_is_refused(signer: Signer | None) -> None:
    target = MemoryTarget()
    subscriber = World().subscriber(target, store=signed_elsewhere(signer=signer))
    with pytest.raises(SignatureError):
        subscriber.sync()
    assert target.ref is None


@pytest.mark.parametrize("signer", [None, STRANGER], ids=["unsigned", "foreign key"])
def test_a_forged_version_after_true_ones_changes_nothing(signer: Signer | None) -> None:
    world, target = World(), MemoryTarget()
    subscriber = world.subscriber(target)
    subscriber.sync()
    forged = clone(world.store)
    with Publisher(forged, RUN, signer=signer, trusted_key=SIGNER.public) as publisher:
        publisher.publish(tensors(3, seed=666), step=3)
    for key, data in contents(forged).items():
        world.store.put(key, data)
    with pytest.raises(SignatureError):
        subscriber.sync()
    assert target.ref == world.refs[2]
    assert plain(target.tensors) == bits_of(tensors(2))


def test_a_forged_version_is_passed_over_once_a_true_one_leads_past_it() -> None:
    world, target = World(), MemoryTarget()
    subscriber = world.subscriber(target)
    subscriber.sync()
    world.store.put(version_key(3), encode_manifest(replace(world.manifest(2), version=3)))
    with Publisher(world.store, RUN, signer=SIGNER) as publisher:
        ref = publisher.publish(tensors(3), step=3)
    assert ref.version == 4  # a number that a forgery holds is left behind
    assert subscriber.sync() == ref
    assert plain(target.tensors) == bits_of(tensors(3))
    assert isinstance(subscriber.archive.damaged[3], SignatureError)


@pytest.mark.parametrize(
    "change",
    [
        {"step": 9},
        {"root": "e" * 64},
        {"served_format": "fp8"},
        {"writer": "somebody"},
        {"deltas": ()},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_changed_field_of_a_signed_manifest_is_found(change: dict[str, Any]) -> None:
    world = World(anchor_every=1)
    world.forge(2, lambda manifest: replace(manifest, **change))
    with pytest.raises(SignatureError):
        world.subscriber().archive.manifest(2)


def test_a_true_manifest_under_another_number_is_refused() -> None:
    world = World()
    world.store.put(version_key(3), encode_manifest(world.manifest(1)))
    with pytest.raises(FormatError):
        world.subscriber().archive.manifest(3)


def test_a_true_manifest_of_another_run_by_the_same_trainer_is_refused() -> None:
    world, other = World(), MemoryStore()
    with Publisher(other, "run2", signer=SIGNER) as publisher:
        publisher.publish(tensors(7), step=0)
    world.store.put(version_key(3), other.get(version_key(0), max_bytes=1 << 20))
    with pytest.raises(FarcastError):
        world.subscriber().archive.manifest(3)


@pytest.mark.parametrize("damage", ["other", "cut", "long", "gone"])
def test_a_swapped_object_is_found_by_its_digest(damage: str) -> None:
    world, target = World(), MemoryTarget()
    subscriber = world.subscriber(target)
    (ref,) = world.manifest(2).deltas[0].objects
    data = world.store.get(object_key(ref), max_bytes=1 << 20)
    if damage == "gone":
        world.store.delete(object_key(ref))
    else:
        bad = {"other": data[:-1] + bytes([data[-1] ^ 1]), "cut": data[:-1], "long": data + b"x"}
        world.store.put(object_key(ref), bad[damage])
    with pytest.raises(FarcastError):
        subscriber.sync()
    assert target.ref in (None, *world.refs[:2])


def test_a_run_record_of_somebody_elses_is_refused() -> None:
    """It names the files that build the model and what workers do."""
    store = MemoryStore()
    archive = Archive(store, RUN, trusted=SIGNER.public)
    record = RunRecord(run_id=RUN, created="now")
    archive.create_run(SIGNER.sign(record))
    assert archive.open_run().run_id == RUN
    for forged in (record, STRANGER.sign(record)):
        bad = MemoryStore()
        Archive(bad, RUN).create_run(forged)
        with pytest.raises(SignatureError):
            Archive(bad, RUN, trusted=SIGNER.public).open_run()


def test_a_trainer_does_not_go_on_from_weights_that_it_did_not_sign() -> None:
    with pytest.raises(SignatureError):
        Publisher(signed_elsewhere(), RUN, signer=SIGNER)


def test_two_trainers_with_the_key_still_fence_each_other() -> None:
    store = MemoryStore()
    first = Publisher(store, RUN, signer=SIGNER)
    first.publish(tensors(0), step=0)
    with Publisher(store, RUN, signer=SIGNER) as second:
        ref = second.publish(tensors(1), step=1)
    with pytest.raises(VersionConflictError):
        first.publish(tensors(2), step=2)
    first.close()
    assert Archive(store, RUN).newest() == Archive(store, RUN).manifest(ref.version)
    told = decode_timestamp(store.get(TIMESTAMP_KEY, max_bytes=4096), run_id=RUN)
    assert told.version == ref.version  # the fenced one vouches for nothing any more


def test_without_a_pinned_key_signatures_are_ignored() -> None:
    world = World()
    assert world.subscriber(key=None).sync() == world.refs[2]
    assert world.subscriber(key=None, store=signed_elsewhere()).sync().version == 2


# --- old states: rollback ------------------------------------------------------------------------


def put_back(store: MemoryStore, version: int) -> None:
    """An old state of the run: versions after `version` and the timestamp of then are gone."""
    for key in keys(store, VERSIONS_PREFIX):
        number = parse_version_key(key)
        if number is not None and number > version:
            store.delete(key)


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_a_replica_never_goes_back_below_what_it_has_seen(kind: str, tmp_path: Path) -> None:
    """The folder's mark outlives the process."""
    world = World()
    target: Target = MemoryTarget() if kind == "memory" else CheckpointDirectory(tmp_path / "m")
    world.subscriber(target).sync()
    put_back(world.store, 1)
    world.store.delete(TIMESTAMP_KEY)
    again = target if kind == "memory" else CheckpointDirectory(tmp_path / "m")
    late = world.subscriber(again, on_expiry="warn")
    with pytest.raises(RollbackError, match="verified here before"):
        late.sync()
    assert again.ref == world.refs[2]


def test_going_back_by_name_is_allowed_and_remembers_the_highest(tmp_path: Path) -> None:
    world = World()
    target = CheckpointDirectory(tmp_path / "m")
    world.subscriber(target).sync()
    world.subscriber(target).sync(world.refs[0])
    assert target.ref == world.refs[0]
    again = CheckpointDirectory(tmp_path / "m")
    assert again.newest == world.refs[2]
    put_back(world.store, 1)
    with pytest.raises(RollbackError):
        world.subscriber(again, on_expiry="warn").sync()
    assert again.ref == world.refs[0]


def test_another_content_under_a_number_that_was_seen_is_refused() -> None:
    """A trainer's key that signed two contents for one version, shown to different readers."""
    world, target = World(), MemoryTarget()
    world.subscriber(target).sync()
    twin = MemoryStore()
    with Publisher(twin, RUN, signer=SIGNER) as publisher:
        for step in range(3):
            publisher.publish(tensors(step, seed=8), step=step)
    with pytest.raises(RollbackError, match=r"another|different readers"):
        world.subscriber(target, store=twin).sync()
    assert target.ref == world.refs[2]


def test_a_newcomer_is_not_given_an_old_state_while_the_timestamp_is_fresh() -> None:
    world = World()
    put_back(world.store, 1)
    with pytest.raises(RollbackError, match="named by the signed timestamp"):
        world.subscriber().sync()


def test_an_older_timestamp_does_not_replace_a_newer_one() -> None:
    world = World(versions=1)
    old = world.store.get(TIMESTAMP_KEY, max_bytes=4096)
    told = decode_timestamp(old, run_id=RUN)
    ref = world.refs[0]
    newer = replace(told, issued=told.issued + 5, expires=told.expires + 600)
    world.store.put(TIMESTAMP_KEY, encode_timestamp(SIGNER.sign(newer)))
    subscriber = world.subscriber()
    assert subscriber.sync() == ref
    world.store.put(TIMESTAMP_KEY, old)
    world.clock.now = told.expires + 60  # the old one ran out, the one seen did not
    assert subscriber.sync() == ref
    world.clock.now = newer.expires + 1
    with pytest.raises(FreezeError):
        subscriber.sync()


# --- old states: freeze --------------------------------------------------------------------------


def test_a_frozen_store_is_found_out_when_the_timestamp_runs_out() -> None:
    world, target = World(), MemoryTarget()
    subscriber = world.subscriber(target)
    subscriber.sync()
    world.clock.now += 899
    assert subscriber.stage() is None
    world.clock.now += 10
    with pytest.raises(FreezeError, match="ran out"):
        subscriber.sync()
    assert target.ref == world.refs[2]  # and it goes on serving


def test_a_freeze_may_be_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    subscriber = world.subscriber(on_expiry="warn")
    world.clock.now += 1000
    assert subscriber.sync() == world.refs[2]
    assert subscriber.warning is not None
    subscriber.sync()
    assert caplog.text.count("ran out") == 1
    with Publisher(world.store, RUN, signer=SIGNER, timestamp_seconds=5000) as publisher:
        publisher.publish(tensors(3), step=3)
    assert subscriber.sync().version == 3
    assert subscriber.warning is None


def test_a_store_without_a_timestamp_is_not_believed() -> None:
    world = World(timestamp_seconds=None)
    assert TIMESTAMP_KEY not in keys(world.store)
    with pytest.raises(FreezeError, match="no signed timestamp"):
        world.subscriber().sync()
    assert world.subscriber(on_expiry="warn").sync() == world.refs[2]


@pytest.mark.parametrize("how", ["unsigned", "foreign", "other run", "manifest", "garbage", "long"])
def test_a_forged_timestamp_is_refused(how: str) -> None:
    world = World()
    ref, now = world.refs[2], int(world.clock())
    told = Timestamp(
        run_id=RUN, version=ref.version, root=ref.root, issued=now, expires=now + 10**6
    )
    data = {
        "unsigned": lambda: encode_timestamp(told),
        "foreign": lambda: encode_timestamp(STRANGER.sign(told)),
        "other run": lambda: encode_timestamp(SIGNER.sign(replace(told, run_id="run2"))),
        "manifest": lambda: world.store.get(version_key(2), max_bytes=1 << 20),
        "garbage": lambda: b"\x80\x04pickle",
        "long": lambda: encode_timestamp(SIGNER.sign(told)) + b" " * 5000,
    }[how]()
    world.store.put(TIMESTAMP_KEY, data)
    with pytest.raises(FarcastError):
        world.subscriber().sync()


def test_the_timestamp_is_kept_fresh_and_costs_a_steady_follower_nothing() -> None:
    world = World(versions=1)
    counted = CountingStore(world.store)
    subscriber = world.subscriber(store=counted)
    subscriber.sync()
    before = dict(counted.traffic.requests)
    for _ in range(5):
        subscriber.stage()
    after = counted.traffic.requests
    told = {verb: after[verb] - before.get(verb, 0) for verb in after}
    # The second and the fourth poll ask whether the follower's own version is still there.
    assert told == {"get": 5, "get_range": 2, "list": 0}


def test_a_timestamp_is_written_again_before_it_runs_out() -> None:
    store, signs = MemoryStore(), Signer.create()
    timestamps = Timestamps(store, signs, valid_seconds=1)
    timestamps.announce(VersionRef(RUN, 4, "a" * 64))
    deadline = time.monotonic() + 10
    seen: set[int] = set()
    while len(seen) < 3 and time.monotonic() < deadline:
        if TIMESTAMP_KEY in keys(store):
            told = decode_timestamp(store.get(TIMESTAMP_KEY, max_bytes=4096), run_id=RUN)
            seen.add(told.expires)
        time.sleep(0.05)
    timestamps.close()
    assert len(seen) == 3
    assert REFRESHES > 1


def test_a_timestamp_that_cannot_be_written_stops_no_publish() -> None:
    from farcast.store.testing import Fail, FaultStore, Rule

    store = FaultStore()
    store.add(Rule(Fail(), verb="put", prefix=TIMESTAMP_KEY, times=None))
    publisher = Publisher(store, RUN, signer=SIGNER)
    assert publisher.publish(tensors(0), step=0).version == 0
    store.clear()
    publisher.close()


def test_a_validity_that_helps_nobody_is_refused() -> None:
    for seconds in (0.0, -1.0, float("nan"), 1e12):
        with pytest.raises(ConfigError):
            Publisher(MemoryStore(), RUN, signer=SIGNER, timestamp_seconds=seconds)


# --- what is damaged without malice --------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"{}", b"\x80\x04.", b"x" * (9 << 20)], ids=len)
@pytest.mark.parametrize("key", [None, SIGNER.public], ids=["any", "pinned"])
def test_a_damaged_manifest_is_passed_over_and_named(data: bytes, key: TrustedKey | None) -> None:
    world, target = World(anchor_every=2), MemoryTarget()
    subscriber = world.subscriber(target, key=key)
    subscriber.sync()
    world.store.put(version_key(3), data)
    with pytest.raises((FormatError, IntegrityError)):
        subscriber.sync()
    assert target.ref == world.refs[2]
    with Publisher(world.store, RUN, signer=SIGNER, anchor_every=2) as publisher:
        refs = [publisher.publish(tensors(step), step=step) for step in (3, 4)]
    assert [ref.version for ref in refs] == [4, 5]
    assert subscriber.sync() == refs[1]
    assert plain(target.tensors) == bits_of(tensors(4))
    assert list(subscriber.archive.damaged) == [3]
    newcomer = MemoryTarget()
    assert world.subscriber(newcomer, key=key).sync() == refs[1]
    assert rebuilt(world.store, 4) == bits_of(tensors(3))


def test_a_manifest_damaged_in_the_middle_of_a_chain_is_gone_around_by_an_anchor() -> None:
    world = World(versions=9, anchor_every=4)
    world.store.put(version_key(6), b"damaged")
    target = MemoryTarget()
    subscriber = world.subscriber(target)
    assert subscriber.sync() == world.refs[8]  # the anchor at 8
    early = MemoryTarget()
    behind = world.subscriber(early)
    assert behind.sync(world.refs[5]) == world.refs[5]
    with pytest.raises((FormatError, UnknownVersionError)):
        behind.sync(world.refs[7])  # only through 6
    assert behind.sync() == world.refs[8]
    assert np.array_equal(early.tensors["a"].data, target.tensors["a"].data)


def test_key_in_use_reaches_no_object_in_the_store() -> None:
    world = World()
    Archive(world.store, RUN).create_run(SIGNER.sign(RunRecord(run_id=RUN, created="now")))
    lines = [line for line in SIGNER.secret_pem.splitlines() if b"-" not in line]
    assert RUN_KEY in keys(world.store)
    for data in contents(world.store).values():
        assert not any(line in data for line in lines)
