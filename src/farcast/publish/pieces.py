"""Who holds which bytes of a model spread over ranks, and who looks after which tensors.

A rank describes what it holds as pieces; from all ranks' descriptions, each computes the same
`Assignment`. A piece is a run of whole rows (FSDP2 shards the first dimension), so it is a run of
the tensor's bytes. Where several ranks hold the same piece (replicas of it, or plain parameters
beside the sharded ones), the lowest sends it. Owners look after whole objects: as many as one
process would write, cut by the same rule. Pure.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from blake3 import blake3

from farcast.delta import AnyBits, nbytes_of
from farcast.errors import TensorMismatchError
from farcast.formats import canonical_names
from farcast.publish.parts import split_sizes


class Piece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Rows of one tensor on one rank. `shape` is the whole tensor's; `place` orders the pieces."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    place: int
    nbytes: int


class Span(NamedTuple):
    """The bytes `start` to `end` of a tensor, held by `rank`."""

    rank: int
    start: int
    end: int


class Kind(NamedTuple):
    """What a whole tensor is."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)


class Where(NamedTuple):
    """What a local tensor is of the whole: its place among the pieces, and all rows (None: it is
    the whole)."""

    place: int
    rows: int | None


Layout = tuple[Piece, ...]


@dataclass(frozen=True)
class Assignment:
    """The pieces of each tensor in order, the names in each object, and each object's owner."""

    kinds: Mapping[str, Kind]
    spans: Mapping[str, tuple[Span, ...]]
    parts: tuple[tuple[str, ...], ...]
    owners: tuple[int, ...]

    def owned(self, rank: int) -> frozenset[str]:
        """The tensors that `rank` looks after."""
        pairs = zip(self.parts, self.owners, strict=True)
        return frozenset(name for names, owner in pairs if owner == rank for name in names)

    def sent(self, rank: int, owner: int) -> list[str]:
        """The tensors of `owner` of which `rank` sends a piece."""
        names = sorted(self.owned(owner))
        return [name for name in names if any(span.rank == rank for span in self.spans[name])]


def localised(
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    where: dict[str, Where],
    given: set[str],
) -> Iterator[tuple[str, Any]]:
    """Names with what this rank holds of each tensor; `where` gets what that is of the whole, and
    `given` the names of what is bits already.

    DTensors are told by what they offer. Nothing is gathered, and no collective is called.
    """
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    for name, tensor in pairs:
        if isinstance(tensor, AnyBits):
            given.add(name)
        if not hasattr(tensor, "device_mesh"):
            where[name] = Where(0, None)
            yield name, tensor
            continue
        place = _place(name, tensor)
        if place is not None:
            where[name] = place
            yield name, tensor.to_local()


def layout_of(bits: Mapping[str, AnyBits], where: Mapping[str, Where]) -> Layout:
    """The description of what this rank holds; `bits` have canonical names, `where` given ones."""
    canonical = canonical_names(where)
    pieces = []
    for given, (place, rows) in where.items():
        held = bits[canonical[given]]
        shape = held.shape if rows is None else (rows, *held.shape[1:])
        pieces.append(Piece(canonical[given], held.dtype, shape, place, held.nbytes))
    return tuple(sorted(pieces, key=lambda piece: piece.name))


def layout_digest(layout: Layout) -> bytes:
    """Tells layouts apart."""
    return blake3(msgspec.msgpack.encode(layout)).digest()


def assign(layouts: Sequence[Layout], *, part_bytes: int) -> Assignment:
    """The assignment that follows from all ranks' layouts, by rank.

    Objects are at most a rank's share of the model, so that every rank has some to look after.
    """
    kinds: dict[str, Kind] = {}
    held: dict[str, dict[int, tuple[int, int]]] = {}
    for rank, layout in enumerate(layouts):
        for piece in layout:
            kind = Kind(piece.dtype, piece.shape)
            if kinds.setdefault(piece.name, kind) != kind:
                raise TensorMismatchError(
                    f"The ranks hold {piece.name[:80]!r} in different dtypes or shapes; "
                    "publish the same model on each."
                )
            held.setdefault(piece.name, {}).setdefault(piece.place, (rank, piece.nbytes))
    sizes = {name: kind.nbytes for name, kind in kinds.items()}
    spans = {name: _spans(name, held[name], sizes[name]) for name in sizes}
    share = -(-sum(sizes.values()) // len(layouts))
    parts = tuple(map(tuple, split_sizes(sizes, part_bytes=min(part_bytes, max(share, 1)))))
    return Assignment(kinds, spans, parts, _owners(parts, sizes, len(layouts)))


def _spans(name: str, held: Mapping[int, tuple[int, int]], size: int) -> tuple[Span, ...]:
    spans, start = [], 0
    for place in sorted(held):
        rank, nbytes = held[place]
        spans.append(Span(rank, start, start + nbytes))
        start += nbytes
    if start != size:
        raise TensorMismatchError(
            f"The ranks together hold {start} of the {size} bytes of {name[:80]!r}; "
            "publish from all ranks that have a shard."
        )
    return tuple(span for span in spans if span.end > span.start)


def _owners(
    parts: Sequence[Sequence[str]], sizes: Mapping[str, int], ranks: int
) -> tuple[int, ...]:
    """The largest object first, to the rank with the least so far."""
    weights = [sum(sizes[name] for name in names) for names in parts]
    loads, owners = [0] * ranks, [0] * len(parts)
    for index in sorted(range(len(parts)), key=lambda i: (-weights[i], i)):
        owners[index] = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[owners[index]] += weights[index]
    return tuple(owners)


def _place(name: str, tensor: Any) -> Where | None:
    """What this rank holds of a DTensor; None when the rank is outside its mesh."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    place = Where(0, None)
    for index, placement in zip(coordinate, tensor.placements, strict=True):
        if placement.is_replicate():
            continue
        kind = type(placement).__name__
        if kind != "Shard" or placement.dim != 0 or place.rows is not None:
            raise TensorMismatchError(
                f"The tensor {name[:80]!r} is placed as {tensor.placements}; sharded publishing "
                "takes whole rows, so shard the first dimension once and replicate the others."
            )
        place = Where(index, tensor.shape[0])
    return place
