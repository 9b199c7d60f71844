"""Served formats of masters that are spread over ranks.

Each rank derives the rows that it holds. A block of rows may reach over two ranks, and a tensor's
global scale over all: what ranks found of the largest magnitudes goes round once, trimmed to the
blocks that a rank has rows of, and from the maxima each derives exactly the rows of the whole. What
belongs to a whole matrix (block scales, global scales, shapes) every rank then has; the publisher
takes it from the lowest.

Sticky recipes are refused: they go on from the codes served last, which a rank that was started
again does not have of its own rows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from farcast.delta import AnyBits, from_bits, held_bits, nbytes_of
from farcast.errors import ConfigError, FormatError
from farcast.formats import Recipe
from farcast.publish.comms import Rounds
from farcast.publish.pieces import Layout, Piece, layout_digest
from farcast.publish.snapshot import Bits


class Holding(NamedTuple):
    """What one rank hands over: its bits by canonical name, and what they are of the whole.
    `given` are those that are served as they are."""

    bits: Bits
    layout: Layout
    given: frozenset[str] = frozenset()


class _Found(msgspec.Struct, frozen=True, array_like=True):
    """Largest magnitudes of the blocks from `first` on; the others are 0 here."""

    name: str
    first: int
    blocks: bytes


class ShardFormats:
    """Derives each recipe's holdings, together with the same object on every other rank."""

    def __init__(self, recipes: Sequence[Recipe], rounds: Rounds) -> None:
        sticky = [recipe.name for recipe in recipes if recipe.sticky]
        if sticky:
            raise ConfigError(
                f"{sticky[0]} goes on from what was served last, which ranks do not keep; "
                "publish it from one process."
            )
        self._recipes = tuple(recipes)
        self._rounds = rounds
        self._digests: tuple[bytes, ...] = ()
        self._starts: Mapping[str, Mapping[int, int]] = {}
        self._measured: list[dict[str, Any]] = []

    def measure(self, take: Callable[[], Holding]) -> None:
        """Exchange what must be known before `derived`, of the masters that `take` gives. Two
        rounds, and one more when the ranks' layout changed; none without recipes."""
        if self._recipes:
            self._agree(take)
            self._measured = self._measure(take)

    def derived(self, held: Holding) -> list[Holding]:
        """What this rank serves of its masters in each format; without recipes, what is given."""
        if not self._recipes:
            return [held]
        return [
            self._derived(held, recipe, found)
            for recipe, found in zip(self._recipes, self._measured, strict=True)
        ]

    def _agree(self, take: Callable[[], Holding]) -> None:
        """Learn which rows the ranks' pieces begin at."""
        digests = tuple(self._rounds.share(lambda: layout_digest(take().layout)))
        if digests == self._digests:
            return
        told = self._rounds.share(lambda: msgspec.msgpack.encode(take().layout))
        layouts = [msgspec.msgpack.decode(data, type=Layout) for data in told]
        self._starts, self._digests = _starts(layouts), digests

    def _measure(self, take: Callable[[], Holding]) -> list[dict[str, Any]]:
        """The magnitudes of the whole masters, for each recipe."""
        own: list[dict[str, Any]] = []

        def measure_own() -> bytes:
            import torch

            from farcast.delta.device import to_host
            from farcast.formats.deriving import measure

            masters, rows = self._masters(take())
            for recipe in self._recipes:
                found = measure(masters, recipe, rows=rows)
                own.append({name: torch.from_numpy(to_host(t)) for name, t in found.items()})
            trimmed = [[_trimmed(name, t.numpy()) for name, t in one.items()] for one in own]
            return msgspec.msgpack.encode(trimmed)

        told = self._rounds.share(measure_own)
        everybody = [msgspec.msgpack.decode(data, type=list[list[_Found]]) for data in told]
        for found in everybody:
            for one, parts in zip(own, found, strict=True):
                for part in parts:
                    _raise_to(one[part.name].numpy(), part)
        return own

    def _masters(self, held: Holding) -> tuple[dict[str, Any], dict[str, Any]]:
        """Torch tensors of the masters here, and the rows that those which are sharded are."""
        import torch

        from farcast.formats.deriving import Rows

        masters = {
            name: from_bits(bits, like=torch.empty(0))
            for name, bits in held.bits.items()
            if name not in held.given
        }
        rows = {
            piece.name: Rows(self._starts[piece.name][piece.place], piece.shape[0])
            for piece in held.layout
            if piece.shape and piece.name in masters
        }
        return masters, rows

    def _derived(self, held: Holding, recipe: Recipe, measured: dict[str, Any]) -> Holding:
        from farcast.formats.deriving import derive, layout_of

        masters, rows = self._masters(held)
        served = derive(masters, recipe, rows=rows, measured=measured)
        bits = {name: held_bits(tensor) for name, tensor in served.items()}
        pieces = []
        for piece in held.layout:
            if piece.name in held.given:
                bits[piece.name] = held.bits[piece.name]
                pieces.append(piece)
                continue
            for name, by_row in layout_of(piece.name, recipe, piece.shape).items():
                pieces.append(_piece(name, bits[name], piece, by_row=by_row))
        return Holding(bits, tuple(sorted(pieces, key=lambda piece: piece.name)))


def _piece(name: str, bits: AnyBits, master: Piece, *, by_row: bool) -> Piece:
    """What a served tensor here is of the whole one. Of what belongs to the whole matrix every
    rank has all, as of a plain parameter."""
    if not by_row:
        return Piece(name, bits.dtype, bits.shape, 0, bits.nbytes)
    shape = (master.shape[0], *bits.shape[1:]) if master.shape else bits.shape
    return Piece(name, bits.dtype, shape, master.place, bits.nbytes)


def _starts(layouts: Sequence[Layout]) -> dict[str, dict[int, int]]:
    """The first row of each place of each tensor."""
    rows: dict[str, dict[int, int]] = {}
    for layout in layouts:
        for piece in layout:
            # A piece is whole rows, so its share of the bytes is its share of the rows.
            width = _row_bytes(piece)
            rows.setdefault(piece.name, {})[piece.place] = piece.nbytes // width if width else 0
    starts: dict[str, dict[int, int]] = {}
    for name, held in rows.items():
        at, starts[name] = 0, {}
        for place in sorted(held):
            starts[name][place] = at
            at += held[place]
    return starts


def _row_bytes(piece: Piece) -> int:
    return nbytes_of(piece.dtype, piece.shape[1:]) if piece.shape else 0


def _trimmed(name: str, found: NDArray[np.float32]) -> _Found:
    """Without the blocks at both ends of which no row here is; zeros change no maximum."""
    here = np.flatnonzero(found.reshape(len(found), -1).any(axis=1) | np.isnan(found).any(-1))
    if not len(here):
        return _Found(name, 0, b"")
    first, last = int(here[0]), int(here[-1])
    return _Found(name, first, found[first : last + 1].astype("<f4").tobytes())


def _raise_to(held: NDArray[np.float32], part: _Found) -> None:
    """Raise `held` in place to what another rank found."""
    width = held[0].size if len(held) else 0
    blocks = np.frombuffer(part.blocks, "<f4")
    count = blocks.size // width if width else 0
    if width * count != blocks.size or not 0 <= part.first <= len(held) - count:
        raise FormatError("The ranks measured matrices of different shapes; publish one model.")
    rows = held[part.first : part.first + count]
    np.maximum(rows, blocks.reshape(rows.shape), out=rows)
