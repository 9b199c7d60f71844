"""`verify` rebuilds everything, and finds every single thing that was tampered with."""

import io
import json
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from rich.console import Console

from farcast.dashboard.summary import show_report
from farcast.delta import all_bits, entry_of, root_of
from farcast.errors import ObjectNotFoundError
from farcast.fleet.audit import AuditReport, audit
from farcast.fleet.records import Receipt, StepRecord
from farcast.fleet.registry import Registry
from farcast.lineage import RunRecord, object_key, version_key
from farcast.publish import Publisher
from farcast.store import Store, collect_garbage, open_store
from farcast.store.archive import Archive
from farcast.trajectory import Trajectory, TrajectorySender, Turn
from farcast.types import PolicySpan, VersionRef

VERSIONS = 7


def tensors(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    weights = {"a": rng.standard_normal(400, np.float32), "b": rng.standard_normal(30, np.float32)}
    for later in range(1, step + 1):
        weights["a"][later * 3] += 1
    return weights


def trajectory(name: str, ref: VersionRef, worker: str = "w1") -> Trajectory:
    return Trajectory(
        id=name,
        group_id=f"g-{name}",
        group_size=1,
        worker_id=worker,
        token_ids=(1, 2, 3),
        logprobs=(0.0, -0.5, -0.5),
        loss_mask=(False, True, True),
        spans=(PolicySpan(1, 3, ref.version, ref.root),),
        turns=(Turn(role="user", start=0, end=1), Turn(role="model", start=1, end=3)),
        reward=1.0,
        finish_reason="stop",
    )


@pytest.fixture
def run() -> Store:
    """A small honest run: an anchor every three versions, a replica, a worker."""
    store = open_store("memory://")
    registry = Registry(store)
    sender = TrajectorySender(store, "run", "w1")
    Archive(store, "run").create_run(RunRecord(run_id="run", created="2026-01-01T00:00:00Z"))
    with Publisher(store, "run", anchor_every=3) as publisher:
        for step in range(VERSIONS):
            weights = tensors(step)
            ref = publisher.publish(weights, step)
            live = root_of({name: entry_of(bits) for name, bits in all_bits(weights).items()})
            used = (f"t{step - 1}",) if step else ()
            registry.put_step(
                StepRecord(version=step, step=step, root=live, incarnation="a", consumed=used)
            )
            registry.put_receipt(
                Receipt(
                    replica_id="r1",
                    version=step,
                    root=live,
                    staged_seconds=0,
                    commit_seconds=0,
                    bytes_fetched=1,
                )
            )
            sender.submit(trajectory(f"t{step}", ref))
    return store


def test_an_honest_run_verifies_wholly(run: Store) -> None:
    seen: list[str] = []
    report = audit(run, progress=lambda what, *_: seen.append(what))
    assert report.differences == ()
    assert report.roots_match
    assert (report.versions_published, report.versions_verified) == (VERSIONS, VERSIONS)
    assert report.anchor_versions == (0, 3, 6)
    assert report.anchors_verified == 3
    assert report.receipts_verified == report.steps_recorded == VERSIONS
    assert report.spans_verified == VERSIONS
    assert (report.account.submitted, report.account.consumed) == (VERSIONS, VERSIONS - 1)
    assert report.account.unread == 1
    assert "rebuilding version 0" in seen


def test_collected_versions_are_counted_and_a_hole_stays_a_failure(run: Store) -> None:
    collect_garbage(Archive(run, "run"), keep=2, grace=0)
    report = audit(run)
    assert report.differences == ()
    assert report.roots_match
    assert (report.versions_published, report.versions_verified) == (4, 4)
    assert (report.versions_collected, report.claims_collected) == (3, 6)
    assert (report.receipts_verified, report.spans_verified) == (4, 4)
    out = io.StringIO()
    show_report(report, Console(file=out, width=80, color_system=None))
    assert "3 older versions, removed up to the anchor at 3; 6 claims" in " ".join(
        out.getvalue().replace("│", " ").split()
    )
    run.delete(version_key(5))
    assert any(line.startswith("version 5: it is gone") for line in audit(run).differences)


def test_lost_first_versions_are_not_taken_for_collected_ones(run: Store) -> None:
    for version in range(2):
        run.delete(version_key(version))
    report = audit(run)
    assert not report.roots_match
    assert any(
        line.startswith("version 2: it cannot be rebuilt, no anchor leads to it")
        for line in report.differences
    )


def test_a_store_without_a_run_is_a_sentence() -> None:
    with pytest.raises(ObjectNotFoundError, match="There is no run"):
        audit(open_store("memory://"))


def flip(store: Store, key: str) -> None:
    data = bytearray(store.get(key, max_bytes=1 << 24))
    data[len(data) // 2] ^= 1
    store.put(key, bytes(data))


def damage_a_delta(store: Store) -> str:
    manifest = Archive(store, "run").manifest(2)
    flip(store, object_key(manifest.deltas[0].objects[0]))
    return "version 2: deltas: "


def damage_an_anchor(store: Store) -> str:
    manifest = Archive(store, "run").manifest(3)
    assert manifest.anchor is not None
    flip(store, object_key(manifest.anchor[0]))
    return "version 3: anchor: "


def remove_an_object(store: Store) -> str:
    manifest = Archive(store, "run").manifest(4)
    store.delete(object_key(manifest.deltas[0].objects[0]))
    return "version 4: deltas: "


def remove_a_version(store: Store) -> str:
    store.delete(version_key(2))
    return "version 2: it is gone"


def swap_two_manifests(store: Store) -> str:
    store.put(version_key(2), store.get(version_key(1), max_bytes=1 << 20))
    return "version 2: manifest: "


def lie_about_a_root(store: Store) -> str:
    manifest = json.loads(store.get(version_key(5), max_bytes=1 << 20))
    manifest["root"] = "f" * 64
    store.put(version_key(5), json.dumps(manifest).encode())
    return "version 5: the store rebuilds"


def lie_in_a_step(store: Store) -> str:
    record = next(Registry(store).steps(after=3))
    wrong = msgspec.structs.replace(record, root="f" * 64)
    store.put("fleet/steps/000000000004.json", msgspec.json.encode(wrong))
    return "version 4: the trainer says ffffffffffff"


def lie_in_a_receipt(store: Store) -> str:
    receipt = next(Registry(store).receipts())
    wrong = msgspec.structs.replace(receipt, root="f" * 64)
    store.put("fleet/receipts/r1/000000000000.json", msgspec.json.encode(wrong))
    return "version 0: replica r1 says ffffffffffff"


def lie_in_a_trajectory(store: Store) -> str:
    sender = TrajectorySender(store, "run", "w2")
    sender.submit(trajectory("liar", VersionRef("run", 3, "f" * 64), "w2"))
    return "version 3: trajectory liar says ffffffffffff"


def claim_a_version_that_never_was(store: Store) -> str:
    sender = TrajectorySender(store, "run", "w2")
    sender.submit(trajectory("liar", VersionRef("run", 99, "f" * 64), "w2"))
    return "version 99: trajectory liar names it"


def damage_a_batch(store: Store) -> str:
    flip(store, "trajectories/w1/000000000002")
    return "trajectories/w1/000000000002: "


def copy_a_batch(store: Store) -> str:
    batch = store.get("trajectories/w1/000000000000", max_bytes=1 << 20)
    store.put("trajectories/w1/000000000007", batch)
    return "trajectories/w1/000000000007: it is a stray copy"


def lose_a_batch(store: Store) -> str:
    store.delete("trajectories/w1/000000000000")
    return "trajectory t0 was counted but is not in the store"


def train_twice_on_one(store: Store) -> str:
    record = next(Registry(store).steps(after=5))
    twice = msgspec.structs.replace(record, consumed=("t1", "t5"))
    store.put("fleet/steps/000000000006.json", msgspec.json.encode(twice))
    return "trajectory t1 was trained on twice"


def lose_a_step_record(store: Store) -> str:
    store.delete("fleet/steps/000000000003.json")
    return "version 3: the trainer left no record of it"


@pytest.mark.parametrize(
    "tamper",
    [
        damage_a_delta,
        damage_an_anchor,
        remove_an_object,
        remove_a_version,
        swap_two_manifests,
        lie_about_a_root,
        lie_in_a_step,
        lie_in_a_receipt,
        lie_in_a_trajectory,
        claim_a_version_that_never_was,
        damage_a_batch,
        copy_a_batch,
        lose_a_batch,
        train_twice_on_one,
        lose_a_step_record,
    ],
)
def test_whatever_is_tampered_with_is_found(run: Store, tamper: Callable[[Store], str]) -> None:
    expected = tamper(run)
    report = audit(run)
    assert any(line.startswith(expected) for line in report.differences), report.differences


def test_the_walk_goes_on_from_the_next_anchor(run: Store) -> None:
    damage_a_delta(run)
    report = audit(run)
    assert not report.roots_match
    assert report.versions_verified == VERSIONS - 1
    assert [line for line in report.differences if "cannot be rebuilt" in line] == [
        "version 2: it cannot be rebuilt"
    ]


def test_a_report_is_plain_json(run: Store) -> None:
    report = audit(run)
    assert msgspec.json.decode(msgspec.json.encode(report), type=AuditReport) == report


def test_a_damaged_file_of_the_run_is_found() -> None:
    store = open_store("memory://")
    archive = Archive(store, "run")
    tokenizer = archive.put_object(b"words")
    archive.create_run(
        RunRecord(
            run_id="run", created="2026-01-01T00:00:00Z", assets={"tokenizer.json": tokenizer}
        )
    )
    with Publisher(store, "run") as publisher:
        publisher.publish(tensors(0), 0)
    assert not any("tokenizer.json" in line for line in audit(store).differences)
    store.delete(object_key(tokenizer))
    store.put(object_key(tokenizer), b"wards")
    report = audit(store)
    assert any("tokenizer.json" in line for line in report.differences)
    assert not report.roots_match
