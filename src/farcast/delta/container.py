"""The byte format of a delta or an anchor. Pure: bytes in, values out.

    magic      8   "FARDELT" and the format version
    raw        8   u64, bytes of the header before compression
    packed     8   u64, bytes of the header after compression
    header    ..   zstd frame of msgpack [removed, tables, tensors]
    digests   ..   32 bytes a tensor, BLAKE3 of its new bits, in the header's order
    blobs     ..   one a tensor, in the header's order, back to back
    digest    32   BLAKE3 of everything before

Tensors stand in byte order of their names. All integers are little endian. The trailing digest
is checked first, so that a flipped bit anywhere is refused before anything is parsed.
"""

import struct
from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple

import msgspec
import zstandard
from blake3 import blake3

from farcast.delta.bits import nbytes_of, word_bytes
from farcast.errors import FormatError, IntegrityError, LimitError
from farcast.types import Digest

MAGIC = b"FARDELT\x01"
PREFIX = struct.Struct("<8sQQ")
DIGEST_BYTES = 32

MAX_HEADER_BYTES = 64 << 20
"""A tensor's row takes about 100 bytes: this is half a million tensors in one object."""

MAX_TENSORS = 1 << 19
MAX_NAME_CHARACTERS = 1024
MAX_TABLES = 240
"""Tables of parameters: the writer adds one only where it pays, so a few are usual."""

MAX_BLOCK_WORDS = 1 << 20
"""2 MiB of bf16 stay near a core, and the counts that open a block (about 16 bytes) are 1 % of
what a block of a sparse update takes."""

PACKED = frozenset({"F4", "U8", "I8", "U32", "I32"})
"""dtypes whose bytes may hold two 4-bit codes each, low half first."""

HEADER_LEVEL = 9


class Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor of the container. `coding` says what its blob is; see `patch`."""

    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARACTERS)]
    dtype: str
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=16)]
    coding: Literal["blocks", "codes", "planes", "full"]
    block: Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCK_WORDS)]
    changed: Annotated[int, msgspec.Meta(ge=0)]
    size: Annotated[int, msgspec.Meta(ge=0)]


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    removed: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_TENSORS)]
    tables: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_TABLES)]
    rows: Annotated[tuple[Row, ...], msgspec.Meta(max_length=MAX_TENSORS)]


class Contents(NamedTuple):
    """A container taken apart: `spans[i]` are start and end of the blob of `header.rows[i]`."""

    header: Header
    digests: list[Digest]
    spans: list[tuple[int, int]]


def in_order(names: Iterable[str]) -> list[str]:
    """Names as a container has them. Refuses those that no reader would take."""
    names = list(names)
    for name in names:
        if not isinstance(name, str) or len(name) > MAX_NAME_CHARACTERS:
            raise FormatError(
                f"A tensor's name is text of at most {MAX_NAME_CHARACTERS} characters, not "
                f"{str(name)[:80]!r}; rename it."
            )
    try:
        return sorted(names, key=str.encode)
    except UnicodeEncodeError:  # half of a surrogate pair
        raise FormatError("A tensor's name is no text that UTF-8 can write; rename it.") from None


def write_container(
    header: Header, digests: list[Digest], blobs: list[bytes], *, threads: int = 1
) -> bytes:
    raw = msgspec.msgpack.encode(header)
    if len(raw) > MAX_HEADER_BYTES or len(header.rows) > MAX_TENSORS:
        raise LimitError("Too many tensors for one delta; publish them in several objects.")
    packed = zstandard.ZstdCompressor(level=HEADER_LEVEL).compress(raw)
    parts = [
        PREFIX.pack(MAGIC, len(raw), len(packed)),
        packed,
        *map(bytes.fromhex, digests),
        *blobs,
    ]
    hasher = blake3(max_threads=threads)
    for part in parts:
        hasher.update(part)
    return b"".join([*parts, hasher.digest()])


def read_container(data: bytes | memoryview, *, threads: int = 1) -> Contents:
    """Checked: magic, bounds, digest, order, sizes. Cheapest check first."""
    view = memoryview(data).cast("B")
    if len(view) < PREFIX.size + DIGEST_BYTES:
        raise FormatError("These bytes are too short for a delta; fetch it again.")
    magic, raw_size, packed_size = PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise FormatError("These bytes are not a delta of a format this version of farcast reads.")
    if raw_size > MAX_HEADER_BYTES:
        raise LimitError("The delta's header is over its limit of 64 MiB; refuse its source.")
    end = len(view) - DIGEST_BYTES
    start = PREFIX.size + packed_size
    if start > end:
        raise FormatError("The delta ends inside its header; fetch it again.")
    if blake3(view[:end], max_threads=threads).digest() != bytes(view[end:]):
        raise IntegrityError("The delta's bytes do not match their digest; fetch it again.")
    header = _read_header(view[PREFIX.size : start], raw_size)
    first = start + DIGEST_BYTES * len(header.rows)
    if first > end:
        raise FormatError("The delta ends inside its digests; refuse its source.")
    digests = [
        bytes(view[at : at + DIGEST_BYTES]).hex() for at in range(start, first, DIGEST_BYTES)
    ]
    return Contents(header, digests, _spans(header, first, end))


def _read_header(packed: memoryview, raw_size: int) -> Header:
    try:
        if zstandard.frame_content_size(packed) != raw_size:
            raise FormatError("The delta's header claims a wrong size; refuse its source.")
        raw = zstandard.ZstdDecompressor().decompress(packed, max_output_size=raw_size)
        header = msgspec.msgpack.decode(raw, type=Header)
    except (zstandard.ZstdError, msgspec.DecodeError) as error:
        raise FormatError("The delta's header is malformed; refuse its source.") from error
    names = [row.name.encode() for row in header.rows]
    if any(a >= b for a, b in pairwise(names)):
        raise FormatError("The delta's tensors are not in order or not unique; refuse its source.")
    removed = [name.encode() for name in header.removed]
    if any(a >= b for a, b in pairwise(removed)):
        raise FormatError("The delta's removals are not in order; refuse its source.")
    if set(names) & set(removed):
        raise FormatError("The delta both removes and writes a tensor; refuse its source.")
    return header


def _spans(header: Header, start: int, end: int) -> list[tuple[int, int]]:
    spans = []
    for row in header.rows:
        nbytes = nbytes_of(row.dtype, row.shape)
        words = 2 * nbytes if row.coding == "codes" else nbytes // word_bytes(row.dtype)
        if row.changed > words:
            raise FormatError(f"The delta changes more of {row.name[:80]!r} than it has.")
        if row.coding == "codes" and (row.dtype not in PACKED or row.block % 2):
            raise FormatError(f"The delta's {row.name[:80]!r} cannot hold 4-bit codes.")
        if (row.block == 0) != (row.coding == "planes" or words == 0):
            raise FormatError(f"The delta's blocks of {row.name[:80]!r} have no size.")
        if row.size > end - start:
            raise FormatError("The delta ends inside its tensors; refuse its source.")
        spans.append((start, start + row.size))
        start += row.size
    if start != end:
        raise FormatError("The delta has bytes that belong to no tensor; refuse its source.")
    return spans
