"""The trainer on several ranks: FSDP2, one leader, and the same run after a stop."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.gloo_ranks import RUN, run_ranks
from tests.models import tiny_module
from tests.train_world import TrainWorld

from farcast.store import open_store
from farcast.store.archive import Archive
from farcast.train.loop import Trainer
from farcast.train.policy import Policy


def alone(folder: Path, optimizer: str) -> list[list[str]]:
    """The same run in one process, in the form of the ranks' reports."""
    world = TrainWorld(folder, steps=2, optimizer=optimizer)
    trainer, policy, publisher = world.trainer()
    assert isinstance(trainer, Trainer)
    assert isinstance(policy, Policy)
    world.send(publisher.publish(policy.served(), 0), groups=5)
    trainer.run()
    return [
        [
            *map(str, (r.step, r.published.ref.version, r.root, r.loss, r.grad_norm)),
            ",".join(r.consumed),
        ]
        for r in world.reports
    ]


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.full)])
def test_two_ranks_train_as_one_process_does_and_go_on_after_a_stop(
    tmp_path: Path, optimizer: str
) -> None:
    place = tmp_path / optimizer
    place.mkdir()
    assert run_ranks("train_loop", 2, place) == [0, 0]
    got = [line.split() for line in (place / "reports").read_text().splitlines()]
    expected = alone(place / "alone", optimizer)
    assert [row[:2] for row in got] == [["1", "1"], ["2", "2"]]
    assert [row[-1] for row in got] == [row[-1] for row in expected]
    for mine, theirs in zip(got, expected, strict=True):
        assert float(mine[3]) == pytest.approx(float(theirs[3]), abs=2e-2)
        assert float(mine[4]) == pytest.approx(float(theirs[4]), rel=5e-2)
    assert float(got[0][4]) == pytest.approx(float(expected[0][4]), rel=1e-4)
    archive = Archive(open_store(str(place / "store")), RUN)
    for row in got:
        assert archive.restore(int(row[1])).ref.root == row[2]
    names = set(archive.restore(0).entries)
    assert names == {name for name, _ in tiny_module().named_parameters()}
