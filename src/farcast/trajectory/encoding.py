"""A batch of trajectories as bytes, and back. Pure: no store, no clock.

A batch is one object of the store. All integers are little endian.

    offset  size  field
    0       4     magic "FCTB"
    4       2     format, 1 or 2
    6       2     zero
    8       8     sequence number that the batch was written under
    16      4     R, bytes of the body
    20      4     P, bytes of the payload
    24      32    BLAKE3 of bytes [0, 24) and of the payload: any flipped bit is refused
    56      P     payload: one zstd frame that holds the body

    body
    0       4     H, bytes of the header
    4       H     header: msgpack of `Header`, one record a trajectory, no tokens
    4+H           token ids, `width` bytes each    } numbers of one column are stored byte plane
                  log-probs, bits of float32       } by byte plane, lowest byte first, since the
                  runs, 4 bytes each               } high bytes hardly vary and compress away
                  routed experts, if any           by layer and rank, see `columns`

Format 2 has what format 1 could not say: routed experts, and feedback on turns. A batch without
either is written in format 1, with the bytes it always had.

Masks are run lengths, False first. Log-probs are stored only where the mask is set or their
bits are not zero. The columns end exactly where the body ends.

Refuses, with `FormatError`, `LimitError` or `IntegrityError` and before allocating for it:
every count beyond the bounds below, every batch whose trajectories `check_trajectory` refuses.
The sequence stands outside the compressed part, so that a writer that lost a race for a number
takes the next one without compressing again.
"""

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from farcast.errors import FormatError, IntegrityError, LimitError, TrajectoryTooLargeError
from farcast.trajectory.checks import Columns, check_trajectory
from farcast.trajectory.columns import (
    Bytes,
    expert_planes,
    id_width,
    mask_of,
    planes,
    unplane,
    unplane_experts,
)
from farcast.trajectory.header import (
    MAX_HEADER_BYTES,
    Header,
    describe,
    read_header,
    trajectory_of,
)
from farcast.trajectory.wire import MAX_TOKENS, RoutedExperts, Trajectory
from farcast.types import MAX_VERSION

NEWEST_FORMAT = 2
MAGIC = b"FCTB"

MAX_BATCH_BYTES = 1 << 26
"""Bytes of one batch object. A worker's uplink moves 64 MiB in 5 s at 100 Mbit/s; more would
only delay what is already done."""

MAX_BODY_BYTES = 1 << 26
"""One trajectory of `MAX_TOKENS` takes 32 MiB, so the longest fits with room for its turns."""

MAX_BATCH_TOKENS = 2 * MAX_TOKENS
"""A token costs about 50 bytes once it is Python objects: 8 Mi tokens stay below 450 MB."""

ZSTD_LEVEL = 3
"""Level 9 saves 2 % of one group and 0.4 % of a large batch, and takes up to four times as long."""

_PREFIX = struct.Struct("<4sHHQII")
_DIGEST_BYTES = 32
_PAYLOAD_AT = _PREFIX.size + _DIGEST_BYTES
_MAX_WINDOW = 1 << 27


class Batch(NamedTuple):
    """What one object says: the run it belongs to, the number it was written under, its content."""

    run_id: str
    sequence: int
    trajectories: tuple[Trajectory, ...]


class Payload(NamedTuple):
    """A compressed batch that has no sequence number yet."""

    data: bytes
    body_bytes: int
    format: int
    trajectories: tuple[Trajectory, ...]

    @property
    def size(self) -> int:
        """Bytes of the object it becomes."""
        return _PAYLOAD_AT + len(self.data)


def encode_batch(trajectories: Sequence[Trajectory], *, run_id: str, sequence: int) -> bytes:
    """Encode one batch. Same trajectories, same bytes.

    Raises `FormatError` for a trajectory that breaks a rule of `check_trajectory`, `LimitError`
    for more than one object may hold. A log-prob that is no float32 becomes the nearest one.
    """
    return seal(compress(trajectories, run_id=run_id), sequence)


def seal(payload: Payload, sequence: int) -> bytes:
    """Give a payload its sequence number: the finished object."""
    prefix = _PREFIX.pack(MAGIC, payload.format, 0, sequence, payload.body_bytes, len(payload.data))
    return prefix + _digest(prefix, payload.data) + payload.data


