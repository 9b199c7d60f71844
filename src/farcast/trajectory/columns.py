"""The columns of a batch as bytes, and back: byte planes and run lengths. Pure.

Numbers of one column are stored byte plane by byte plane, lowest byte first, since the high bytes
hardly vary and compress away. Routed experts are stored by layer and place in the ranking, each
with all tokens of the batch behind one another: a router's favourites differ by layer, and the
compressor's tables then see one layer at a time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from farcast.errors import FormatError
from farcast.trajectory.checks import Columns

Bytes: TypeAlias = NDArray[np.uint8]


class Stored(NamedTuple):
    """Where log-probs are stored, and both masks as run lengths."""

    present: NDArray[np.bool_]
    mask_runs: NDArray[np.uint32]
    value_runs: NDArray[np.uint32]


def store(columns: Columns) -> Stored:
    """Both masks of one trajectory."""
    present = columns.mask | (columns.logprobs.view(np.uint32) != 0)
    same = bool(np.array_equal(present, columns.mask))
    value_runs = np.zeros(0, np.uint32) if same else runs_of(present)
    return Stored(present, runs_of(columns.mask), value_runs)


def runs_of(mask: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """Lengths of the runs of equal values, the first of False (so it may be 0)."""
    edges = np.flatnonzero(mask[1:] != mask[:-1]) + 1
    first = [0] if mask[0] else []
    borders = np.concatenate([np.array([0, *first]), edges, np.array([len(mask)])])
    return np.diff(borders).astype(np.uint32)


def mask_of(runs: NDArray[np.uint32], tokens: int) -> NDArray[np.bool_]:
    """Undo `runs_of`; the sum is checked before anything of that length is made."""
    if int(runs.sum(dtype=np.uint64)) != tokens or not runs[1:].all():
        raise FormatError("The batch has a mask whose runs do not fit its tokens; discard it.")
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs)


def id_width(columns: Sequence[Columns]) -> int:
    """Bytes that the largest token id of the batch needs."""
    largest = max((int(c.ids.max()) for c in columns), default=0)
    return max(1, (largest.bit_length() + 7) // 8)


def planes(parts: Sequence[NDArray[np.uint32]], width: int) -> bytes:
    """Numbers as byte planes: all lowest bytes, then all second bytes, ..."""
    joined = np.concatenate([*parts, np.zeros(0, np.uint32)]).astype("<u4")
    return joined.view(np.uint8).reshape(-1, 4).T[:width].tobytes()


def unplane(data: Bytes, count: int, width: int) -> NDArray[np.uint32]:
    wide = np.zeros((count, 4), np.uint8)
    wide[:, :width] = data.reshape(width, count).T
    return wide.view("<u4").reshape(count)


def expert_planes(parts: Sequence[NDArray[Any]]) -> list[bytes]:
    """Arrays [tokens, layers, top_k] of one shape but for `tokens`: for each layer its low bytes
    as [top_k, all tokens], then, where there are any, for each layer its high bytes."""
    if not parts:
        return []
    joined = np.concatenate(parts).transpose(1, 2, 0)
    shifts = range(0, 8 * joined.dtype.itemsize, 8)
    return [((layer >> s) & 0xFF).astype(np.uint8).tobytes() for s in shifts for layer in joined]


def unplane_experts(data: Bytes, tokens: int, layers: int, top_k: int, width: int) -> NDArray[Any]:
    """Undo `expert_planes`: [tokens, layers, top_k]."""
    planes_ = data.reshape(width, layers, top_k, tokens)
    wide = planes_[0].astype(f"<u{width}")
    if width == 2:
        wide |= planes_[1].astype("<u2") << 8
    return np.ascontiguousarray(wide.transpose(2, 0, 1))
