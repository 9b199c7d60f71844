"""An engine of several members: all of them hold a version, or none does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from group_engine import GroupEngine, weights
from test_engine_contract import RUN, Case, write_folder

from farcast.delta import TensorBits
from farcast.engines.http_engine import label_of
from farcast.engines.live_engine import EngineTarget
from farcast.errors import (
    FarcastError,
    IntegrityError,
    TargetChangedError,
    TargetError,
    TargetUncertainError,
    TensorMismatchError,
)
from farcast.publish import Publisher
from farcast.replica import Subscriber
from farcast.store import MemoryStore


class Group:
    """Members at version 0, and the case around them."""

    def __init__(self, folder: Path, members: int = 2, **options: object) -> None:
        self.model = write_folder(folder / "model", weights(0))
        self.engine = GroupEngine(members, weights(0))
        self.scratch = folder / "scratch"
        self.target = self.new_target(**options)
        self.case = Case(self.target, self.engine.fingerprint, lambda: None)
        self.engine.calls.clear()

    def new_target(self, **options: object) -> EngineTarget:
        return EngineTarget(self.engine, self.model, scratch=self.scratch, **options)  # type: ignore[arg-type]


@pytest.fixture
def group(tmp_path: Path) -> Group:
    return Group(tmp_path, members=2)


def test_a_member_that_fails_takes_all_back(group: Group) -> None:
    """Case 071."""
    before = group.engine.fingerprint()
    group.case.publish()
    staged = group.case.subscriber.stage()
    assert staged is not None
    group.engine.faults = {1}
    with pytest.raises(TargetError):
        group.case.subscriber.commit(staged)
    assert group.engine.fingerprint() == before
    assert group.target.ref == group.case.refs[0]
    labels = {receipt.label for receipt in group.engine.receipts()}
    assert label_of(group.case.refs[1]) not in labels
    assert not group.engine.paused
    group.engine.faults = set()
    assert group.case.subscriber.sync() == group.case.refs[1]


def test_receipts_of_exactly_the_expected_members_are_needed(group: Group) -> None:
    before = group.engine.fingerprint()
    group.case.publish()
    staged = group.case.subscriber.stage()
    assert staged is not None
    group.engine.absent = {0}
    with pytest.raises(TargetUncertainError):  # nor can it tell that it went back
        group.case.subscriber.commit(staged)
    assert group.engine.fingerprint() == before
    assert group.engine.paused, "an engine that nobody knows must not go on"
    with pytest.raises(TargetUncertainError):
        group.case.subscriber.stage()


def test_the_order_of_a_commit(tmp_path: Path) -> None:
    """Case 019: pause, apply, reset, set version, resume."""
    group = Group(tmp_path, caches="dropped")
    group.case.publish()
    group.case.subscriber.sync()
    order = [
        "open_update",
        "pause",
        "write",
        "drop_caches",
        "name_weights",
        "resume",
        "close_update",
    ]
    assert group.engine.calls == order


def test_caches_that_were_not_dropped_fail_the_commit(tmp_path: Path) -> None:
    """Case 019: anything but explicit success, then the old version is back."""
    group = Group(tmp_path, caches="dropped")
    before = group.engine.fingerprint()
    group.case.publish()
    group.engine.keeps_caches = True
    with pytest.raises(FarcastError):
        group.case.subscriber.sync()
    assert group.engine.fingerprint() == before
    assert group.engine.label() == label_of(group.case.refs[0])


def test_members_that_only_say_yes_are_not_believed(group: Group) -> None:
    """Case 061."""
    group.case.publish()
    group.engine.lies = True
    with pytest.raises(IntegrityError):
        group.case.subscriber.sync()
    assert group.target.ref == group.case.refs[0]


def test_buffers_outside_the_checkpoint_keep_their_values(group: Group) -> None:
    """Case 015."""
    for _ in range(3):
        group.case.publish()
        group.case.subscriber.sync()
    assert all(float(shard.scale) == pytest.approx(0.0188) for shard in group.engine.shards)


def test_padding_rows_stay_and_the_last_rows_arrive(tmp_path: Path) -> None:
    """Case 023: ten rows over four members, three each; two rows are padding."""
    group = Group(tmp_path, members=4)
    bits = weights(0)
    words = bits["embed.weight"].data.view("<u2").copy()
    words[-8:] = np.arange(8) + 100
    bits["embed.weight"] = TensorBits("BF16", (10, 8), words.view(np.uint8))
    group.case.publish(bits)
    group.case.subscriber.sync()
    last = group.engine.shards[-1].embed.view(dtype=torch.int16)
    assert last[0].tolist() == list(range(100, 108))
    assert last[1:].count_nonzero() == 0


def test_another_shape_is_refused_with_both_shapes(group: Group) -> None:
    """Case 023."""
    group.case.publish(weights(0, **{"embed.weight": (16, 8)}))
    with pytest.raises(TensorMismatchError, match=r"\[10, 8\].*\[16, 8\]"):
        group.case.subscriber.sync()


def test_a_tied_head_under_its_own_name_is_let_through(group: Group) -> None:
    bits = weights(1)
    bits["head.weight"] = bits["embed.weight"]
    group.case.publish(bits)
    assert group.case.subscriber.sync() == group.case.refs[-1]
    assert group.target.verify() == group.case.refs[-1].root


def test_a_head_of_its_own_is_not_left_out_silently(group: Group) -> None:
    bits = weights(1)
    bits["head.weight"] = TensorBits("BF16", (10, 8), np.zeros(160, np.uint8))
    group.case.publish(bits)
    with pytest.raises(TensorMismatchError, match=r"head\.weight"):
        group.case.subscriber.sync()


PACKED = {"packed.weight": (4, 8)}


class Packing:
    """An engine that computes what it stores of one tensor: there is no map to write through."""

    def __init__(self, folder: Path) -> None:
        model = write_folder(folder / "model", weights(0, **PACKED))
        self.engine = GroupEngine(2, weights(0, **PACKED))
        self.target = EngineTarget(self.engine, model, scratch=folder / "scratch")
        store = MemoryStore()
        self.publisher = Publisher(store, RUN)
        self.subscriber = Subscriber(store, RUN, self.target)
        self.publisher.publish(weights(0, **PACKED), step=0)
        self.subscriber.sync()


@pytest.fixture
def packing(tmp_path: Path) -> Packing:
    return Packing(tmp_path)


def test_an_opaque_tensor_is_loaded_whole_and_that_is_said(
    packing: Packing, caplog: pytest.LogCaptureFixture
) -> None:
    same = weights(0, **PACKED)["packed.weight"]
    packing.publisher.publish({**weights(1, **PACKED), "packed.weight": same}, step=1)
    packing.subscriber.sync()
    assert not caplog.records, "an opaque tensor that stays as it is costs nothing"
    packing.publisher.publish(weights(2, **PACKED), step=2)
    assert packing.subscriber.sync().version == 2
    assert "loaded whole" in caplog.text
    assert "computes" in packing.target.why_opaque("packed.weight")
    assert packing.engine.fingerprint() == GroupEngine(2, weights(2, **PACKED)).fingerprint()


def test_an_opaque_tensor_is_loaded_back_when_a_commit_fails(packing: Packing) -> None:
    packing.publisher.publish(weights(1, **PACKED), step=1)
    before = packing.engine.fingerprint()
    packing.engine.faults = {1}
    with pytest.raises(TargetError):
        packing.subscriber.sync()
    assert packing.engine.fingerprint() == before
    packing.engine.faults = set()
    packing.subscriber.sync()
    assert packing.engine.fingerprint() == GroupEngine(2, weights(1, **PACKED)).fingerprint()


def test_an_opaque_tensor_of_a_commit_that_nobody_finished_is_not_taken_for_the_old_one(
    packing: Packing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sidecar that is killed in the pause: the words on its disk are still the old ones, and of
    what changed nothing can be read back."""
    bits = {**weights(0, **PACKED), "packed.weight": weights(3, **PACKED)["packed.weight"]}
    packing.publisher.publish(bits, step=1)

    def die(*_: object) -> None:
        raise SystemExit

    for name in ("name_weights", "undo"):
        monkeypatch.setattr(packing.engine, name, die)
    with pytest.raises(TargetUncertainError):
        packing.subscriber.sync()
    monkeypatch.undo()
    scratch = tmp_path / "scratch"
    again = EngineTarget(packing.engine, tmp_path / "model", scratch=scratch)
    subscriber = Subscriber(packing.subscriber.archive.store, RUN, again)
    with pytest.raises(TargetUncertainError, match="middle of a commit"):
        subscriber.sync()


