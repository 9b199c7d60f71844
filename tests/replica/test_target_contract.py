"""What every target promises, whatever it keeps its version in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from replica_world import TARGETS, World, held, weights

from farcast.delta import root_of
from farcast.errors import (
    FarcastError,
    IntegrityError,
    RunMismatchError,
    TargetChangedError,
    TargetError,
    TargetUncertainError,
    UnknownVersionError,
)
from farcast.replica import Subscriber, Target
from farcast.replica.base import Draft, Goal
from farcast.store.testing import Fail, FlipBit, Rule
from version_world import bits_of


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    return TARGETS[request.param](tmp_path)


@pytest.fixture
def world() -> World:
    return World()


def test_it_follows_version_by_version(world: World, target: Target) -> None:
    subscriber = world.subscriber(target)
    assert target.ref is None
    for version in range(5):
        ref = world.publish()
        assert subscriber.sync() == ref == target.ref
        assert held(target) == bits_of(weights(version))
        assert target.verify() == ref.root == root_of(target.entries)


def test_a_laggard_gets_there_in_one_go(world: World, target: Target) -> None:
    subscriber = world.subscriber(target)
    world.publish()
    subscriber.sync()
    for _ in range(4):
        world.publish()
    assert [step.kind for step in subscriber.plan().steps] == ["delta"] * 4
    assert subscriber.sync() == world.refs[4]
    assert held(target) == bits_of(weights(4))


def test_the_same_version_again_changes_nothing(world: World, target: Target) -> None:
    subscriber = world.subscriber(target)
    world.publish()
    ref = subscriber.sync()
    assert subscriber.stage() is None
    assert subscriber.stage(to=ref) is None
    assert subscriber.sync() == subscriber.sync(to=ref) == ref
    assert not subscriber.plan().steps


def test_an_explicit_older_version_is_reached_and_left_again(world: World, target: Target) -> None:
    subscriber = world.subscriber(target)
    for _ in range(3):
        world.publish()
    subscriber.sync()
    assert subscriber.sync(to=world.refs[1]) == world.refs[1]
    assert held(target) == bits_of(weights(1))
    assert subscriber.sync(to=2) == world.refs[2]
    assert held(target) == bits_of(weights(2))


def test_staging_changes_nothing_that_is_served(world: World, target: Target) -> None:
    subscriber = world.subscriber(target)
    world.publish()
    subscriber.sync()
    world.publish()
    staged = subscriber.stage()
    assert staged is not None
    assert staged.ref == world.refs[1]
    assert target.ref == world.refs[0]
    assert held(target) == bits_of(weights(0))
    assert target.verify() == world.refs[0].root
    staged.discard()
    staged.discard()
    assert held(target) == bits_of(weights(0))
    with pytest.raises(TargetError, match="not sealed"):
        subscriber.commit(staged)
    assert subscriber.sync() == world.refs[1]


def test_a_staged_version_is_discarded_where_its_block_ends(world: World, target: Target) -> None:
    subscriber = world.subscriber(target)
    world.publish()
    staged = subscriber.stage()
    assert staged is not None
    with pytest.raises(RuntimeError, match="in between"), staged:
        raise RuntimeError("in between")
    with pytest.raises(TargetError, match="not sealed"):
        subscriber.commit(staged)
    again = subscriber.stage()
    assert again is not None
    with again:
        assert subscriber.commit(again) == world.refs[0]
    assert held(target) == bits_of(weights(0))


def test_a_staged_version_is_refused_after_another_was_committed(
    world: World, target: Target
) -> None:
    subscriber = world.subscriber(target)
    world.publish()
    subscriber.sync()
    world.publish()
    late = subscriber.stage()
    assert late is not None
    late.discard()
    world.publish()
    assert subscriber.sync() == world.refs[2]
    with pytest.raises(TargetError):
        subscriber.commit(late)
    assert held(target) == bits_of(weights(2))


def test_case_043_damaged_objects_are_refused_and_nothing_changes(
    world: World, target: Target
) -> None:
    subscriber = world.subscriber(target, workers=1)
    world.publish()
    subscriber.sync()
    world.publish()
    for bit in range(0, 32 * 37, 37):
        world.store.add(Rule(FlipBit(bit), verb="get", prefix="objects/", times=None))
        with pytest.raises(FarcastError):
            subscriber.sync()
        assert target.ref == world.refs[0]
        assert held(target) == bits_of(weights(0))
        world.store.clear()
    assert subscriber.sync() == world.refs[1]


@pytest.mark.parametrize("where", ["objects/", "versions/"])
def test_a_store_that_fails_changes_nothing(world: World, target: Target, where: str) -> None:
    subscriber = world.subscriber(target)
    world.publish()
    subscriber.sync()
    world.publish()
    world.store.add(Rule(Fail(), verb="get", prefix=where, times=None))
    with pytest.raises(FarcastError):
        subscriber.sync()
    assert held(target) == bits_of(weights(0))
    world.store.clear()
    assert subscriber.sync() == world.refs[1]


def test_without_a_version_there_is_nothing_to_stage(world: World, target: Target) -> None:
    subscriber = world.subscriber(target)
    assert subscriber.stage() is None
    with pytest.raises(UnknownVersionError, match="no version yet"):
        subscriber.sync()
    with pytest.raises(UnknownVersionError):
        subscriber.sync(to=4)


def test_a_target_of_another_run_is_refused(world: World, target: Target) -> None:
    world.publish()
    world.subscriber(target).sync()
    with pytest.raises(RunMismatchError, match="run1"):
        Subscriber(world.store, "other", target).sync()
    assert held(target) == bits_of(weights(0))


def test_a_target_that_forgot_its_version_is_recognised_by_its_bits(
    world: World, target: Target
) -> None:
    world.publish()
    world.subscriber(target).sync()
    target.forget()
    world.publish()
    subscriber = world.subscriber(target)
    plan = subscriber.plan()
    assert plan.have == world.refs[0]
    assert [step.kind for step in plan.steps] == ["delta"]
    assert subscriber.sync() == world.refs[1]


def _failing(draft_type: type[Draft], method: str, error: BaseException) -> Callable[..., Any]:
    original = getattr(draft_type, method)

    def fails(self: Draft, *args: Any) -> Any:
        original(self, *args)
        raise error

    return fails


@pytest.mark.parametrize("error", [OSError(5, "no"), KeyboardInterrupt(), IntegrityError("no")])
def test_a_failed_commit_is_undone(
    world: World, target: Target, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    subscriber = world.subscriber(target)
    world.publish()
    subscriber.sync()
    world.publish()
    staged = subscriber.stage()
    assert staged is not None
    kind = type(staged.draft)
    with monkeypatch.context() as patch:
        patch.setattr(kind, "write", _failing(kind, "write", error))
        with pytest.raises(type(error)):
            subscriber.commit(staged)
    assert target.ref == world.refs[0]
    assert held(target) == bits_of(weights(0))
    assert target.verify() == world.refs[0].root
    staged.discard()
    assert subscriber.sync() == world.refs[1]
    assert held(target) == bits_of(weights(1))


def test_case_061_a_write_that_does_nothing_is_noticed(
    world: World, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscriber = world.subscriber(target)
    world.publish()
    subscriber.sync()
    world.publish()
    staged = subscriber.stage()
    assert staged is not None
    monkeypatch.setattr(type(staged.draft), "write", lambda _: None)
    with pytest.raises(IntegrityError, match="read back as other bits"):
        subscriber.commit(staged)
    assert target.ref == world.refs[0]


def test_what_can_not_be_undone_makes_the_target_uncertain_for_good(
    world: World, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscriber = world.subscriber(target)
    world.publish()
    subscriber.sync()
    world.publish()
    staged = subscriber.stage()
    assert staged is not None
    kind = type(staged.draft)
    with monkeypatch.context() as patch:
        patch.setattr(kind, "write", _failing(kind, "write", OSError(5, "first")))
        patch.setattr(kind, "undo", _failing(kind, "undo", OSError(5, "second")))
        with pytest.raises(TargetUncertainError, match="replace the engine"):
            subscriber.commit(staged)
    staged.discard()
    for use in (subscriber.sync, subscriber.plan, subscriber.stage, target.verify):
        with pytest.raises(TargetUncertainError):
            use()
    with pytest.raises(TargetUncertainError):
        _ = target.ref


def test_a_goal_that_does_not_add_up_to_its_root_is_refused(world: World, target: Target) -> None:
    subscriber = world.subscriber(target)
    world.publish()
    ref = subscriber.sync()
    entries = dict(target.entries)
    entries["scale"] = entries["layer.bias"]
    with pytest.raises(IntegrityError, match="do not have that root"):
        target.begin(Goal(base=ref, ref=ref, entries=entries, changed=frozenset({"scale"})))


def test_a_draft_takes_each_awaited_tensor_once_and_no_other(world: World, target: Target) -> None:
    subscriber = world.subscriber(target)
    world.publish()
    ref = subscriber.sync()
    goal = Goal(base=ref, ref=ref, entries=target.entries, changed=frozenset({"scale"}))
    draft = target.begin(goal)
    bits, entry = target.read("scale"), target.entries["scale"]
    with pytest.raises(TargetError, match="not complete"):
        draft.seal()
    with pytest.raises(IntegrityError):
        draft.add("scale", bits, target.entries["layer.bias"])
    draft.add("scale", bits, entry)
    for name in ("scale", "layer.bias"):
        with pytest.raises(TargetError, match="not awaited"):
            draft.add(name, target.read(name), target.entries[name])
    draft.discard()


def test_an_object_that_stays_away_is_an_error_in_the_end(world: World, target: Target) -> None:
    subscriber = world.subscriber(target)
    ref = world.publish()
    manifest = subscriber.archive.manifest(ref.version)
    assert manifest.anchor is not None
    world.store.delete(f"objects/{manifest.anchor[0].digest}")
    with pytest.raises(UnknownVersionError):
        subscriber.sync()
    assert target.ref is None


def test_a_base_of_another_version_is_refused(world: World, target: Target) -> None:
    world.publish()
    world.publish()
    ref = world.subscriber(target).sync()
    entries = target.entries
    with pytest.raises(TargetChangedError, match="stage it again"):
        target.begin(Goal(base=None, ref=ref, entries=entries, changed=frozenset(entries)))