def pack(
    trajectories: Sequence[Trajectory],
    *,
    run_id: str,
    max_bytes: int = MAX_BATCH_BYTES,
    max_trajectory_bytes: int = MAX_BATCH_BYTES,
) -> list[Payload]:
    """Compress into as few payloads as keep each object within `max_bytes`, order kept; one
    trajectory that is larger alone may take `max_trajectory_bytes`.

    Raises `TrajectoryTooLargeError`, having done nothing, when one is larger still.
    """
    bound = min(max_trajectory_bytes if len(trajectories) == 1 else max_bytes, MAX_BATCH_BYTES)
    try:
        payload = compress(trajectories, run_id=run_id)
        if payload.size <= bound:
            return [payload]
        reason = f"takes {payload.size} bytes of the {bound} that one object may have"
    except LimitError as error:
        reason = f"is beyond what one object may hold ({error})"
    if len(trajectories) == 1:
        raise TrajectoryTooLargeError(
            f"Trajectory {trajectories[0].id} {reason}; end episodes earlier or raise the limit."
        )
    middle = len(trajectories) // 2
    return [
        payload
        for half in (trajectories[:middle], trajectories[middle:])
        for payload in pack(
            half, run_id=run_id, max_bytes=max_bytes, max_trajectory_bytes=max_trajectory_bytes
        )
    ]


def compress(trajectories: Sequence[Trajectory], *, run_id: str) -> Payload:
    """Check and compress a batch. Raises as `encode_batch` does."""
    columns = [check_trajectory(trajectory) for trajectory in trajectories]
    if sum(len(c.ids) for c in columns) > MAX_BATCH_TOKENS:
        raise LimitError(f"The batch holds over {MAX_BATCH_TOKENS} tokens; write several batches.")
    width = id_width(columns)
    header, said, stored = describe(trajectories, columns, run_id, width)
    ids = [c.ids.astype("<u4") for c in columns]
    values = [c.logprobs[s.present].view("<u4") for c, s in zip(columns, stored, strict=True)]
    runs = [run for s in stored for run in (s.mask_runs, s.value_runs)]
    parts = [struct.pack("<I", len(header)), header]
    parts += [planes(ids, width), planes(values, 4), planes(runs, 4)]
    experts = expert_planes([t.experts.array() for t in trajectories if t.experts])
    parts = [b"".join(parts), *experts]
    size = sum(map(len, parts))
    if size > MAX_BODY_BYTES:
        raise LimitError(f"The batch takes over {MAX_BODY_BYTES} bytes; write several batches.")
    return Payload(_compressed(parts, size), size, said.format, tuple(trajectories))


def _compressed(parts: Sequence[bytes], size: int) -> bytes:
    """One frame. Each layer of routed experts begins a block with tables of its own: 48 layers of
    8 among 128 experts took 254 bytes a token so, 298 where blocks ran across layers."""
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True)
    if len(parts) == 1:
        return compressor.compress(parts[0])
    writing = compressor.compressobj(size=size)
    blocks = [
        writing.compress(part) + writing.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) for part in parts
    ]
    return b"".join(blocks) + writing.flush()


def decode_batch(data: bytes) -> Batch:
    """Read a batch, or raise `FormatError`, `LimitError` or `IntegrityError`."""
    version, sequence, body = _open(data)
    if len(body) < 4:
        raise FormatError("The batch ends inside its header; it was damaged before it was sealed.")
    (header_bytes,) = struct.unpack_from("<I", body)
    if header_bytes > min(len(body) - 4, MAX_HEADER_BYTES):
        raise LimitError(
            f"The batch claims a header of {header_bytes} bytes, more than it has or may have; "
            "discard it."
        )
    header = read_header(body[4 : 4 + header_bytes])
    if header.format != version:
        raise FormatError("The batch says it has another format than its content; discard it.")
    columns = _columns(header, np.frombuffer(body, np.uint8, offset=4 + header_bytes))
    trajectories = tuple(_trajectories(header, columns))
    return Batch(header.run_id, sequence, trajectories)


def _digest(prefix: bytes, payload: bytes | memoryview) -> bytes:
    return blake3(prefix).update(payload).digest()