def test_an_exchanged_parameter_is_noticed(group: Group) -> None:
    group.case.publish()
    staged = group.case.subscriber.stage()
    assert staged is not None
    shard = group.engine.shards[1]
    shard.norm = torch.nn.Parameter(shard.norm.clone(), False)
    with pytest.raises((TargetChangedError, TargetUncertainError)):
        group.case.subscriber.commit(staged)


def test_a_sidecar_that_starts_again_attaches_to_what_it_left(group: Group) -> None:
    for _ in range(2):
        group.case.publish()
        group.case.subscriber.sync()
    again = Subscriber(group.case.store, RUN, group.new_target())
    assert again.stage() is None
    assert again.ref == group.case.refs[-1]


def test_a_mirror_that_was_damaged_is_noticed_and_never_served(group: Group) -> None:
    group.case.publish()
    group.case.subscriber.sync()
    mirror = group.scratch / "mirror"
    data = bytearray(mirror.read_bytes())
    data[11] ^= 1
    mirror.write_bytes(data)
    before = group.engine.fingerprint()
    group.case.publish()
    with pytest.raises(FarcastError):
        group.case.subscriber.sync()
    assert group.engine.fingerprint() == before


def test_words_on_disk_that_were_damaged_reach_no_engine(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = group.engine.stage

    def stage(words: Path, digest: str, *rest: Any) -> None:
        data = bytearray(words.read_bytes())
        data[-1] ^= 1
        words.write_bytes(data)
        original(words, digest, *rest)

    monkeypatch.setattr(group.engine, "stage", stage)
    before = group.engine.fingerprint()
    group.case.publish()
    with pytest.raises(IntegrityError):
        group.case.subscriber.sync()
    assert group.engine.fingerprint() == before


def test_nothing_is_left_on_disk_but_the_mirror_and_the_mark(group: Group) -> None:
    for _ in range(2):
        group.case.publish()
        group.case.subscriber.sync()
    assert sorted(path.name for path in group.scratch.iterdir()) == ["mirror", "seen.json"]


def test_what_a_dead_sidecar_had_staged_is_removed(group: Group) -> None:
    """Each may be of the model's size, and nobody else would ever remove it."""
    left = [group.scratch / name for name in ("0a1b.words", "0a1b.tensors", "2c3d.seen")]
    for path in left:
        path.write_bytes(b"cut off")
    again = Subscriber(group.case.store, RUN, group.new_target())
    again.sync()
    assert not any(path.exists() for path in left)
