"""A fork has every format that the version it begins as was served in, with its rule and its root,
and the trainer that goes on there sends differences in each."""

from pathlib import Path

import pytest
import torch
from msgspec import UNSET

from farcast.errors import ConfigError, RunMismatchError
from farcast.fleet.forking import Forked, fork_run
from farcast.fleet.layout import RunFolder
from farcast.lineage import Manifest, RunRecord
from farcast.publish import Publisher
from farcast.store import MemoryStore, open_store
from farcast.store.archive import Archive
from version_world import RUN, plain

FORMATS = ("bf16", "int8-rule_mlp", "int4_g32-scale1.5")


def masters(step: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    names = ("mlp.gate_proj", "mlp.down_proj", "self_attn.q_proj")
    made = {
        f"model.layers.0.{name}.weight": torch.randn(64, 64, generator=random) for name in names
    }
    for tensor in made.values():
        tensor[:step] *= 1.1
    return made


@pytest.fixture
def old() -> MemoryStore:
    store = MemoryStore()
    Archive(store, RUN).create_run(RunRecord(run_id=RUN, created="now"))
    with Publisher(store, RUN, formats=FORMATS) as publisher:
        for step in range(3):
            publisher.publish(masters(step), step)
    return store


def forked(old: MemoryStore, folder: Path, *, version: int = 1, run_id: str = "run2") -> Forked:
    return fork_run(
        old, str(folder / "new"), version=version, run_id=run_id, folder=RunFolder(folder / "two")
    )


def served(manifest: Manifest) -> list[tuple[object, ...]]:
    return [(view.served_format, view.root, view.precision_rule) for view in manifest.views]


def test_a_fork_has_every_format_with_its_root_and_rule(old: MemoryStore, tmp_path: Path) -> None:
    made = forked(old, tmp_path)
    origin = Archive(old, RUN).manifest(1)
    assert made.origin == origin.ref
    new = open_store(tmp_path / "new")
    begun = Archive(new, "run2").manifest(0)
    assert served(begun) == served(origin)
    assert begun.served_formats == FORMATS[:1] + tuple(sorted(FORMATS[1:]))
    assert [view.precision_rule for view in begun.views] == [UNSET, "decoder", "mlp"]
    assert begun.origin == origin.ref
    for name in FORMATS:
        there = Archive(new, "run2", served_format=name).rebuild(0)
        assert plain(there) == plain(Archive(old, RUN, served_format=name).rebuild(1))


def test_a_trainer_goes_on_from_a_fork_with_differences_in_each_format(
    old: MemoryStore, tmp_path: Path
) -> None:
    """Sticky formats go on from what the fork serves, so the bits are those of the old run."""
    made = forked(old, tmp_path)
    new = open_store(tmp_path / "new")
    with Publisher(new, "run2", formats=FORMATS, fork_of=made.origin) as publisher:
        publisher.publish(masters(2), 2)
    after, expected = Archive(new, "run2").manifest(1), Archive(old, RUN).manifest(2)
    assert served(after) == served(expected)
    assert all(view.anchor is None and view.deltas[0].base == 0 for view in after.views)


def test_a_run_in_one_quantised_format_keeps_its_rule(tmp_path: Path) -> None:
    old = MemoryStore()
    Archive(old, RUN).create_run(RunRecord(run_id=RUN, created="now"))
    with Publisher(old, RUN, formats=FORMATS[1:2]) as publisher:
        publisher.publish(masters(0), 0)
    forked(old, tmp_path, version=0)
    begun = Archive(open_store(tmp_path / "new"), "run2").manifest(0)
    assert served(begun) == served(Archive(old, RUN).manifest(0))


def test_a_fork_that_was_stopped_goes_on_and_nothing_else_passes_for_it(
    old: MemoryStore, tmp_path: Path
) -> None:
    made = forked(old, tmp_path)
    new = open_store(tmp_path / "new")
    new.delete("run.json")
    assert forked(old, tmp_path) == made
    assert [info.key for info in new.list("versions/")] == ["versions/000000000000.json"]
    new.delete("run.json")
    with pytest.raises(RunMismatchError, match=r"in all of its formats \(bf16, int4_g32"):
        forked(old, tmp_path, version=2)
    assert [info.key for info in new.list("versions/")] == ["versions/000000000000.json"]


@pytest.mark.parametrize(
    ("name", "words"), [("../x", "no name for a run"), (RUN, "fork of itself")]
)
def test_a_name_that_no_fork_can_have_changes_nothing(
    old: MemoryStore, tmp_path: Path, name: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        forked(old, tmp_path, run_id=name)
    assert list(tmp_path.iterdir()) == []
