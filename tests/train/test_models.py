import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tests.models import tiny_folder

from farcast.config import TrainConfig, decode_config
from farcast.engines.modules import load_module
from farcast.errors import ConfigError
from farcast.train import models


def test_a_folder_that_lacks_something_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no model folder"):
        models.prepare_model(str(tmp_path / "absent"), tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    needed = ("config.json", "model.safetensors", "tokenizer.json")
    for missing in needed:
        for name in needed:
            (folder / name).unlink(missing_ok=True)
            if name != missing:
                (folder / name).write_bytes((tiny_folder() / name).read_bytes())
        with pytest.raises(ConfigError, match=missing.replace("model.", r"\*\.")):
            models.prepare_model(str(folder), tmp_path)
    (folder / needed[-1]).write_bytes((tiny_folder() / needed[-1]).read_bytes())
    assert models.prepare_model(str(folder), tmp_path) == folder


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_leaves_no_half_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(folder: Path, _: Any) -> None:
        (folder / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(models, "_build_tiny", full)
    with pytest.raises(ConfigError, match="No space left"):
        models.prepare_model("tiny", tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_prepared_model_is_durable_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, bool]] = []
    final = tmp_path / "models" / f"tiny-{models._LAYOUT}"

    def fsync(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, final.exists()))

    def small(folder: Path, _: Any) -> None:
        (folder / "below").mkdir()
        (folder / "below" / "config.json").write_text("{}")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(models, "_build_tiny", small)
    assert models.prepare_model("tiny", tmp_path) == final
    before = {inode for inode, named in synced if not named}
    assert before == {p.stat().st_ino for p in (final, *final.rglob("*"))}
    assert [inode for inode, named in synced if named] == [final.parent.stat().st_ino]


def test_weights_that_the_files_lack_are_never_made_up(tmp_path: Path) -> None:
    """transformers fills them at random and only warns; tied ones are no lack."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder(), folder)
    assert load_module(folder) is not None
    lost = "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    del tensors[lost]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"lack 1 weights .*{lost}"):
        load_module(folder)


@pytest.mark.parametrize(
    "text",
    ['{"group_size": 1000000000}', '{"groups_per_step": 99999}', '{"learning_rate": NaN}'],
)
def test_settings_that_no_machine_holds_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        decode_config(text.encode(), TrainConfig)
