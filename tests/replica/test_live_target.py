"""Engines whose memory is not laid out like a checkpoint: fused tensors, derived caches, gates."""

import contextlib
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from replica_world import World

from farcast.delta import TensorBits, to_bits
from farcast.errors import (
    IntegrityError,
    TargetChangedError,
    TargetError,
    TargetUncertainError,
    TensorMismatchError,
)
from farcast.replica.live import LiveTarget, Place
from farcast.replica.words import Positions, Words
from version_world import Tensors

ROWS = {"q": slice(0, 4), "k": slice(4, 6), "v": slice(6, 8)}


class FakeEngine(LiveTarget):
    """Serves `qkv = cat(q, k, v)`, kept transposed, with a prefix cache in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = np.zeros((3, 8), np.uint16)
        self.cache: dict[int, int] = {}
        self.log: list[str] = []
        self.reset_answer: object = True
        self.deaf = False

    def answer(self, prompt: int) -> int:
        if prompt not in self.cache:
            self.cache[prompt] = prompt * int(self.fused.astype(np.int64).sum())
        return self.cache[prompt]

    def read(self, name: str) -> TensorBits:
        return to_bits(self.fused[:, ROWS[name]].T)

    def _places(self) -> Mapping[str, Place]:
        return {n: Place("U16", (rows.stop - rows.start, 3)) for n, rows in ROWS.items()}

    def _peek(self, name: str, positions: Positions | None) -> Words:
        flat = self.fused[:, ROWS[name]].T.reshape(-1)
        return flat if positions is None else flat[positions]

    def _poke(self, name: str, positions: Positions | None, words: Words) -> None:
        self.log.append(f"apply {name}")
        if self.deaf:
            return
        flat = self.fused[:, ROWS[name]].T.flat
        flat[slice(None) if positions is None else positions] = words

    def _refresh(self) -> bool:
        self.log.append("reset")
        self.cache.clear()
        return self.reset_answer  # type: ignore[return-value]

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        self.log.append("pause")
        yield
        self.log.append(f"resume {self._ref and self._ref.version}")


def parts(version: int) -> Tensors:
    rng = np.random.default_rng(1)
    made = {n: rng.integers(0, 99, (r.stop - r.start, 3), np.uint16) for n, r in ROWS.items()}
    made["q"][1, 1] += version
    return made


@pytest.fixture
def world() -> World:
    world = World()
    for version in range(3):
        world.publish(parts(version))
    return world


def test_case_029_a_delta_of_q_leaves_k_and_v_bit_for_bit(world: World) -> None:
    engine = FakeEngine()
    subscriber = world.subscriber(engine)
    subscriber.sync(to=0)
    before = engine.fused.copy()
    subscriber.sync(to=1)
    assert np.argwhere(before != engine.fused).tolist() == [[1, 1]]
    assert engine.log[-4:] == ["apply q", "reset", "resume 1"] or "apply k" not in engine.log[-4:]
    assert np.array_equal(engine.fused, np.concatenate(list(parts(1).values())).T)


def test_case_017_loading_again_and_back_gives_the_same_engine(world: World) -> None:
    engine = FakeEngine()
    subscriber = world.subscriber(engine)
    outputs: dict[int, int] = {}
    for version in (0, 0, 1, 0, 2, 1, 2, 2):
        subscriber.sync(to=version)
        assert outputs.setdefault(version, engine.answer(7)) == engine.answer(7)
    assert len(set(outputs.values())) == 3
    switches = len([entry for entry in engine.log if entry.startswith("resume")])
    assert switches == engine.log.count("pause") == engine.log.count("reset") == 6


def test_case_019_the_same_prompt_is_answered_by_the_new_version(world: World) -> None:
    engine = FakeEngine()
    subscriber = world.subscriber(engine)
    subscriber.sync(to=0)
    old = engine.answer(5)
    engine.log.clear()
    subscriber.sync(to=1)
    assert engine.answer(5) == old + 5
    assert engine.log == ["pause", "apply q", "reset", "resume 1"]


@pytest.mark.parametrize("answer", [None, False, 0, 1, "ok", {"success": True}])
def test_case_019_a_reset_that_is_not_confirmed_is_not_reported(
    world: World, answer: object
) -> None:
    engine = FakeEngine()
    subscriber = world.subscriber(engine)
    ref = subscriber.sync(to=0)
    before = engine.fused.copy()
    engine.reset_answer = answer
    with pytest.raises(TargetUncertainError):  # it can't confirm the way back either
        subscriber.sync(to=1)
    assert np.array_equal(engine.fused, before)
    assert ref.version == 0


def test_a_reset_that_fails_once_is_undone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    subscriber = world.subscriber(engine)
    ref = subscriber.sync(to=0)
    answers = iter([False, True])
    monkeypatch.setattr(engine, "_refresh", lambda: next(answers))
    with pytest.raises(TargetError, match="did not confirm"):
        subscriber.sync(to=1)
    assert engine.ref == ref
    assert engine.verify() == ref.root


def test_case_061_an_engine_that_loads_nothing_is_noticed(world: World) -> None:
    engine = FakeEngine()
    subscriber = world.subscriber(engine)
    ref = subscriber.sync(to=0)
    engine.deaf = True
    with pytest.raises(IntegrityError, match="read back as other bits"):
        subscriber.sync(to=1)
    assert engine.ref == ref


def test_case_003_a_failure_at_any_write_is_undone(world: World) -> None:
    for failing in range(1, 4):
        engine = FakeEngine()
        subscriber = world.subscriber(engine)
        subscriber.sync(to=2)
        ref, before = engine.ref, engine.fused.copy()
        staged = World_with_all_changed(world).stage_into(engine)
        count = 0
        original = engine._poke

        def poke(
            name: str,
            positions: Positions | None,
            words: Words,
            *,
            original=original,  # type: ignore[no-untyped-def]
            failing: int = failing,
        ) -> None:
            nonlocal count
            count += 1
            original(name, positions, words)
            if count == failing:
                raise OSError("the device went away")

        engine._poke = poke  # type: ignore[method-assign]
        with pytest.raises(OSError, match="went away"):
            engine.commit(staged)
        assert engine.ref == ref
        assert np.array_equal(engine.fused, before)
        del engine._poke
        assert subscriber.sync(to=1) == world.refs[1]


class World_with_all_changed:
    """A version in which every tensor differs, staged by hand."""

    def __init__(self, world: World) -> None:
        self._subscriber_world = world

    def stage_into(self, engine: FakeEngine):  # type: ignore[no-untyped-def]
        world = self._subscriber_world
        if len(world.refs) == 3:
            world.publish({name: value + 1 for name, value in parts(2).items()})
        staged = world.subscriber(engine).stage(to=3)
        assert staged is not None
        return staged.draft


def test_words_written_by_somebody_else_meanwhile_are_found_before_writing(world: World) -> None:
    engine = FakeEngine()
    subscriber = world.subscriber(engine)
    subscriber.sync(to=0)
    staged = subscriber.stage(to=1)
    assert staged is not None
    engine.fused[1, 1] ^= 4
    torn = engine.fused.copy()
    with pytest.raises(TargetChangedError, match="Somebody else wrote"):
        subscriber.commit(staged)
    assert np.array_equal(engine.fused, torn)
    assert engine.ref is None
    assert subscriber.sync(to=1) == world.refs[1]


def test_case_013_everything_that_does_not_fit_is_listed(world: World) -> None:
    engine = FakeEngine()
    world.publish({"q": parts(0)["q"], "k": parts(0)["k"][:1], "x": parts(0)["v"]})
    with pytest.raises(TensorMismatchError) as raised:
        world.subscriber(engine).sync()
    for part in ("'v'", "'x'", "'k' is U16[2, 3] here and U16[1, 3]"):
        assert part in str(raised.value)
    assert not engine.fused.any()
