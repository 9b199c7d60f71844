"""The small files of a model (config, tokenizer, chat template), from the trainer to replicas.

They travel as objects of the run, named in its record, so that a worker needs nothing but the
store's URL. Weights never travel this way: they come as versions. Refuses file names that are
not plain names, and to write any file whose digest was not verified.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from farcast.errors import ConfigError
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
        path = folder / name
        data = archive.get_object(ref)
        if not path.is_file() or path.read_bytes() != data:
            part = folder / f"{name}.part"
            part.write_bytes(data)
            part.replace(path)
