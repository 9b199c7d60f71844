"""How a Hugging Face model folder says which file holds which tensor.

Two layouts: one `model.safetensors`, or shard files that `model.safetensors.index.json` names.
The single file or the index is the *pointer*: a folder holds the version that its pointer
leads to, so replacing the pointer in one rename switches versions. Stray files beside it mean
nothing and are left alone.

Refuses a folder that could be read in two ways, an index whose file names are not plain names
(they can't leave the folder), and an index that its files contradict.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from farcast.errors import FormatError, IntegrityError, LimitError, TargetError
from farcast.replica import files
from farcast.replica.shards import Shard, read_shard

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

MAX_INDEX_BYTES = 1 << 28
"""A quarter of a million tensors of a kilobyte each; real indexes are a few megabytes."""

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@ -]*\.safetensors")
_OWN = re.compile(r"model-v\d{1,12}-[0-9a-f]{16}-\d{5}\.safetensors")
_MAX_NAME_BYTES = 255


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A folder as it was read. Equal layouts are the same files."""

    folder: Path
    pointer: str | None = None
    """`SINGLE`, `INDEX`, or None while the folder holds no model."""
    pointer_identity: files.FileIdentity | None = None
    shards: Mapping[str, Shard] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)
    """Tensor name -> file name."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Of the index, handed on as it is."""

    @property
    def is_single(self) -> bool:
        return self.pointer == SINGLE

    def moved(self) -> str | None:
        """The first file that is not what it was when this was read; None if all are."""
        for name, shard in self.shards.items():
            if files.identity(shard.path) != shard.identity:
                return name
        for name in (SINGLE, INDEX):
            expected = self.pointer_identity if name == self.pointer else None
            if files.identity(self.folder / name) != expected:
                return name
        return None


def is_plain_name(name: str) -> bool:
    """A file name that stays in its folder on every system, and can't be hidden or a device."""
    return bool(_PLAIN.fullmatch(name)) and len(name) <= _MAX_NAME_BYTES


def shard_name(version: int, token: str, number: int) -> str:
    """A name that no other version's file ever has; `token` is 16 hex digits, drawn once."""
    return f"model-v{version}-{token}-{number:05d}.safetensors"


def is_own_shard(name: str) -> bool:
    """Whether `shard_name` made it: without an index that names it, nobody needs the file."""
    return bool(_OWN.fullmatch(name))


def read_layout(folder: Path) -> Layout:
    """What the folder holds; an absent or empty folder is an empty layout."""
    single, index = (files.identity(folder / name) for name in (SINGLE, INDEX))
    if single is not None and index is not None:
        raise TargetError(
            f"{folder} holds both {SINGLE} and {INDEX}, which engines read differently; "
            "remove the one that is not meant."
        )
    if single is not None:
        shard = read_shard(folder / SINGLE)
        return Layout(
            folder=folder,
            pointer=SINGLE,
            pointer_identity=shard.identity,
            shards={SINGLE: shard},
            where=dict.fromkeys(shard.spans, SINGLE),
        )
    if index is not None:
        return _read_indexed(folder)
    _refuse_orphans(folder)
    return Layout(folder=folder)


def encode_index(where: Mapping[str, str], metadata: Mapping[str, Any], size: int) -> bytes:
    """The index file as the transformers library writes it."""
    value = {
        "metadata": {**metadata, "total_size": size},
        "weight_map": dict(sorted(where.items())),
    }
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


def _read_indexed(folder: Path) -> Layout:
    path = folder / INDEX
    with files.opened(path) as file:
        identity = files.identity_of(file)
        if identity.size > MAX_INDEX_BYTES:
            raise LimitError(f"{path} has {identity.size} bytes, over the limit; restore it.")
        data = bytes(files.read_at(file, 0, identity.size, path))
    try:
        index = msgspec.json.decode(data, type=_Index)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError(f"{path} is not an index ({error}); restore it.") from error
    for name in set(index.weight_map.values()):
        if not is_plain_name(name):
            raise FormatError(
                f"{path} names the file {name[:80]!r}, which is not one in this folder; "
                "do not use this checkpoint."
            )
    shards = {name: _listed_shard(folder, name) for name in sorted(set(index.weight_map.values()))}
    for tensor, name in index.weight_map.items():
        if tensor not in shards[name].spans:
            raise IntegrityError(
                f"{path} says that {name} holds {tensor[:80]!r}, but it does not; restore both."
            )
    return Layout(
        folder=folder,
        pointer=INDEX,
        pointer_identity=identity,
        shards=shards,
        where=index.weight_map,
        metadata=index.metadata,
    )


def _listed_shard(folder: Path, name: str) -> Shard:
    try:
        return read_shard(folder / name)
    except FileNotFoundError:
        raise IntegrityError(
            f"{folder / INDEX} names {name}, which is not there; restore it, or remove the "
            "index to fetch everything again."
        ) from None


def _refuse_orphans(folder: Path) -> None:
    """Shards without an index: an engine that loads every file would mix them with ours.

    Own ones were placed by an update that died before its first index; the next one removes them.
    """
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return
    orphans = sorted(n for n in names if n.endswith(".safetensors") and not is_own_shard(n))
    if orphans:
        raise TargetError(
            f"{folder} holds {orphans[0]!r} but no {INDEX}; restore the index, or remove the "
            "files to fetch everything again."
        )
