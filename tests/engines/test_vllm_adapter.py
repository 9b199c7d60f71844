"""The adapter for vLLM's routes: what it makes of answers that are late, missing or no."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_vllm import FakeVllm
from group_engine import weights
from test_engine_contract import RUN, Case, write_folder

from farcast.engines.http_client import HttpClient
from farcast.engines.http_engine import label_of
from farcast.engines.live_engine import EngineTarget
from farcast.engines.vllm_engine import VllmEngine
from farcast.errors import (
    EngineRefusedError,
    EngineUnreachableError,
    TargetChangedError,
    TargetUncertainError,
)
from farcast.replica import Subscriber


class World:
    def __init__(self, fake: FakeVllm, folder: Path) -> None:
        self.fake = fake
        self.engine = VllmEngine(HttpClient(fake.address))
        model = write_folder(folder / "model", weights(0))
        self.target = EngineTarget(self.engine, model, scratch=folder / "scratch")
        self.case = Case(self.target, fake.group.fingerprint, lambda: None)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with FakeVllm.started(2, weights(0)) as fake:
        yield World(fake, tmp_path)


@pytest.mark.parametrize(
    ("sleeps", "stop", "go"), [(True, "/sleep", "/wake_up"), (False, "/pause", "/resume")]
)
def test_words_are_written_and_named_in_the_pause(
    world: World, sleeps: bool, stop: str, go: str
) -> None:
    world.fake.sleeps = sleeps
    world.target.forget()  # so that it attaches to this kind of server
    world.case.subscriber.sync()
    world.case.publish()
    staged = world.case.subscriber.stage()
    assert staged is not None
    world.fake.calls.clear()
    world.case.subscriber.commit(staged)
    calls = [call for call in world.fake.calls if call != "/collective_rpc"]
    assert calls == [
        "/start_weight_update",
        stop,
        "/update_weights",
        "/update_weight_version",
        go,
        "/finish_weight_update",
    ]
    assert world.engine.label() == label_of(world.case.refs[1])
    assert not world.fake.paused


def test_a_member_that_does_not_answer_is_no_commit(world: World) -> None:
    """Case 071."""
    world.case.publish()
    staged = world.case.subscriber.stage()
    assert staged is not None
    world.fake.mute = {0}
    with pytest.raises(TargetUncertainError):
        world.case.subscriber.commit(staged)
    assert world.fake.paused
    assert world.fake.label == label_of(world.case.refs[0])


def test_an_update_that_one_member_ended_does_not_block_the_next(world: World) -> None:
    world.case.publish()
    world.fake.faults = {0}
    with pytest.raises(EngineRefusedError):
        world.case.subscriber.sync()
    world.fake.faults = set()
    assert world.case.subscriber.sync() == world.case.refs[1]


def test_a_members_own_error_comes_through_the_route_that_loses_it(world: World) -> None:
    world.case.publish()
    staged = world.case.subscriber.stage()
    assert staged is not None
    resident = world.fake.group.residents[1]
    traced, prepared = resident._trace, resident._staged
    assert traced is not None
    assert prepared is not None
    write = prepared.writes[0]
    traced.memories[write.memory][int(write.places[0])] ^= 4
    with pytest.raises(TargetChangedError, match="Member 1"):
        world.case.subscriber.commit(staged)
    assert world.target.verify() == world.case.refs[0].root


def test_words_beside_the_changed_ones_that_somebody_wrote_leave_no_version(world: World) -> None:
    world.case.publish()
    staged = world.case.subscriber.stage()
    assert staged is not None
    world.fake.group.shards[1].out.data += 1
    with pytest.raises(TargetUncertainError):
        world.case.subscriber.commit(staged)
    assert world.fake.paused


def test_a_server_without_the_extension_is_told_apart(tmp_path: Path) -> None:
    with FakeVllm.started(1, weights(0)) as fake:
        fake.members[0].farcast_attach = lambda _: "?"  # type: ignore[method-assign,assignment]
        with pytest.raises(EngineRefusedError, match="worker-extension-cls"):
            World(fake, tmp_path)


def test_what_a_sidecar_left_that_died_in_a_pause_is_taken_up(world: World, tmp_path: Path) -> None:
    """vLLM begins no second update, and a paused engine answers nobody."""
    world.engine.open_update()
    world.engine.pause()
    again = EngineTarget(
        VllmEngine(HttpClient(world.fake.address)), tmp_path / "model", scratch=tmp_path / "scratch"
    )
    subscriber = Subscriber(world.case.store, RUN, again)
    assert subscriber.sync() == world.case.refs[0]
    assert not world.fake.paused
    world.case.publish()
    assert subscriber.sync() == world.case.refs[1]


def test_an_engine_that_died_when_it_should_pause_is_updated_once_it_is_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> None:
        raise EngineUnreachableError("The engine is away because a test wants it.")

    world.case.publish()
    monkeypatch.setattr(world.engine, "pause", gone)
    with pytest.raises(EngineUnreachableError):
        world.case.subscriber.sync()
    monkeypatch.undo()
    for member in world.fake.members:  # a new process has no update open
        member.updating = False
    world.target.forget()
    assert world.case.subscriber.sync() == world.case.refs[1]
