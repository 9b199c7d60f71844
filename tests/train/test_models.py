import errno
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from safetensors import SafetensorError
from tests.models import tiny_folder

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
