"""A batch of trajectories as bytes, and back. Pure: no store, no clock.

A batch is one object of the store. All integers are little endian.

    offset  size  field
    0       4     magic "FCTB"
    4       2     format, 1
    6       2     zero
    8       8     sequence number that the batch was written under
    16      4     R, bytes of the body
    20      4     P, bytes of the payload
    24      32    BLAKE3 of bytes [0, 24) and of the payload: any flipped bit is refused
    56      P     payload: one zstd frame that holds the body

    body
    0       4     H, bytes of the header
    4       H     header: msgpack of `_Header`, one record a trajectory, no tokens
    4+H           token ids, `width` bytes each    } numbers of one column are stored byte plane
                  log-probs, bits of float32       } by byte plane, lowest byte first, since the
                  runs, 4 bytes each               } high bytes hardly vary and compress away

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
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from farcast.errors import FormatError, IntegrityError, LimitError, TrajectoryTooLargeError
from farcast.trajectory.checks import Columns, check_trajectory
from farcast.trajectory.wire import MAX_TOKENS, MAX_TURNS, FinishReason, Role, Trajectory, Turn
from farcast.types import MAX_VERSION, Digest, Name, PolicySpan

BATCH_FORMAT = 1
MAGIC = b"FCTB"

MAX_BATCH_BYTES = 1 << 26
"""Bytes of one batch object. A worker's uplink moves 64 MiB in 5 s at 100 Mbit/s; more would
only delay what is already done."""

MAX_BODY_BYTES = 1 << 26
"""One trajectory of `MAX_TOKENS` takes 32 MiB, so the longest fits with room for its turns."""

MAX_BATCH_TOKENS = 2 * MAX_TOKENS
"""A token costs about 50 bytes once it is Python objects: 8 Mi tokens stay below 450 MB."""

MAX_BATCH_TRAJECTORIES = 1 << 16
MAX_HEADER_BYTES = 1 << 24
MAX_POLICIES = 1 << 14
"""Distinct (version, root) pairs of one batch."""

ZSTD_LEVEL = 3
"""Level 9 saves 2 % of one group and 0.4 % of a large batch, and takes up to four times as long."""

_PREFIX = struct.Struct("<4sHHQII")
_DIGEST_BYTES = 32
_PAYLOAD_AT = _PREFIX.size + _DIGEST_BYTES
_MAX_WINDOW = 1 << 27

Bytes: TypeAlias = NDArray[np.uint8]
_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
_Text = Annotated[str, msgspec.Meta(max_length=1 << 16)]
_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class _Policy(_Wire, frozen=True):
    version: Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)]
    root: Digest


class _Span(_Wire, frozen=True):
    start: _Size
    end: _Size
    policy: Annotated[int, msgspec.Meta(ge=0, lt=MAX_POLICIES)]


class _Turn(_Wire, frozen=True):
    role: Role
    start: _Size
    end: _Size
    started: float
    ended: float


class _Record(_Wire, frozen=True):
    """A trajectory without its columns. `value_runs` is 0 where log-probs stand exactly where
    the mask is set."""

    id: Name
    group_id: Name
    group_size: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    worker_id: Name
    tokens: _Size
    values: _Size
    mask_runs: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS + 1)]
    value_runs: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS + 1)]
    spans: Annotated[tuple[_Span, ...], msgspec.Meta(max_length=MAX_TURNS)]
    turns: Annotated[tuple[_Turn, ...], msgspec.Meta(max_length=MAX_TURNS)]
    reward: float
    rewards: Annotated[dict[_Text, float], msgspec.Meta(max_length=1 << 10)]
    finish_reason: FinishReason
    task: _Text
    seed: _Int64
    temperature: float
    top_p: float
    engine: _Text
    metadata: Annotated[dict[_Text, _Text], msgspec.Meta(max_length=1 << 12)]
    top_k: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0


class _Header(_Wire, frozen=True):
    run_id: Name
    width: Annotated[int, msgspec.Meta(ge=1, le=4)]
    policies: Annotated[tuple[_Policy, ...], msgspec.Meta(max_length=MAX_POLICIES)]
    records: Annotated[tuple[_Record, ...], msgspec.Meta(max_length=MAX_BATCH_TRAJECTORIES)]


class Batch(NamedTuple):
    """What one object says: the run it belongs to, the number it was written under, its content."""

    run_id: str
    sequence: int
    trajectories: tuple[Trajectory, ...]


class Payload(NamedTuple):
    """A compressed batch that has no sequence number yet."""

    data: bytes
    body_bytes: int
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
    prefix = _PREFIX.pack(MAGIC, BATCH_FORMAT, 0, sequence, payload.body_bytes, len(payload.data))
    return prefix + _digest(prefix, payload.data) + payload.data


def pack(
    trajectories: Sequence[Trajectory], *, run_id: str, max_bytes: int = MAX_BATCH_BYTES
) -> list[Payload]:
    """Compress into as few payloads as keep each object within `max_bytes`, order kept.

    Raises `TrajectoryTooLargeError`, having done nothing, when one trajectory alone is larger.
    """
    try:
        payload = compress(trajectories, run_id=run_id)
        if payload.size <= min(max_bytes, MAX_BATCH_BYTES):
            return [payload]
        reason = f"takes {payload.size} bytes of the {max_bytes} that one object may have"
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
        for payload in pack(half, run_id=run_id, max_bytes=max_bytes)
    ]


def compress(trajectories: Sequence[Trajectory], *, run_id: str) -> Payload:
    """Check and compress a batch. Raises as `encode_batch` does."""
    columns = [check_trajectory(trajectory) for trajectory in trajectories]
    if sum(len(c.ids) for c in columns) > MAX_BATCH_TOKENS:
        raise LimitError(f"The batch holds over {MAX_BATCH_TOKENS} tokens; write several batches.")
    width = _width(columns)
    header, stored = _describe(trajectories, columns, run_id, width)
    ids = [c.ids.astype("<u4") for c in columns]
    values = [c.logprobs[s.present].view("<u4") for c, s in zip(columns, stored, strict=True)]
    runs = [run for s in stored for run in (s.mask_runs, s.value_runs)]
    parts = [struct.pack("<I", len(header)), header]
    parts += [_planes(ids, width), _planes(values, 4), _planes(runs, 4)]
    body = b"".join(parts)
    if len(body) > MAX_BODY_BYTES:
        raise LimitError(f"The batch takes over {MAX_BODY_BYTES} bytes; write several batches.")
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True)
    return Payload(compressor.compress(body), len(body), tuple(trajectories))


def decode_batch(data: bytes) -> Batch:
    """Read a batch, or raise `FormatError`, `LimitError` or `IntegrityError`."""
    sequence, body = _open(data)
    if len(body) < 4:
        raise FormatError("The batch ends inside its header; it was damaged before it was sealed.")
    (header_bytes,) = struct.unpack_from("<I", body)
    if header_bytes > min(len(body) - 4, MAX_HEADER_BYTES):
        raise LimitError(
            f"The batch claims a header of {header_bytes} bytes, more than it has or may have; "
            "discard it."
        )
    header = _header(body[4 : 4 + header_bytes])
    columns = _columns(header, np.frombuffer(body, np.uint8, offset=4 + header_bytes))
    trajectories = tuple(_trajectories(header, columns))
    return Batch(header.run_id, sequence, trajectories)


class _Stored(NamedTuple):
    """Where log-probs are stored, and both masks as run lengths."""

    present: NDArray[np.bool_]
    mask_runs: NDArray[np.uint32]
    value_runs: NDArray[np.uint32]


def _store(columns: Columns) -> _Stored:
    present = columns.mask | (columns.logprobs.view(np.uint32) != 0)
    same = bool(np.array_equal(present, columns.mask))
    value_runs = np.zeros(0, np.uint32) if same else _runs(present)
    return _Stored(present, _runs(columns.mask), value_runs)


def _runs(mask: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """Lengths of the runs of equal values, the first of False (so it may be 0)."""
    edges = np.flatnonzero(mask[1:] != mask[:-1]) + 1
    first = [0] if mask[0] else []
    borders = np.concatenate([np.array([0, *first]), edges, np.array([len(mask)])])
    return np.diff(borders).astype(np.uint32)


def _mask(runs: NDArray[np.uint32], tokens: int) -> NDArray[np.bool_]:
    """Undo `_runs`; the sum is checked before anything of that length is made."""
    if int(runs.sum(dtype=np.uint64)) != tokens or not runs[1:].all():
        raise FormatError("The batch has a mask whose runs do not fit its tokens; discard it.")
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs)


def _width(columns: Sequence[Columns]) -> int:
    """Bytes that the largest token id of the batch needs."""
    largest = max((int(c.ids.max()) for c in columns), default=0)
    return max(1, (largest.bit_length() + 7) // 8)


def _describe(
    trajectories: Sequence[Trajectory], columns: Sequence[Columns], run_id: str, width: int
) -> tuple[bytes, list[_Stored]]:
    """The header's bytes, read back through its own types: what a reader would refuse,
    a writer cannot send."""
    policies: dict[_Policy, int] = {}
    stored = [_store(c) for c in columns]
    try:
        pairs = zip(trajectories, stored, strict=True)
        records = [_written(_record(t, s, policies)) for t, s in pairs]
        header = msgspec.msgpack.encode(
            (run_id, width, tuple(policies), records), order="deterministic"
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise FormatError(
            f"A trajectory holds a value of a kind that cannot be written ({error}); correct it."
        ) from error
    if len(header) > MAX_HEADER_BYTES:
        raise LimitError(
            f"Turns, spans and metadata take over {MAX_HEADER_BYTES} bytes; write several batches."
        )
    _header(header)
    return header, stored


def _record(t: Trajectory, stored: _Stored, policies: dict[_Policy, int]) -> _Record:
    spans = tuple(
        _Span(s.start, s.end, policies.setdefault(_Policy(s.version, s.root), len(policies)))
        for s in t.spans
    )
    turns = tuple(_Turn(u.role, u.start, u.end, u.started, u.ended) for u in t.turns)
    return _Record(
        id=t.id,
        group_id=t.group_id,
        group_size=t.group_size,
        worker_id=t.worker_id,
        tokens=len(t.token_ids),
        values=int(stored.present.sum()),
        mask_runs=len(stored.mask_runs),
        value_runs=len(stored.value_runs),
        spans=spans,
        turns=turns,
        reward=t.reward,
        rewards=t.rewards,
        finish_reason=t.finish_reason,
        task=t.task,
        seed=t.seed,
        temperature=t.temperature,
        top_p=t.top_p,
        engine=t.engine,
        metadata=t.metadata,
        top_k=t.top_k,
    )


def _written(record: _Record) -> tuple[Any, ...]:
    """A record as it is written: what was added to it since is left out where it says nothing, so
    that every reader of this format knows it."""
    fields = msgspec.structs.astuple(record)
    return fields if record.top_k else fields[:-1]


def _planes(parts: Sequence[NDArray[np.uint32]], width: int) -> bytes:
    """Numbers as byte planes: all lowest bytes, then all second bytes, ..."""
    joined = np.concatenate([*parts, np.zeros(0, np.uint32)]).astype("<u4")
    return joined.view(np.uint8).reshape(-1, 4).T[:width].tobytes()


def _unplane(data: Bytes, count: int, width: int) -> NDArray[np.uint32]:
    wide = np.zeros((count, 4), np.uint8)
    wide[:, :width] = data.reshape(width, count).T
    return wide.view("<u4").reshape(count)


def _digest(prefix: bytes, payload: bytes | memoryview) -> bytes:
    return blake3(prefix).update(payload).digest()


def _open(data: bytes) -> tuple[int, bytes]:
    """The sequence number and the body, everything around it checked."""
    if len(data) < _PAYLOAD_AT or data[:4] != MAGIC:
        raise FormatError("These bytes are no batch of trajectories; discard the object.")
    _, version, zero, sequence, body_bytes, payload_bytes = _PREFIX.unpack_from(data)
    if version != BATCH_FORMAT or zero:
        raise FormatError(
            f"The batch has format {version}, this release reads {BATCH_FORMAT}; "
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
    return sequence, _decompress(payload, body_bytes)


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


def _header(data: bytes) -> _Header:
    try:
        return msgspec.msgpack.decode(data, type=_Header)
    except msgspec.DecodeError as error:
        raise FormatError(
            f"A batch's header is not valid ({error}); correct the trajectory or discard the batch."
        ) from error


class _Read(NamedTuple):
    ids: NDArray[np.uint32]
    values: NDArray[np.float32]
    runs: NDArray[np.uint32]


def _columns(header: _Header, data: Bytes) -> _Read:
    """Split the columns. Their sizes follow from the header and must fill the body exactly,
    so what is allocated is bounded by what was received."""
    tokens = sum(r.tokens for r in header.records)
    values = sum(r.values for r in header.records)
    runs = sum(r.mask_runs + r.value_runs for r in header.records)
    if tokens > MAX_BATCH_TOKENS:
        raise LimitError(
            f"The batch claims {tokens} tokens, the bound is {MAX_BATCH_TOKENS}; discard it."
        )
    sizes = (tokens * header.width, values * 4, runs * 4)
    if sum(sizes) != len(data):
        raise FormatError("The batch's columns do not fill its body; discard it.")
    first, second = sizes[0], sizes[0] + sizes[1]
    return _Read(
        _unplane(data[:first], tokens, header.width),
        _unplane(data[first:second], values, 4).view("<f4"),
        _unplane(data[second:], runs, 4),
    )


def _trajectories(header: _Header, columns: _Read) -> Iterator[Trajectory]:
    at_id = at_value = at_run = 0
    for record in header.records:
        ids = columns.ids[at_id : at_id + record.tokens]
        values = columns.values[at_value : at_value + record.values]
        borders = np.cumsum([at_run, record.mask_runs, record.value_runs])
        mask_runs, value_runs = (columns.runs[a:b] for a, b in pairwise(borders.tolist()))
        mask = _mask(mask_runs, record.tokens)
        present = _mask(value_runs, record.tokens) if record.value_runs else mask
        if int(present.sum()) != record.values:
            raise FormatError("The batch's log-probs do not fit their mask; discard it.")
        logprobs = np.zeros(record.tokens, np.float32)
        logprobs[present] = values
        yield _trajectory(record, header.policies, Columns(ids, logprobs, mask))
        at_id += record.tokens
        at_value += record.values
        at_run = int(borders[-1])


def _trajectory(r: _Record, policies: Sequence[_Policy], columns: Columns) -> Trajectory:
    if any(span.policy >= len(policies) for span in r.spans):
        raise FormatError("A span of the batch names no policy of the batch; discard it.")
    trajectory = Trajectory(
        id=r.id,
        group_id=r.group_id,
        group_size=r.group_size,
        worker_id=r.worker_id,
        token_ids=tuple(columns.ids.tolist()),
        logprobs=tuple(columns.logprobs.tolist()),
        loss_mask=tuple(columns.mask.tolist()),
        spans=tuple(
            PolicySpan(s.start, s.end, policies[s.policy].version, policies[s.policy].root)
            for s in r.spans
        ),
        turns=tuple(
            Turn(role=t.role, start=t.start, end=t.end, started=t.started, ended=t.ended)
            for t in r.turns
        ),
        reward=r.reward,
        rewards=r.rewards,
        finish_reason=r.finish_reason,
        task=r.task,
        seed=r.seed,
        temperature=r.temperature,
        top_p=r.top_p,
        engine=r.engine,
        metadata=r.metadata,
        top_k=r.top_k,
    )
    check_trajectory(trajectory, columns)
    return trajectory
