"""A folder that follows a run takes no other folder over unasked, and touches none it refuses."""

from pathlib import Path

import pytest

from farcast.errors import ConfigError
from farcast.fleet.connecting import Reach
from farcast.fleet.replica_process import Followed, follow
from farcast.fleet.signals import StopRequest
from farcast.lineage import RunRecord
from farcast.publish import Publisher
from farcast.store import open_store
from farcast.store.archive import Archive
from version_world import RUN, tensors


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = (tmp_path / "store").as_uri()
    archive = Archive(open_store(url), RUN)
    config = archive.put_object(b'{"of": "the run"}')
    archive.create_run(
        RunRecord(run_id=RUN, created="2026-01-01T00:00:00Z", assets={"config.json": config})
    )
    with Publisher(open_store(url), RUN) as publisher:
        publisher.publish(tensors(0), 0)
        publisher.publish(tensors(1), 1)
    return url


def once(url: str, folder: Path, *, overwrite: bool = False) -> Followed:
    return follow(
        Reach(store_url=url), folder, "r1", once=True, overwrite=overwrite, stop=StopRequest()
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "notes.txt"])
def test_a_folder_of_somebody_else_is_left_alone(url: str, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / name).write_bytes(b"mine, and no model")
    before = contents(folder)
    with pytest.raises(ConfigError, match="--overwrite"):
        once(url, folder)
    assert contents(folder) == before
    if name != "model.safetensors":  # what cannot be read is not taken for a model even so
        assert once(url, folder, overwrite=True).version == 1


def test_new_empty_and_own_folders_are_taken(url: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty", "new"):
        assert once(url, tmp_path / name).version == 1


def test_a_copy_of_a_version_is_known(url: str, tmp_path: Path) -> None:
    once(url, tmp_path / "one")
    (tmp_path / "two").mkdir()
    for name, data in contents(tmp_path / "one").items():
        (tmp_path / "two" / name).write_bytes(data)
    assert once(url, tmp_path / "two").bytes_fetched == 0
