"""The small files of a model (config, tokenizer, chat template), from the trainer to replicas.

They travel as objects of the run, named in its record, so that a worker needs nothing but the
store's URL. Weights never travel this way: they come as versions. Refuses file names that are
not plain names, and to write any file whose digest was not verified.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from farcast.errors import ConfigError, FormatError
from farcast.formats import Recipe, checkpoint_config
from farcast.lineage import ObjectRef
from farcast.store.archive import Archive
from farcast.types import NAME_PATTERN

SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model"})
MAX_ASSET_BYTES = 1 << 26
"""A tokenizer of a quarter of a million entries takes about 35 MB as JSON."""


def asset_files(folder: Path) -> Iterator[Path]:
    """The files of a Hugging Face folder that a replica needs beside the weights, by name."""
    for path in sorted(folder.iterdir()):
        if (
            path.suffix in SUFFIXES
            and not path.name.endswith(".index.json")
            and NAME_PATTERN.fullmatch(path.name)
            and path.is_file()
        ):
            if path.stat().st_size > MAX_ASSET_BYTES:
                raise ConfigError(
                    f"{path} is over {MAX_ASSET_BYTES >> 20} MiB; "
                    "keep only the model's own files in that folder."
                )
            yield path


def put_assets(archive: Archive, folder: Path) -> dict[str, ObjectRef]:
    """Store the folder's small files; returns what belongs into the run's record."""
    return {path.name: archive.put_object(path.read_bytes()) for path in asset_files(folder)}


def fetch_assets(archive: Archive, assets: Mapping[str, ObjectRef], folder: Path) -> None:
    """Write the files that are not there yet, or differ."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, ref in assets.items():
        _write(folder / name, archive.get_object(ref))


def write_served_config(folder: Path, recipe: Recipe, names: Iterable[str]) -> None:
    """Let config.json in `folder`, if there is one, tell engines that the tensors called `names`
    are served as `recipe` says. Raises `FormatError` for one that is not a model's."""
    path = folder / "config.json"
    if not path.is_file():
        return
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except msgspec.DecodeError:
        raise FormatError(
            f"{path} is not the configuration of a model; put the model's own there."
        ) from None
    served = checkpoint_config(config, recipe, names)
    if served != config:
        _write(path, msgspec.json.format(msgspec.json.encode(served), indent=2))


def _write(path: Path, data: bytes) -> None:
    """The file with these bytes, as a whole, unless it is there like that."""
    if path.is_file() and path.read_bytes() == data:
        return
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(data)
    part.replace(path)
