"""Applies the blocks of a tensor to a buffer, in place, and back again. Pure.

Refuses to leave a tensor half changed: what was written before a block turned out malformed, or
made for another base, is taken back.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from farcast.delta.bits import Bytes, as_words
from farcast.delta.blocks import (
    DENSE,
    PLANES,
    RAW,
    SAME,
    Changes,
    Layout,
    Places,
    add,
    move,
    place,
    read_dense,
    read_events,
    read_whole,
)
from farcast.delta.conditioned import PLAIN, Field, Parameters
from farcast.delta.crew import Crew
from farcast.errors import FormatError

_Move = Callable[[Bytes, int, Places, Changes], None]

WRONG_COUNT = "A delta has another number of changes than it says; fetch it again."


class Applied:
    """Changes made to a tensor in place, and the way back."""

    def __init__(self, buffer: Bytes, bits: int) -> None:
        self._buffer, self._bits = buffer, bits
        self._moved: list[tuple[slice, Places, Changes]] = []
        self._whole: list[tuple[slice, Bytes]] = []
        self.changed = 0

    def move(self, span: slice, places: Places, changes: Changes, how: _Move = move) -> None:
        """Add changes to words of the bytes `span`. Keeps both arrays."""
        how(self._buffer[span], self._bits, places, changes)
        self._moved.append((span, places, changes))
        self.changed += places.size

    def overwrite(self, span: slice, new: Bytes, changed: int | None = None) -> None:
        """Replace bytes; the number of words that differ is counted if it is not known."""
        old = self._buffer[span].copy()
        self._whole.append((span, old))
        self._buffer[span] = new
        self.changed += _differing(old, new, self._bits) if changed is None else changed

    def include(self, other: "Applied", start: int) -> None:
        """Take over the changes made to a part of the buffer, from byte `start` on."""
        for span, places, changes in other._moved:
            self._moved.append((_later(span, start), places, changes))
        for span, old in other._whole:
            self._whole.append((_later(span, start), old))
        self.changed += other.changed

    def undo(self) -> None:
        """Give the buffer its old bits again."""
        for span, places, changes in self._moved:
            move(self._buffer[span], self._bits, places, changes, back=True)
        for span, old in self._whole:
            self._buffer[span] = old
        self._moved, self._whole, self.changed = [], [], 0


def _pieces(count: int, most: int) -> list[range]:
    """So many blocks as at most so many runs of about the same length."""
    most = min(count, most)
    return [range(i * count // most, (i + 1) * count // most) for i in range(most)]


def _later(span: slice, start: int) -> slice:
    return slice(span.start + start, span.stop + start)


def _differing(old: Bytes, new: Bytes, bits: int) -> int:
    if bits == 4:
        both = old ^ new
        return int(np.count_nonzero(both & 15) + np.count_nonzero(both >> 4))
    return int(np.count_nonzero(as_words(old, bits // 8) != as_words(new, bits // 8)))


@dataclass(frozen=True)
class Blob:
    """The blocks of one tensor inside a container's bytes."""

    data: Bytes
    spans: list[tuple[int, int]]
    layout: Layout
    field: Field
    tables: list[Parameters]

    @property
    def signed(self) -> bool:
        """Whether whole words carry a sign above an exponent."""
        return self.field != PLAIN and self.layout.bits != 4

    @property
    def width(self) -> int:
        """Bytes of a word in a block that needs no base."""
        return max(1, self.layout.bits // 8)

    def kind(self, index: int) -> int:
        """What block `index` is; a number of a table for a sparse one."""
        start, end = self.spans[index]
        kind = int(self.data[start])
        if end + 8 > self.data.size or (kind == SAME and end - start != 1):
            raise FormatError("A delta's block has a wrong size; fetch it again.")
        if kind < SAME and kind >= len(self.tables):
            raise FormatError("A delta lacks the table of a block; refuse its source.")
        return kind

    def apply(self, buffer: Bytes, changed: int, threads: int = 1) -> Applied:
        """Change the whole tensor in `buffer`, in place, or leave it as it was and raise."""
        if threads == 1 or len(self.spans) == 1:
            applied = self.apply_range(0, len(self.spans), buffer, changed)
        else:
            applied = self._apply_pieces(buffer, changed, threads)
        if applied.changed != changed:
            applied.undo()
            raise FormatError(WRONG_COUNT)
        return applied

    def _apply_pieces(self, buffer: Bytes, most: int, threads: int) -> Applied:
        """`apply_range` of the whole tensor, a piece on each thread."""

        def apply_piece(piece: range) -> Applied | Exception:
            own = buffer[self._bytes_of(piece)]
            try:
                return self.apply_range(piece.start, piece.stop, own, most)
            except Exception as error:  # noqa: BLE001 - raised once the other pieces are done
                return error

        applied, errors = Applied(buffer, self.layout.bits), []
        pieces = _pieces(len(self.spans), threads)
        with Crew(threads) as crew:
            for piece, done in zip(pieces, crew.each(apply_piece, pieces), strict=True):
                if isinstance(done, Exception):
                    errors.append(done)
                else:
                    applied.include(done, self._bytes_of(piece).start)
        if errors:
            applied.undo()
            raise errors[0]
        return applied

    def fill(self, buffer: Bytes, threads: int = 1) -> None:
        """Write a tensor whose blocks need no base."""

        def fill_block(index: int) -> None:
            start, end = self.spans[index]
            part = buffer[self.layout.span(index)]
            part[:] = read_whole(self.data[start:end], part.size, self.width, self.signed)

        with Crew(threads) as crew:
            for _ in crew.each(fill_block, range(len(self.spans))):
                pass

    def _bytes_of(self, blocks: range) -> slice:
        return slice(self.layout.span(blocks.start).start, self.layout.span(blocks.stop - 1).stop)

    def apply_range(self, first: int, last: int, buffer: Bytes, most: int) -> Applied:
        """Apply the blocks `first <= index < last`, of at most `most` changes, to a buffer that
        holds just their words."""
        applied = Applied(buffer, self.layout.bits)
        before = self.layout.span(first).start
        try:
            for index in range(first, last):
                span = self.layout.span(index)
                own = slice(span.start - before, span.stop - before)
                self._apply_block(index, own, applied, buffer[own], most - applied.changed)
        except BaseException:
            applied.undo()
            raise
        return applied

    def _apply_block(
        self, index: int, span: slice, applied: Applied, old: Bytes, most: int
    ) -> None:
        kind, bits = self.kind(index), self.layout.bits
        start, end = self.spans[index]
        if kind == DENSE:
            applied.overwrite(span, *read_dense(self.data, start + 1, end, old, bits, self.field))
        elif kind in (RAW, PLANES):
            block = self.data[start:end]
            applied.overwrite(span, read_whole(block, old.size, self.width, self.signed))
        elif kind != SAME:
            table = self.tables[kind]
            words = old.size * 8 // bits
            events = read_events(self.data, start + 1, end, words, table, most)
            places = place(events, old, bits, table.classes(self.field))
            applied.move(span, places, events.changes.copy(), how=add)
