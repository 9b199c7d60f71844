"""FSDP2 on real processes: every root is that of the gathered model, nothing waits for ever."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.gloo_ranks import FORMATS, PART_BYTES, RUN, STEPS, run_ranks

from farcast.store import open_store
from farcast.store.archive import Archive


@pytest.mark.parametrize("ranks", [2, 4])
def test_fsdp2_ranks_publish_the_root_of_one_process(tmp_path: Path, ranks: int) -> None:
    assert run_ranks("train", ranks, tmp_path) == [0] * ranks
    stores = {name: open_store(str(tmp_path / name)) for name in ("ranks", "alone")}
    found = {name: Archive(store, RUN) for name, store in stores.items()}
    for version in range(STEPS):
        manifest = found["ranks"].manifest(version)
        assert manifest == found["alone"].manifest(version)
        assert (manifest.anchor is not None) == (version % 3 == 0)
        assert found["ranks"].restore(version).ref.root == manifest.root
    assert manifest.bytes_full / ranks > PART_BYTES  # else objects would be cut otherwise


def test_fsdp2_ranks_serve_the_formats_of_one_process(tmp_path: Path) -> None:
    assert run_ranks("train_formats", 2, tmp_path) == [0, 0]
    found = [Archive(open_store(str(tmp_path / name)), RUN) for name in ("ranks", "alone")]
    for version in range(3):
        views = [
            {view.served_format: view.root for view in archive.manifest(version).views}
            for archive in found
        ]
        assert views[0] == views[1]
        assert set(views[0]) == set(FORMATS)


def test_a_rank_that_dies_does_not_hang_the_others(tmp_path: Path) -> None:
    assert run_ranks("lose_a_rank", 2, tmp_path) == [0, 0]
    newest = Archive(open_store(str(tmp_path / "ranks")), RUN).newest()
    assert newest is not None
    assert newest.version == 0