def _open(data: bytes) -> tuple[int, int, bytes]:
    """Format, sequence number and body, everything around it checked."""
    if len(data) < _PAYLOAD_AT or data[:4] != MAGIC:
        raise FormatError("These bytes are no batch of trajectories; discard the object.")
    _, version, zero, sequence, body_bytes, payload_bytes = _PREFIX.unpack_from(data)
    if not 1 <= version <= NEWEST_FORMAT or zero:
        raise FormatError(
            f"The batch has format {version}, this release reads 1 to {NEWEST_FORMAT}; "
            "run the same release on both sides."
        )
    if max(body_bytes, payload_bytes) > MAX_BODY_BYTES or sequence > MAX_VERSION:
        raise LimitError("The batch claims more than one object may hold; discard it.")
    payload = memoryview(data)[_PAYLOAD_AT:]
    if len(payload) != payload_bytes:
        raise FormatError(
            f"The batch has {len(payload)} bytes of payload and says {payload_bytes}; "
            "it was cut or appended to: fetch it again or discard it."
        )
    digest = data[_PREFIX.size : _PAYLOAD_AT]
    if _digest(data[: _PREFIX.size], payload) != digest:
        raise IntegrityError("The batch is not what its digest says; fetch it again or discard it.")
    return version, sequence, _decompress(payload, body_bytes)


def _decompress(payload: memoryview, body_bytes: int) -> bytes:
    """Inflate one frame whose own size agrees with the prefix, so that no more is allocated."""
    try:
        frame = zstandard.get_frame_parameters(payload)
        if frame.content_size != body_bytes or frame.window_size > _MAX_WINDOW or frame.dict_id:
            raise LimitError("The batch's frame disagrees with its prefix; discard it.")
        body = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompress(
            payload, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise FormatError(f"The batch cannot be inflated ({error}); discard it.") from error
    if len(body) != body_bytes:
        raise FormatError("The batch inflates to another size than it says; discard it.")
    return body


class _Read(NamedTuple):
    ids: NDArray[np.uint32]
    values: NDArray[np.float32]
    runs: NDArray[np.uint32]
    experts: NDArray[np.unsignedinteger] | None


def _columns(header: Header, data: Bytes) -> _Read:
    """Split the columns. Their sizes follow from the header and must fill the body exactly,
    so what is allocated is bounded by what was received."""
    tokens = sum(r.tokens for r in header.records)
    values = sum(r.values for r in header.records)
    runs = sum(r.mask_runs + r.value_runs for r in header.records)
    if tokens > MAX_BATCH_TOKENS:
        raise LimitError(
            f"The batch claims {tokens} tokens, the bound is {MAX_BATCH_TOKENS}; discard it."
        )
    shape, routed = header.experts, sum(r.routed for r in header.records)
    if (shape is None) != (routed == 0):
        raise FormatError("The batch has routed experts without a shape; discard it.")
    routed_bytes = routed * shape.row_bytes if shape else 0
    sizes = (tokens * header.width, values * 4, runs * 4, routed_bytes)
    if sum(sizes) != len(data):
        raise FormatError("The batch's columns do not fill its body; discard it.")
    first, second, third = np.cumsum(sizes[:3]).tolist()
    experts = None
    if shape is not None:
        experts = unplane_experts(data[third:], routed, shape.layers, shape.top_k, shape.width)
    return _Read(
        unplane(data[:first], tokens, header.width),
        unplane(data[first:second], values, 4).view("<f4"),
        unplane(data[second:third], runs, 4),
        experts,
    )


def _trajectories(header: Header, columns: _Read) -> Iterator[Trajectory]:
    at_id = at_value = at_run = at_row = 0
    for record in header.records:
        ids = columns.ids[at_id : at_id + record.tokens]
        values = columns.values[at_value : at_value + record.values]
        borders = np.cumsum([at_run, record.mask_runs, record.value_runs])
        mask_runs, value_runs = (columns.runs[a:b] for a, b in pairwise(borders.tolist()))
        mask = mask_of(mask_runs, record.tokens)
        present = mask_of(value_runs, record.tokens) if record.value_runs else mask
        if int(present.sum()) != record.values:
            raise FormatError("The batch's log-probs do not fit their mask; discard it.")
        logprobs = np.zeros(record.tokens, np.float32)
        logprobs[present] = values
        experts = None
        if columns.experts is not None and record.routed:
            experts = RoutedExperts.of(columns.experts[at_row : at_row + record.routed])
        yield trajectory_of(record, header.policies, Columns(ids, logprobs, mask), experts)
        at_id += record.tokens
        at_value += record.values
        at_run = int(borders[-1])
        at_row += record.routed
