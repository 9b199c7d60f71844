"""One safetensors file: read with every number in it checked, written with a fixed layout.

    offset  size  what
    0       8     length of the header, little endian
    8       n     header: JSON, name -> {dtype, shape, data_offsets}, and "__metadata__"
    8 + n   ...   tensors, little endian, C order, back to back

Refused, cheapest check first: a file shorter than its own header length says; a header over
`MAX_HEADER_BYTES` or with more than `MAX_TENSORS` names; offsets that leave the file, overlap,
leave holes, or differ from what dtype and shape need. A tensor's name is only ever a key in
the header: it never becomes a path.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from farcast.delta import TensorBits, nbytes_of
from farcast.errors import FormatError, LimitError, TargetChangedError, TensorMismatchError
from farcast.replica import files
from farcast.types import TensorEntry

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library itself, so that what we write others can read."""

MAX_TENSORS = 1 << 18
"""Tensors of one file: three times those of the largest public mixture-of-experts models."""

_UNKNOWN_TO_SAFETENSORS = frozenset({"C128"})

METADATA = "__metadata__"
DEFAULT_METADATA: Mapping[str, str] = {"format": "pt"}
"""Loaders of the transformers library refuse a file that doesn't name its framework."""

_LENGTH = struct.Struct("<Q")
_Offset = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[_Offset, ...], msgspec.Meta(max_length=32)]
    data_offsets: tuple[_Offset, _Offset]


class Span(NamedTuple):
    """A tensor in a file; `start` counts from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A file as it was when its header was read."""

    path: Path
    identity: files.FileIdentity
    spans: Mapping[str, Span]
    metadata: Mapping[str, str]

    def read(self, name: str) -> TensorBits:
        """The bits of one tensor. Raises `TargetChangedError` if the file is not the same."""
        span = self.spans[name]
        with files.opened(self.path) as file:
            if files.identity_of(file) != self.identity:
                raise TargetChangedError(
                    f"{self.path} was changed since it was first read; sync again."
                )
            data = files.read_at(file, span.start, span.size, self.path)
        return TensorBits(
            dtype=span.dtype, shape=span.shape, data=np.frombuffer(data, dtype=np.uint8)
        )


def read_shard(path: Path) -> Shard:
    """Parse and check a file's header."""
    with files.opened(path) as file:
        identity = files.identity_of(file)
        if identity.size < _LENGTH.size:
            raise FormatError(f"{path} is too short to be a safetensors file; restore it.")
        (length,) = _LENGTH.unpack(files.read_at(file, 0, _LENGTH.size, path))
        if length > min(MAX_HEADER_BYTES, identity.size - _LENGTH.size):
            raise LimitError(
                f"{path} says that its header has {length} bytes, more than the file or "
                "the format allows; restore it."
            )
        header = bytes(files.read_at(file, _LENGTH.size, length, path))
    spans, metadata = _parse(header, identity.size - _LENGTH.size - length, path)
    return Shard(path=path, identity=identity, spans=spans, metadata=metadata)


def _parse(header: bytes, size: int, path: Path) -> tuple[dict[str, Span], dict[str, str]]:
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        if len(raw) > MAX_TENSORS:
            raise LimitError(f"{path} lists {len(raw)} tensors, over {MAX_TENSORS}; restore it.")
        metadata = msgspec.json.decode(raw.pop(METADATA, msgspec.Raw(b"{}")), type=dict[str, str])
        tensors = {name: msgspec.json.decode(text, type=_Tensor) for name, text in raw.items()}
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError(f"{path} has a broken header ({error}); restore it.") from error
    begin = _LENGTH.size + len(header)
    position = 0
    spans: dict[str, Span] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        start, end = tensor.data_offsets
        needed = _size(name, tensor, path)
        if start != position or end - start != needed or end > size:
            raise FormatError(
                f"{path} puts {name[:80]!r} at bytes {start} to {end}, where its shape needs "
                f"{needed} from {position} of {size}; restore it."
            )
        spans[name] = Span(tensor.dtype, tensor.shape, begin + start, needed)
        position = end
    if position != size:
        raise FormatError(f"{path} has {size - position} bytes that no tensor owns; restore it.")
    return spans, metadata


def _size(name: str, tensor: _Tensor, path: Path) -> int:
    try:
        return nbytes_of(tensor.dtype, tensor.shape)
    except FormatError as error:
        raise FormatError(f"{path} lists {name[:80]!r} wrongly: {error} Restore it.") from error


def plan_shard(
    entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, Span]]:
    """The first bytes of a file that holds `entries`, and where each tensor goes.

    Wide dtypes come first, so that every tensor is aligned to its own width.
    """
    header: dict[str, object] = {METADATA: dict(sorted(metadata.items()))}
    offsets: dict[str, tuple[int, int]] = {}
    position = 0
    for name in sorted(entries, key=lambda name: (-nbytes_of(entries[name].dtype, (8,)), name)):
        entry = entries[name]
        size = nbytes_of(entry.dtype, entry.shape)
        offsets[name] = (position, size)
        header[name] = _Tensor(entry.dtype, entry.shape, (position, position + size))
        position += size
    text = _encoded(header)
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES or len(entries) > MAX_TENSORS:
        raise LimitError(
            f"{len(entries)} tensors are too many for one safetensors file; allow more shards."
        )
    begin = _LENGTH.size + len(text)
    spans = {
        name: Span(entries[name].dtype, entries[name].shape, begin + start, size)
        for name, (start, size) in offsets.items()
    }
    return _LENGTH.pack(len(text)) + text, spans


def check_writable(entries: Mapping[str, TensorEntry]) -> None:
    """Refuse tensors that no safetensors file can hold."""
    for name, entry in entries.items():
        if name == METADATA or not _is_text(name):
            raise TensorMismatchError(
                f"A checkpoint file can't hold a tensor named {name[:80]!r}; rename it at the "
                "trainer."
            )
        if entry.dtype in _UNKNOWN_TO_SAFETENSORS:
            raise TensorMismatchError(
                f"A checkpoint file can't hold {name[:80]!r}, which is {entry.dtype}; publish it "
                "as two real tensors."
            )


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def _encoded(header: Mapping[str, object]) -> bytes:
    return msgspec.json.encode(header)
