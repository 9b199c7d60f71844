"""The loops of the conditioned coding, compiled by numba without the interpreter lock. Pure.

Nothing here raises, and nothing here trusts a byte: a kernel returns a negative number where its
input is malformed or its output would not fit, and every index it forms is bounded first.

The speed comes from `_differ` and `_planes`: one call looks at 64 words and answers with 64-bit
masks, one that tells which of them changed, and one for each bit of their classes. Which of a
chunk's words are of one class is then what two sets of masks have in common, and words are looked
at one by one only where they changed.
Only `farcast.delta.blocks` imports this module, and only when it first codes something:
importing numba takes a second. All kernels stand in one file since numba keeps what it compiled
by the file a kernel stands in: after a change elsewhere it would go on with the old one.
"""

# mypy: ignore-errors
# ruff: noqa: ARG001, C901
# What numba compiles is typed by numba, and an intrinsic takes what numba hands it. The two
# longest loops read a format from top to bottom; split up they would hide its order.

from functools import reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from farcast.delta.conditioned import MAX_GOLOMB, NO_RUNS

GROUP = 64
GROUPS = 8
CHUNK = GROUP * GROUPS
"""Words whose classes are counted at once: eight masks, which one vector holds."""

LOW_BITS, HIGH_BITS = 3, 2
CLASS_BITS = LOW_BITS + HIGH_BITS
"""Of the number of a class: `MAX_CLASSES` are 32."""

PARTS = (1 << LOW_BITS) + (1 << HIGH_BITS)
"""A class is its low bits and its high bits: two of these sets of words have its words alone in
common, so that a class more to count takes a load, an `and` and the counting of ones."""

MAX_QUOTIENT = 24
"""A Golomb quotient from here on is written as 24 ones and the whole number: a bound on the cost
of a number no parameter foresaw."""

DENSE_FROM = 4
"""A block of which more than one word in so many changed is coded densely. Both codings take the
same there, and gaps cost more time the more there are."""

AHEAD = 2 * CHUNK
"""Words asked for before their turn: between two chunks a core computes for so long that memory
would idle."""

FITTED = 128
"""Changes of a class in a block that its parameters are fitted to."""

NEVER = 1 << 40
TOO_LARGE = -1
MALFORMED = -2


def _byte_at(context: Any, builder: Any, array_type: Any, array: Any, index: Any, bits: int) -> Any:
    """Address of `array[index]` as a pointer to `bits`-wide things."""
    data = cgutils.create_struct_proxy(array_type)(context, builder, value=array).data
    address = builder.gep(data, [index])
    return builder.bitcast(address, ir.IntType(bits).as_pointer())


def _vector_at(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    width = array_type.dtype.bitwidth
    kind = ir.VectorType(ir.IntType(width), GROUP)
    data = cgutils.create_struct_proxy(array_type)(context, builder, value=array).data
    address = builder.bitcast(builder.gep(data, [index]), kind.as_pointer())
    return builder.load(address, align=1)


def _splat(builder: Any, value: Any, width: int) -> Any:
    kind = ir.VectorType(ir.IntType(width), GROUP)
    single = builder.insert_element(
        ir.Constant(kind, ir.Undefined), value, ir.Constant(ir.IntType(32), 0)
    )
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), GROUP), [0] * GROUP)
    return builder.shuffle_vector(single, ir.Constant(kind, ir.Undefined), lanes)


@intrinsic
def _differ(typing: Any, a: Any, b: Any, index: Any) -> Any:
    """Mask of the 64 words from `index` on that differ between `a` and `b`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left = _vector_at(context, builder, signature.args[0], args[0], args[2])
        right = _vector_at(context, builder, signature.args[1], args[1], args[2])
        return builder.bitcast(builder.icmp_unsigned("!=", left, right), ir.IntType(64))

    return types.uint64(a, b, types.int64), generate


def _class_lanes(builder: Any, words: Any, args: Any, width: int) -> Any:
    """min(max(((word >> shift) & mask) - first, 0), last) of 64 words, in bytes."""
    shift, mask, first, last = args
    small = ir.VectorType(ir.IntType(8), GROUP)
    if width < 64:
        shift = builder.trunc(shift, ir.IntType(width))
    lanes = builder.lshr(words, _splat(builder, shift, width))
    if width > 8:
        lanes = builder.trunc(lanes, small)
    lanes = builder.and_(lanes, _splat(builder, mask, 8))
    low, high = _splat(builder, first, 8), _splat(builder, last, 8)
    above = builder.icmp_unsigned(">", lanes, low)
    lanes = builder.select(above, builder.sub(lanes, low), ir.Constant(small, [0] * GROUP))
    return builder.select(builder.icmp_unsigned("<", lanes, high), lanes, high)


@intrinsic
def _planes(
    typing: Any,
    words: Any,
    index: Any,
    shift: Any,
    mask: Any,
    first: Any,
    last: Any,
    out: Any,
    group: Any,
) -> Any:
    """`out[b * GROUPS + group]` = mask of the 64 words from `index` on whose class has bit b."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = signature.args[0].dtype.bitwidth
        small = ir.VectorType(ir.IntType(8), GROUP)
        words_ = _vector_at(context, builder, signature.args[0], args[0], args[1])
        lanes = _class_lanes(builder, words_, args[2:6], width)
        lanes = builder.shl(lanes, ir.Constant(small, [8 - CLASS_BITS] * GROUP))
        for bit in reversed(range(CLASS_BITS)):  # each as the sign, which is the cheapest to ask
            having = builder.icmp_signed("<", lanes, ir.Constant(small, [0] * GROUP))
            at = builder.add(args[7], ir.Constant(ir.IntType(64), bit * GROUPS))
            address = _byte_at(context, builder, signature.args[6], args[6], at, 64)
            builder.store(builder.bitcast(having, ir.IntType(64)), address, align=8)
            lanes = builder.add(lanes, lanes)
        return context.get_dummy_value()

    signature = types.void(
        words, types.int64, types.uint64, types.uint8, types.uint8, types.uint8, out, types.int64
    )
    return signature, generate


_MASKS = ir.VectorType(ir.IntType(64), GROUPS)


def _masks_at(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Address of eight masks."""
    address = _byte_at(context, builder, array_type, array, index, 64)
    return builder.bitcast(address, _MASKS.as_pointer())


@intrinsic
def _parts(typing: Any, planes: Any, out: Any) -> Any:
    """`out[v * GROUPS :]` = masks of the words of a chunk whose class has v as its low bits, then
    of those that have v as its high bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def at(which: int, index: int) -> Any:
            place = ir.Constant(ir.IntType(64), index * GROUPS)
            return _masks_at(context, builder, signature.args[which], args[which], place)

        having = [builder.load(at(0, bit), align=8) for bit in range(CLASS_BITS)]
        sides = [(builder.not_(masks), masks) for masks in having]
        part = 0
        for bits in (sides[:LOW_BITS], sides[LOW_BITS:]):
            for value in range(1 << len(bits)):
                masks = [side[value >> bit & 1] for bit, side in enumerate(bits)]
                builder.store(reduce(builder.and_, masks), at(1, part), align=8)
                part += 1
        return context.get_dummy_value()

    return types.void(planes, out), generate


def _members_value(context: Any, builder: Any, array_type: Any, parts: Any, k: Any) -> Any:
    """Masks of the words of class `k`."""

    def constant(value: int) -> Any:
        return ir.Constant(ir.IntType(64), value)

    low = builder.and_(k, constant((1 << LOW_BITS) - 1))
    high = builder.add(builder.lshr(k, constant(LOW_BITS)), constant(1 << LOW_BITS))
    both = [
        builder.load(
            _masks_at(context, builder, array_type, parts, builder.mul(part, constant(GROUPS))),
            align=8,
        )
        for part in (low, high)
    ]
    return builder.and_(*both)


def _counts(builder: Any, members: Any, bits: int) -> Any:
    """How many bits of each mask are set, in lanes of so many bits."""
    count = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_MASKS, [_MASKS]), "llvm.ctpop.v8i64"
    )
    return builder.trunc(builder.call(count, [members]), ir.VectorType(ir.IntType(bits), GROUPS))


@intrinsic
def _members(typing: Any, parts: Any, k: Any, out: Any, before: Any) -> Any:
    """`out[:GROUPS]` = masks of the words of class `k` in a chunk, `before[g]` = how many of these
    there are before group g. Returns how many there are."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start = ir.Constant(ir.IntType(64), 0)
        members = _members_value(context, builder, signature.args[0], *args[:2])
        builder.store(
            members, _masks_at(context, builder, signature.args[2], args[2], start), align=8
        )
        counts = _counts(builder, members, 16)
        none = ir.Constant(counts.type, [0] * GROUPS)
        sums, step = counts, 1
        while step < GROUPS:
            later = [GROUPS + i - step if i >= step else i for i in range(GROUPS)]
            lanes = ir.Constant(ir.VectorType(ir.IntType(32), GROUPS), later)
            sums = builder.add(sums, builder.shuffle_vector(none, sums, lanes))
            step *= 2
        address = _byte_at(context, builder, signature.args[3], args[3], start, 16)
        address = builder.bitcast(address, counts.type.as_pointer())
        builder.store(builder.sub(sums, counts), address, align=2)
        total = builder.extract_element(sums, ir.Constant(ir.IntType(32), GROUPS - 1))
        return builder.zext(total, ir.IntType(64))

    return types.int64(parts, types.int64, out, before), generate


@intrinsic
def _group(typing: Any, before: Any, rank: Any) -> Any:
    """The last group with at most `rank` words of a class before it: where that one is."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.VectorType(ir.IntType(16), GROUPS)
        start = ir.Constant(ir.IntType(64), 0)
        address = _byte_at(context, builder, signature.args[0], args[0], start, 16)
        counts = builder.load(builder.bitcast(address, kind.as_pointer()), align=2)
        single = builder.insert_element(
            ir.Constant(kind, ir.Undefined),
            builder.trunc(args[1], ir.IntType(16)),
            ir.Constant(ir.IntType(32), 0),
        )
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), GROUPS), [0] * GROUPS)
        wanted = builder.shuffle_vector(single, ir.Constant(kind, ir.Undefined), lanes)
        reached = builder.bitcast(builder.icmp_unsigned("<=", counts, wanted), ir.IntType(8))
        last = builder.sub(builder.ctpop(reached), ir.Constant(ir.IntType(8), 1))
        return builder.zext(last, ir.IntType(64))

    return types.int64(before, types.int64), generate


@intrinsic
def _number(typing: Any, parts: Any, k: Any) -> Any:
    """How many words of a chunk are of class `k`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        members = _members_value(context, builder, signature.args[0], *args)
        word = builder.bitcast(_counts(builder, members, 8), ir.IntType(64))  # at most 64 a byte

        def constant(value: int) -> Any:
            return ir.Constant(ir.IntType(64), value)

        every_other = constant(0x00FF00FF00FF00FF)
        high = builder.and_(builder.lshr(word, constant(8)), every_other)
        pairs = builder.add(builder.and_(word, every_other), high)
        return builder.lshr(builder.mul(pairs, constant(0x0001000100010001)), constant(48))

    return types.int64(parts, types.int64), generate


@intrinsic
def _ones(typing: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), generate


@intrinsic
def _lowest(typing: Any, word: Any) -> Any:
    """Index of the lowest set bit; 64 for zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@intrinsic
def _leading(typing: Any, word: Any) -> Any:
    """How many zero bits stand above the highest set bit."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@intrinsic
def _prefetch(typing: Any, words: Any, index: Any) -> Any:
    """Ask for the `CHUNK` words from `index` on, which may lie behind the end."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = [ir.IntType(8).as_pointer(), *[ir.IntType(32)] * 3]
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), kinds), "llvm.prefetch.p0"
        )
        start = _byte_at(context, builder, signature.args[0], args[0], args[1], 8)
        how = [ir.Constant(ir.IntType(32), number) for number in (0, 3, 1)]  # read, keep, data
        for at in range(0, CHUNK * signature.args[0].dtype.bitwidth // 8, 64):
            builder.call(function, [builder.gep(start, [ir.Constant(ir.IntType(64), at)]), *how])
        return context.get_dummy_value()

    return types.void(words, types.int64), generate


@intrinsic
def _load(typing: Any, data: Any, index: Any) -> Any:
    """Eight bytes from `index` on, little endian. The caller owns the bound."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _byte_at(context, builder, signature.args[0], args[0], args[1], 64)
        return builder.load(pointer, align=1)

    return types.uint64(data, types.int64), generate


@intrinsic
def _store(typing: Any, data: Any, index: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _byte_at(context, builder, signature.args[0], args[0], args[1], 64)
        builder.store(args[2], pointer, align=1)
        return context.get_dummy_value()

    return types.void(data, types.int64, types.uint64), generate


@njit(nogil=True, cache=True)
def _class(word, shift, mask, first, last):
    code = np.int64((np.uint64(word) >> shift) & np.uint64(mask)) - np.int64(first)
    return min(max(code, 0), np.int64(last))


@njit(nogil=True, cache=True)
def _count(old, new):
    """Words that differ."""
    found = np.int64(0)
    for i in range(old.size):
        found += old[i] != new[i]
    return found


@njit(nogil=True, cache=True)
def find(old, new, bits, shift, mask, first, last, event_class, event_rank, event_change):
    """Changed words of a block: class, rank among its class in the block, new - old modulo a width
    of `bits`. Ascending. Returns their number; where the block turns out dense, less their number,
    and the events are of no use. The event arrays hold a block each.
    """
    counts = np.zeros(256, np.int64)
    planes = np.empty(CLASS_BITS * GROUPS, np.uint64)
    parts = np.empty(PARTS * GROUPS, np.uint64)
    masks, same = np.empty(GROUPS, np.uint64), np.empty(GROUPS, np.uint64)
    before = np.empty(GROUPS, np.uint16)
    width = _width(bits)
    found, most = 0, old.size // DENSE_FROM
    whole = old.size // CHUNK * CHUNK
    for at in range(0, whole, CHUNK):
        if found > most:
            return -_count(old, new)
        _prefetch(old, at + AHEAD)
        _prefetch(new, at + AHEAD)
        busy = np.uint64(0)  # groups with changes
        for g in range(GROUPS):
            masks[g] = _differ(old, new, at + GROUP * g)
            busy |= np.uint64(masks[g] != 0) << np.uint64(g)
            _planes(old, at + GROUP * g, shift, mask, first, last, planes, g)
        _parts(planes, parts)
        while busy != 0:  # one loop: its end is all that has to be guessed
            g = _lowest(busy)
            changed = masks[g]
            i = at + GROUP * g + _lowest(changed)
            under = (changed & (np.uint64(0) - changed)) - np.uint64(1)
            changed &= changed - np.uint64(1)
            masks[g] = changed
            busy ^= np.uint64(changed == 0) << np.uint64(g)
            k = _class(old[i], shift, mask, first, last)
            _members(parts, k, same, before)
            event_class[found] = k
            event_rank[found] = counts[k] + before[g] + _ones(same[g] & under)
            event_change[found] = (np.uint64(new[i]) - np.uint64(old[i])) & width
            found += 1
        left = np.int64(CHUNK)
        for k in range(np.int64(last)):
            number = _number(parts, k)
            counts[k] += number
            left -= number
        counts[last] += left
    for at in range(whole, old.size):
        k = _class(old[at], shift, mask, first, last)
        if old[at] != new[at]:
            event_class[found], event_rank[found] = k, counts[k]
            event_change[found] = (np.uint64(new[at]) - np.uint64(old[at])) & width
            found += 1
        counts[k] += 1
    last_group = (old.size // GROUP - 1) * GROUP
    if found > most and last_group > 0 and _count(old[:last_group], new[:last_group]) > most:
        return -_count(old, new)
    return found


@njit(nogil=True, cache=True)
def _width(bits):
    return ~np.uint64(0) >> np.uint64(64 - bits)


@njit(nogil=True, cache=True)
def survey(
    old,
    new,
    bits,
    shift,
    mask,
    first,
    last,
    event_class,
    event_rank,
    event_change,
    bounds,
    gap,
    size,
    row,
):
    """`find`, `arrange` and `fit` for one block; returns what `find` does."""
    found = find(old, new, bits, shift, mask, first, last, event_class, event_rank, event_change)
    if found > 0:
        arrange(found, event_class, event_rank, event_change, bits, bounds, gap, size)
        fit(np.int64(last) + 1, bounds, gap, size, row)
    return found


@njit(nogil=True, cache=True)
def arrange(found, event_class, event_rank, event_change, bits, bounds, gap, size):
    """Sort events by class: `bounds[k]:bounds[k+1]` of `gap` and of `size`: the size of the
    difference (the shorter way round a width of `bits`) less one, and its sign as lowest bit."""
    top = np.uint64(1) << np.uint64(bits - 1)
    width = _width(bits)
    bounds[:] = 0
    for i in range(found):
        bounds[np.int64(event_class[i]) + 1] += 1
    for k in range(256):
        bounds[k + 1] += bounds[k]
    fill = bounds[:256].copy()
    before = np.full(256, -1, np.int64)
    for i in range(found):
        k = np.int64(event_class[i])
        j = fill[k]
        fill[k] = j + 1
        rank = np.int64(event_rank[i])
        gap[j] = rank - before[k] - 1
        before[k] = rank
        change = event_change[i]
        down = np.uint64(change > top)  # without a branch, which nobody could guess
        less = ((change - (np.uint64(1) - down)) ^ (np.uint64(0) - down)) & width
        size[j] = (less << np.uint64(1)) | down


@njit(nogil=True, cache=True)
def _length(value, g):
    """Bits of Golomb(value, g), about: what an escaped number takes is not told apart."""
    k = np.uint64(g >> 1)
    high = value >> k
    if g & 1:
        third = high // np.uint64(3)
        more = np.int64(1) if high != third * np.uint64(3) else np.int64(0)
        return np.int64(min(third, np.uint64(60))) + 2 + more + np.int64(k)
    return np.int64(min(high, np.uint64(60))) + 1 + np.int64(k)


@njit(nogil=True, cache=True)
def _near(total, count):
    """A Golomb parameter a little below what suits `count` numbers that add up to `total`."""
    mean = (np.uint64(total) * np.uint64(177)) // (np.uint64(count) * np.uint64(256))
    if mean == 0:
        return np.int64(0)
    length = 63 - _leading(mean)  # a step of ln 2 times the mean
    return min(max(np.int64(0), 2 * length - 1), np.int64(MAX_GOLOMB - 3))


TRIED = 4
"""Golomb parameters weighed from `_near` on: the best one of real series is among them."""


@njit(nogil=True, cache=True)
def fit(classes, bounds, gap, size, row):
    """Best parameters of each class for the events of one block; `row[k]` is as in `write`."""
    for k in range(classes):
        lo, hi = bounds[k], bounds[k + 1]
        some = min(hi, lo + FITTED)
        _fit_gaps(gap, lo, some, row[k])
        _fit_sizes(size, lo, some, row[k])
        row[k, 4] = min(63 - _leading(np.uint64(max(1, hi - lo))), 15)


@njit(nogil=True, cache=True)
def pool(classes, blocks, starts, gap, size, bounds, pooled_gap, pooled_size, row):
    """Merge the events of several blocks and fit one row a class to all of them.

    `blocks[b]` are the bounds of block b, whose events lie from `starts[b]` on in `gap` and `size`.
    """
    at = np.int64(0)
    for k in range(classes):
        bounds[k] = at
        for b in range(blocks.shape[0]):
            for j in range(starts[b] + blocks[b, k], starts[b] + blocks[b, k + 1]):
                pooled_gap[at], pooled_size[at] = gap[j], size[j]
                at += 1
    bounds[classes:] = at
    for k in range(classes):
        _fit_gaps(pooled_gap, bounds[k], bounds[k + 1], row[k])
        _fit_sizes(pooled_size, bounds[k], bounds[k + 1], row[k])
        least = NEVER
        for parameter in range(16):
            bits = np.int64(0)
            for b in range(blocks.shape[0]):
                bits += _length(np.uint64(blocks[b, k + 1] - blocks[b, k]), 2 * parameter)
            if bits < least:
                row[k, 4], least = parameter, bits


@njit(nogil=True, cache=True)
def _least(costs, start):
    """The cheapest of the parameters from `start` on, the first of equals, and its cost."""
    best = np.int64(0)
    for i in range(1, costs.size):
        if costs[i] < costs[best]:
            best = np.int64(i)
    return start + best, costs[best]


@njit(nogil=True, cache=True)
def _fit_gaps(gap, lo, hi, row):
    row[0], row[1] = 0, NO_RUNS
    if hi == lo:
        return
    total, zeros = np.int64(0), np.int64(0)
    for j in range(lo, hi):
        total += np.int64(gap[j])
        zeros += gap[j] == 0
    costs = np.zeros(TRIED, np.int64)
    start = _near(total, hi - lo)
    for i in range(TRIED):
        costs[i] = gaps_cost(gap, lo, hi, start + i)
    row[0], least = _least(costs, start)
    if 2 * zeros < hi - lo:
        return
    others = hi - lo - zeros
    after = _near(total - others, max(1, others))
    length = _near(zeros, others + 1)
    apart = np.zeros(TRIED, np.int64)
    costs[:] = 0
    for i in range(TRIED):  # what runs take does not depend on what the gaps after them take
        apart[i], costs[i] = _runs_costs(gap, lo, hi, length + i, after + i)
    z, of_runs = _least(apart, length)
    g, of_gaps = _least(costs, after)
    if of_runs + of_gaps < least:
        row[0], row[1] = g, z


@njit(nogil=True, cache=True)
def gaps_cost(gap, lo, hi, g):
    """Bits of gaps that are coded one by one: `_length` of each, in lanes."""
    part = gap[lo:hi]
    k, bits = np.uint32(g >> 1), np.uint32(0)
    if g & 1:
        for j in range(part.size):
            high = part[j] >> k
            third = high // np.uint32(3)
            more = np.uint32(high != third * np.uint32(3))
            bits += min(third, np.uint32(60)) + more
        return np.int64(bits) + part.size * (2 + (g >> 1))
    for j in range(part.size):
        bits += min(part[j] >> k, np.uint32(60))
    return np.int64(bits) + part.size * (1 + (g >> 1))


@njit(nogil=True, cache=True)
def _runs_costs(gap, lo, hi, z, g):
    """Bits of the runs of zero gaps, and of the gaps after them."""
    runs, bits, zeros = np.int64(0), np.int64(0), np.int64(0)
    for j in range(lo, hi):
        if gap[j] == 0:
            zeros += 1
        else:
            runs += _length(np.uint64(zeros), z)
            bits += _length(np.uint64(gap[j]) - np.uint64(1), g)
            zeros = 0
    return runs + (_length(np.uint64(zeros), z) if zeros else np.int64(0)), bits


@njit(nogil=True, cache=True)
def _fit_sizes(size, lo, hi, row):
    row[2], row[3] = NO_RUNS, 0
    if hi == lo:
        return
    total, larger = np.uint64(0), np.int64(0)
    for j in range(lo, hi):
        one_less = size[j] >> np.uint64(1)
        total += min(one_less, np.uint64(1 << 32))
        larger += one_less != 0
    start = _near(total, hi - lo)
    more = _near(total - np.uint64(larger), max(1, larger))
    apart = _near(hi - lo - larger, larger + 1)
    plain, rest, runs = (
        np.zeros(TRIED, np.int64),
        np.zeros(TRIED, np.int64),
        np.zeros(TRIED, np.int64),
    )
    ones = np.int64(0)
    for j in range(lo, hi):  # only what is larger than one differs from parameter to parameter
        value = size[j] >> np.uint64(1)
        if value == 0:
            ones += 1
            continue
        for i in range(TRIED):
            plain[i] += _length(value, start + i)
            rest[i] += _length(value - np.uint64(1), more + i)
            runs[i] += _length(np.uint64(ones), apart + i)
        ones = 0
    for i in range(TRIED):
        plain[i] += (hi - lo - larger) * _length(np.uint64(0), start + i)
        runs[i] += _larger_head(hi - lo, larger, apart + i)
    row[3], least = _least(plain, start)
    if 3 * larger > hi - lo:
        return
    r, of_runs = _least(runs, apart)
    m, of_rest = _least(rest, more)
    if of_runs + of_rest < least:
        row[2], row[3] = r, m


@njit(nogil=True, cache=True)
def _plain_cost(size, lo, hi, g):
    bits, larger = np.int64(0), np.int64(0)
    for j in range(lo, hi):
        value = size[j] >> np.uint64(1)
        if value:
            bits += _length(value, g)
            larger += 1
    return bits + (hi - lo - larger) * _length(np.uint64(0), g)


@njit(nogil=True, cache=True)
def larger_parameter(number, r):
    """The Rice parameter of how many of `number` changes are larger than one, when such changes
    lie Golomb(r) apart."""
    return np.int64(63 - _leading((np.uint64(number) >> np.uint64(r >> 1)) | np.uint64(1)))


@njit(nogil=True, cache=True)
def _larger_head(number, larger, r):
    """Bits of how many of `number` changes are larger than one."""
    return _length(np.uint64(larger), 2 * larger_parameter(number, r))


@njit(nogil=True, cache=True)
def _larger_cost(size, lo, hi, r, g):
    """Bits of sizes of which only those larger than one are coded, and where."""
    bits, larger, before = np.int64(0), np.int64(0), np.int64(lo - 1)
    for j in range(lo, hi):
        value = size[j] >> np.uint64(1)
        if value:
            bits += _length(np.uint64(j - before - 1), r) + _length(value - np.uint64(1), g)
            larger += 1
            before = j
    return bits + _larger_head(hi - lo, larger, r)


@njit(nogil=True, cache=True)
def _gaps_cost(gap, lo, hi, row):
    if row[1] == NO_RUNS:
        return gaps_cost(gap, lo, hi, np.int64(row[0]))
    runs, bits = _runs_costs(gap, lo, hi, np.int64(row[1]), np.int64(row[0]))
    return runs + bits


@njit(nogil=True, cache=True)
def _sizes_cost(size, lo, hi, row):
    if row[2] == NO_RUNS:
        return _plain_cost(size, lo, hi, np.int64(row[3]))
    return _larger_cost(size, lo, hi, np.int64(row[2]), np.int64(row[3]))


@njit(nogil=True, cache=True)
def costs_of(bounds, gap, size, rows, costs):
    """`costs[t]` = bits of a block under the parameters `rows[t]`, signs left out. Parameters that
    an earlier table has too are not weighed again."""
    tables, classes = rows.shape[0], rows.shape[1]
    of_gaps, of_sizes = np.empty(tables, np.int64), np.empty(tables, np.int64)
    costs[:] = 0
    for k in range(classes):
        lo, hi = bounds[k], bounds[k + 1]
        for t in range(tables):
            row = rows[t, k]
            costs[t] += _length(np.uint64(hi - lo), 2 * np.int64(row[4]))
            if lo == hi:
                continue
            like_gaps = like_sizes = t
            for other in range(t - 1, -1, -1):
                if rows[other, k, 0] == row[0] and rows[other, k, 1] == row[1]:
                    like_gaps = other
                if rows[other, k, 2] == row[2] and rows[other, k, 3] == row[3]:
                    like_sizes = other
            of_gaps[t] = _gaps_cost(gap, lo, hi, row) if like_gaps == t else of_gaps[like_gaps]
            of_sizes[t] = (
                _sizes_cost(size, lo, hi, row) if like_sizes == t else of_sizes[like_sizes]
            )
            costs[t] += of_gaps[t] + of_sizes[t]


@njit(nogil=True, cache=True)
def _put(out, at, value, bits, held, fill):
    """Append the low `bits` (at most 56) of `value`; what stands above them must be zero.

    `held` are the last `fill` < 8 bits; eight bytes are stored at byte `at` every time, without a
    branch to guess, and never read back.
    """
    held |= value << np.uint64(fill)
    fill += bits
    _store(out, at, held)
    whole = fill >> 3
    return at + whole, held >> np.uint64(whole << 3), fill & 7


@njit(nogil=True, cache=True)
def _put_escaped(out, at, value, held, fill):
    """A number that no parameter foresaw: 24 ones, 6 bits of its length less one, itself."""
    ones = (np.uint64(1) << np.uint64(MAX_QUOTIENT)) - np.uint64(1)
    at, held, fill = _put(out, at, ones, MAX_QUOTIENT, held, fill)
    bits = 64 - _leading(value | np.uint64(1))
    at, held, fill = _put(out, at, np.uint64(bits - 1), 6, held, fill)
    low = value & np.uint64(0xFFFFFFFF)
    at, held, fill = _put(out, at, low, min(bits, 32), held, fill)
    if bits > 32:
        at, held, fill = _put(out, at, value >> np.uint64(32), bits - 32, held, fill)
    return at, held, fill


@njit(nogil=True, cache=True)
def _code(value, g):
    """Golomb(value, g) as a word and its bits; no bits where it must be escaped."""
    k = np.uint64(g >> 1)
    q = value >> k
    low = value & ((np.uint64(1) << k) - np.uint64(1))
    bits = np.uint64(1)
    third = np.uint64(0)
    if g & 1:
        high = q
        q = high // np.uint64(3)
        third = high - q * np.uint64(3)
        bits = np.uint64(2) + min(third, np.uint64(1))
        third = third + third - min(third, np.uint64(1))  # 0, 10, 11, first bit first
    if q >= np.uint64(MAX_QUOTIENT):
        return np.uint64(0), np.int64(0)
    ones = (np.uint64(1) << q) - np.uint64(1)
    word = ones | (third << (q + np.uint64(1))) | (low << (q + bits))
    return word, np.int64(q + bits + k)


@njit(nogil=True, cache=True)
def _put_golomb(out, at, value, g, held, fill):
    word, bits = _code(value, g)
    if bits:
        return _put(out, at, word, bits, held, fill)
    return _put_escaped(out, at, value, held, fill)


@njit(nogil=True, cache=True)
def _ones_ahead(size, j, end):
    """How many of `size[j:end]` are differences of one before the first that is not."""
    n = 0
    while j + n < end and size[j + n] >> np.uint64(1) == 0:
        n += 1
    return n


@njit(nogil=True, cache=True)
def _zeros_ahead(gap, j, end):
    n = 0
    while j + n < end and gap[j + n] == 0:
        n += 1
    return n


@njit(nogil=True, cache=True)
def _write_class(lo, hi, gap, size, row, out, limit, at, held, fill):
    """Code the events `lo <= j < hi` of one class."""
    g, z = np.int64(row[0]), np.int64(row[1])
    r, m = np.int64(row[2]), np.int64(row[3])
    ones = np.int64(-1)  # differences of one until the next larger one
    if r != NO_RUNS:
        larger = np.int64(0)
        for j in range(lo, hi):
            larger += size[j] >> np.uint64(1) != 0
        parameter = 2 * larger_parameter(hi - lo, r)
        at, held, fill = _put_golomb(out, at, np.uint64(larger), parameter, held, fill)
        ones = NEVER
        if larger:
            ones = _ones_ahead(size, lo, hi)
            at, held, fill = _put_golomb(out, at, np.uint64(ones), r, held, fill)
    zeros = np.int64(-1)
    for j in range(lo, hi):
        if at > limit:
            return TOO_LARGE, held, fill
        sign = size[j] & np.uint64(1)
        if z == NO_RUNS and r != NO_RUNS and ones != 0:  # by far the most frequent
            ones -= 1
            word, bits = _code(np.uint64(gap[j]), g)
            if bits:
                word |= sign << np.uint64(bits)
                at, held, fill = _put(out, at, word, bits + 1, held, fill)
                continue
            at, held, fill = _put_escaped(out, at, np.uint64(gap[j]), held, fill)
            at, held, fill = _put(out, at, sign, 1, held, fill)
            continue
        if z == NO_RUNS:
            at, held, fill = _put_golomb(out, at, np.uint64(gap[j]), g, held, fill)
        else:
            if zeros < 0:
                zeros = _zeros_ahead(gap, j, hi)
                at, held, fill = _put_golomb(out, at, np.uint64(zeros), z, held, fill)
            if zeros == 0:
                less = np.uint64(gap[j]) - np.uint64(1)
                at, held, fill = _put_golomb(out, at, less, g, held, fill)
            zeros -= 1
        value = size[j] >> np.uint64(1)
        if r == NO_RUNS:
            at, held, fill = _put_golomb(out, at, value, m, held, fill)
        elif ones == 0:
            at, held, fill = _put_golomb(out, at, value - np.uint64(1), m, held, fill)
            larger -= 1
            ones = NEVER
            if larger:
                ones = _ones_ahead(size, j + 1, hi)
                at, held, fill = _put_golomb(out, at, np.uint64(ones), r, held, fill)
        else:
            ones -= 1
        at, held, fill = _put(out, at, sign, 1, held, fill)
    return at, held, fill


@njit(nogil=True, cache=True)
def write(classes, bounds, gap, size, row, out, start):
    """Code one block into `out` from byte `start` on; returns the end, or TOO_LARGE.

    `row[k]` = parameters of gaps, runs of zero gaps, distances of larger differences, larger
    differences, counts.
    """
    at, held, fill = start, np.uint64(0), np.int64(0)
    limit = out.size - 96  # what one change and two counts can take at most
    for k in range(classes):
        if at > limit:
            return TOO_LARGE
        lo, hi = bounds[k], bounds[k + 1]
        at, held, fill = _put_golomb(
            out, at, np.uint64(hi - lo), 2 * np.int64(row[k, 4]), held, fill
        )
        if lo == hi:
            continue
        at, held, fill = _write_class(lo, hi, gap, size, row[k], out, limit, at, held, fill)
        if at < 0:
            return TOO_LARGE
    return at + (1 if fill else 0)


@njit(nogil=True, cache=True)
def _get(data, at, limit, bits):
    """`bits` (at most 57) from bit `at`, and the place after them; past `limit` it is over it."""
    if at + bits > limit:
        return np.uint64(0), limit + 1
    word = _load(data, at >> 3) >> np.uint64(at & 7)
    return word & ((np.uint64(1) << np.uint64(bits)) - np.uint64(1)), at + bits


@njit(nogil=True, cache=True)
def _get_escaped(data, at, limit):
    bits, at = _get(data, at + MAX_QUOTIENT, limit, 6)
    count = np.int64(bits) + 1
    value, at = _get(data, at, limit, min(count, 32))
    if count > 32:
        high, at = _get(data, at, limit, count - 32)
        value |= high << np.uint64(32)
    return value, at


@njit(nogil=True, cache=True)
def _decode(word, g):
    """Value and bits of the Golomb code that `word` begins with; no bits where it is escaped.

    At most 24 + 2 + 15 bits are looked at, and 57 are there.
    """
    q = np.uint64(_lowest(~word))
    if q >= np.uint64(MAX_QUOTIENT):
        return np.uint64(0), np.int64(0)
    k = np.uint64(g >> 1)
    word >>= q + np.uint64(1)
    used = q + np.uint64(1) + k
    if g & 1:
        some = word & np.uint64(1)
        third = some + (some & (word >> np.uint64(1)))
        word >>= np.uint64(1) + some
        used += np.uint64(1) + some
        q = q * np.uint64(3) + third
    low = word & ((np.uint64(1) << k) - np.uint64(1))
    return (q << k) | low, np.int64(used)


@njit(nogil=True, cache=True)
def _get_golomb(data, at, limit, g):
    if at >= limit:
        return np.uint64(0), limit + 1
    value, used = _decode(_load(data, at >> 3) >> np.uint64(at & 7), g)
    if not used:
        return _get_escaped(data, at, limit)
    return value, at + used


@njit(nogil=True, cache=True)
def _parse_class(data, at, limit, words, number, row, found, rank, change):
    """Read the `number` events of one class; returns the bit after them, or MALFORMED."""
    g, z = np.int64(row[0]), np.int64(row[1])
    r, m = np.int64(row[2]), np.int64(row[3])
    ones, larger = np.int64(-1), np.uint64(0)
    if r != NO_RUNS:
        parameter = 2 * larger_parameter(number, r)
        larger, at = _get_golomb(data, at, limit, parameter)
        if at > limit or larger > number:
            return MALFORMED
        ones = NEVER
        if larger:
            value, at = _get_golomb(data, at, limit, r)
            ones = np.int64(min(value, number))
    before, zeros = np.int64(-1), np.int64(-1)
    for i in range(found, found + np.int64(number)):
        if at >= limit:
            return MALFORMED
        if z == NO_RUNS and r != NO_RUNS and ones != 0:  # by far the most frequent
            ones -= 1
            word = _load(data, at >> 3) >> np.uint64(at & 7)
            gap, used = _decode(word, g)
            if used:
                sign = (word >> np.uint64(used)) & np.uint64(1)
                at += used + 1
            else:
                gap, at = _get_escaped(data, at, limit)
                sign, at = _get(data, at, limit, 1)
            if at > limit or gap >= np.uint64(words):
                return MALFORMED
            before += np.int64(gap) + 1
            if before >= words:
                return MALFORMED
            rank[i] = before
            change[i] = np.uint64(1) - (sign << np.uint64(1))
            continue
        gap = np.uint64(0)
        if z == NO_RUNS:
            gap, at = _get_golomb(data, at, limit, g)
        else:
            if zeros < 0:
                value, at = _get_golomb(data, at, limit, z)
                zeros = np.int64(min(value, np.uint64(words)))
            if zeros == 0:
                gap, at = _get_golomb(data, at, limit, g)
                if gap >= np.uint64(words):
                    return MALFORMED
                gap += np.uint64(1)
            zeros -= 1
        if at > limit or gap >= np.uint64(words):
            return MALFORMED
        before += np.int64(gap) + 1
        if before >= words:
            return MALFORMED
        size = np.uint64(1)
        if r == NO_RUNS:
            value, at = _get_golomb(data, at, limit, m)
            size += value
        elif ones == 0:
            value, at = _get_golomb(data, at, limit, m)
            size += value + np.uint64(1)
            larger -= np.uint64(1)
            ones = NEVER
            if larger:
                value, at = _get_golomb(data, at, limit, r)
                ones = np.int64(min(value, number))
        else:
            ones -= 1
        sign, at = _get(data, at, limit, 1)
        if at > limit:
            return MALFORMED
        rank[i] = before
        change[i] = np.uint64(0) - size if sign else size
    if larger:
        return MALFORMED
    return at


@njit(nogil=True, cache=True)
def parse(data, start, end, words, classes, row, bounds, rank, change):
    """Read one block's events into `rank` and `change`, class after class.

    Returns their number or MALFORMED. `data` has at least 8 bytes after `end`. A rank is below
    `words`, ranks ascend within a class, and the bytes are used up to the last.
    """
    at, limit = start * 8, end * 8
    room = rank.size
    found = 0
    for k in range(classes):
        bounds[k] = found
        number, at = _get_golomb(data, at, limit, 2 * np.int64(row[k, 4]))
        if at > limit or number > np.uint64(room - found):
            return MALFORMED
        if number == 0:
            continue
        at = _parse_class(data, at, limit, words, number, row[k], found, rank, change)
        if at < 0:
            return MALFORMED
        found += np.int64(number)
    for k in range(classes, 257):
        bounds[k] = found
    if (at + 7) >> 3 != end:
        return MALFORMED
    if at & 7 and np.uint64(data[end - 1]) >> np.uint64(at & 7):
        return MALFORMED
    return found


_L8 = np.uint64(0x0101010101010101)
_H8 = np.uint64(0x8080808080808080)


@njit(nogil=True, cache=True)
def _select(mask, rank, chosen):
    """Index of the set bit that has `rank` set bits below it, without a branch to guess.

    Vigna, "Broadword implementation of rank/select queries", 2008. `chosen[r, byte]` is the
    index of the set bit number r of a byte.
    """
    sums = mask - ((mask >> np.uint64(1)) & np.uint64(0x5555555555555555))
    pairs = np.uint64(0x3333333333333333)
    sums = (sums & pairs) + ((sums >> np.uint64(2)) & pairs)
    sums = ((sums + (sums >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)) * _L8
    below = _ones((((np.uint64(rank) * _L8) | _H8) - sums) & _H8)
    shift = np.uint64(below) << np.uint64(3)
    inside = np.uint64(rank) - (((sums << np.uint64(8)) >> shift) & np.uint64(0xFF))
    byte = (mask >> shift) & np.uint64(0xFF)
    return np.int64(shift) + np.int64(chosen[inside & np.uint64(7), byte])


@njit(nogil=True, cache=True)
def place(words, shift, mask, first, last, bounds, rank, chosen, place):
    """Turn the ranks of one block's events into positions in `place`; writes no word.

    Returns 0, or MALFORMED where a class has fewer words than its events ask for.
    """
    planes = np.empty(CLASS_BITS * GROUPS, np.uint64)
    parts = np.empty(PARTS * GROUPS, np.uint64)
    following = bounds[:256].copy()
    left = np.full(256, NEVER, np.int64)  # words of the class before its next event
    same, before = np.empty(GROUPS, np.uint64), np.empty(GROUPS, np.uint16)
    counted = np.empty(256, np.int64)  # classes with events; the others need no counting
    number = 0
    for k in range(np.int64(last) + 1):
        if bounds[k] < bounds[k + 1]:
            left[k] = rank[bounds[k]]
            counted[number] = k
            number += 1
    whole = words.size // CHUNK * CHUNK
    for at in range(0, whole, CHUNK):
        _prefetch(words, at + AHEAD)
        for g in range(GROUPS):
            _planes(words, at + GROUP * g, shift, mask, first, last, planes, g)
        _parts(planes, parts)
        over = np.uint64(0)
        for n in range(number):
            k = counted[n]
            left[k] -= _number(parts, k)
            over |= (np.uint64(left[k]) >> np.uint64(63)) << np.uint64(n)
        while over != 0:
            k = counted[_lowest(over)]
            over &= over - np.uint64(1)
            total = _members(parts, k, same, before)
            while left[k] < 0:
                within = left[k] + total
                g = _group(before, within)
                bit = _select(same[g], within - np.int64(before[g]), chosen)
                left[k] += _hit(k, at + GROUP * g + bit, following, bounds, rank, place)
    for at in range(whole, words.size):
        k = _class(words[at], shift, mask, first, last)
        if left[k] == 0:
            left[k] += _hit(k, at, following, bounds, rank, place)
        left[k] -= 1
    for k in range(256):
        if following[k] != bounds[k + 1]:
            return MALFORMED
    return 0


@njit(nogil=True, cache=True)
def _hit(k, at, following, bounds, rank, place):
    """Note where an event of class `k` is; returns how much later the next one comes."""
    j = following[k]
    place[j] = at
    following[k] = j + 1
    if j + 1 == bounds[k + 1]:
        return NEVER
    return np.int64(rank[j + 1]) - np.int64(rank[j])


@njit(nogil=True, cache=True)
def add(words, place, change):
    """Add to the words at `place`, which `place` has bounded, modulo their width."""
    for j in range(place.size):
        words[place[j]] += change[j]


@njit(nogil=True, cache=True)
def unpack(data, codes):
    """Two codes of each byte, low half first."""
    for i in range(data.size):
        codes[2 * i] = data[i] & np.uint8(15)
        codes[2 * i + 1] = data[i] >> np.uint8(4)


@njit(nogil=True, cache=True)
def pack(codes, data):
    """Undo `unpack`."""
    for i in range(data.size):
        data[i] = codes[2 * i] | np.uint8(codes[2 * i + 1] << np.uint8(4))


@njit(nogil=True, cache=True)
def add_codes(data, place, change, sign):
    """Add `sign` times `change` to the packed codes at `place`, modulo 16."""
    for j in range(place.size):
        i = place[j]
        shift = np.uint8((i & 1) << 2)
        byte = data[i >> 1]
        step = change[j] if sign > 0 else np.uint64(0) - change[j]
        code = np.uint8((np.uint64(byte >> shift) + step) & np.uint64(15))
        data[i >> 1] = (byte & ~np.uint8(np.uint8(15) << shift)) | np.uint8(code << shift)


SYMBOLS = 128
"""0: unchanged. 1, 2, 3: a difference of that size. From 4 on half octaves: a size of e + 1 bits
is 4 + 2 (e - 2) + its second bit, with e - 1 low bits beside it."""

SCALE = 12
"""Frequencies add up to 4096: tables of 16 KiB a class would leave the caches at more."""

_TOTAL = 1 << SCALE
_LOW = np.uint64(1 << 16)
"""rANS states lie in [2^16, 2^32) and are refilled by 16 bits (Duda, arXiv:1311.2540)."""

LANES = 4
"""Interleaved states, so that one's latency hides behind the others."""


@njit(nogil=True, cache=True)
def _symbol(size):
    """Symbol and number of low bits of a difference of `size` > 0."""
    if size < np.uint64(4):
        return np.int64(size), np.int64(0)
    e = np.int64(63 - _leading(size))
    return 2 * e + np.int64((size >> np.uint64(e - 1)) & np.uint64(1)), e - 1


@njit(nogil=True, cache=True)
def _normalise(seen, out):
    """Frequencies that add up to 4096, none of a symbol that occurs being 0."""
    total = seen.sum()
    out[:] = 0
    if total == 0:
        return
    given, largest = np.int64(0), np.int64(0)
    for s in range(SYMBOLS):
        if seen[s]:
            out[s] = max(np.int64(1), seen[s] * _TOTAL // total)
            given += np.int64(out[s])
            if seen[s] > seen[largest]:
                largest = s
    while given > _TOTAL:
        most = np.int64(out.argmax())
        step = min(given - _TOTAL, max(np.int64(1), np.int64(out[most]) // 2))
        out[most] -= step
        given -= step
    out[largest] += _TOTAL - given


@njit(nogil=True, cache=True)
def write_dense(old, new, bits, shift, mask, first, last, symbols, out, start):
    """Code every word of a block; returns the end, or TOO_LARGE.

    for each class: u8 n, n frequencies (LEB128) | u32 bytes of low bits | low bits
    4 x u32 states | u16 words of the states, in the order they are read
    """
    width, top = _width(bits), np.uint64(1) << np.uint64(bits - 1)
    classes = np.int64(last) + 1
    seen = np.zeros((classes, SYMBOLS), np.int64)
    for i in range(old.size):
        change = (np.uint64(new[i]) - np.uint64(old[i])) & width
        s = np.int64(0)
        if change:
            s, _ = _symbol(change if change <= top else (np.uint64(0) - change) & width)
        symbols[i] = s
        seen[_class(old[i], shift, mask, first, last), s] += 1
    at = start
    frequency = np.zeros((classes, SYMBOLS), np.uint32)
    for k in range(classes):
        _normalise(seen[k], frequency[k])
        n = SYMBOLS
        while n and frequency[k, n - 1] == 0:
            n -= 1
        if at + 2 * n + 64 > out.size:
            return TOO_LARGE
        out[at] = n
        at += 1
        for s in range(n):
            f = frequency[k, s]
            if f >= 128:
                out[at] = (f & np.uint32(127)) | np.uint32(128)
                out[at + 1] = f >> np.uint32(7)
                at += 2
            else:
                out[at] = f
                at += 1
    end = _write_low_bits(old, new, bits, symbols, out, at)
    if end < 0:
        return TOO_LARGE
    return _write_states(old, shift, mask, first, last, symbols, frequency, out, end)


@njit(nogil=True, cache=True)
def _write_low_bits(old, new, bits, symbols, out, head):
    width, top = _width(bits), np.uint64(1) << np.uint64(bits - 1)
    at, held, fill = head + 4, np.uint64(0), np.int64(0)
    for i in range(old.size):
        if not symbols[i]:
            continue
        if at + 32 > out.size:
            return TOO_LARGE
        change = (np.uint64(new[i]) - np.uint64(old[i])) & width
        sign = np.uint64(change > top)
        size = (np.uint64(0) - change) & width if sign else change
        _, low = _symbol(size)
        at, held, fill = _put(out, at, sign, 1, held, fill)
        rest = size & ((np.uint64(1) << np.uint64(low)) - np.uint64(1))
        at, held, fill = _put(out, at, rest & np.uint64(0xFFFFFFFF), min(low, 32), held, fill)
        if low > 32:
            at, held, fill = _put(out, at, rest >> np.uint64(32), low - 32, held, fill)
    at += 1 if fill else 0
    count = np.uint64(at - head - 4)
    for i in range(4):
        out[head + i] = np.uint8((count >> np.uint64(8 * i)) & np.uint64(255))
    return at


@njit(nogil=True, cache=True)
def _write_states(old, shift, mask, first, last, symbols, frequency, out, start):
    classes = frequency.shape[0]
    below = np.zeros((classes, SYMBOLS), np.uint32)
    inverse = np.zeros((classes, SYMBOLS))  # a product is off by at most one, a division is slow
    for k in range(classes):
        for s in range(SYMBOLS):
            if s:
                below[k, s] = below[k, s - 1] + frequency[k, s - 1]
            if frequency[k, s]:
                inverse[k, s] = 1.0 / frequency[k, s]
    states = np.full(LANES, _LOW, np.uint64)
    at = out.size - 8  # words are written from the end, as the reader goes the other way
    for i in range(old.size - 1, -1, -1):
        k = _class(old[i], shift, mask, first, last)
        s = symbols[i]
        f = np.uint64(frequency[k, s])
        lane = i & (LANES - 1)
        x = states[lane]
        if x >= f << np.uint64(32 - SCALE):
            at -= 2
            if at < start + 16:
                return TOO_LARGE
            out[at] = np.uint8(x & np.uint64(255))
            out[at + 1] = np.uint8((x >> np.uint64(8)) & np.uint64(255))
            x >>= np.uint64(16)
        q = np.uint64(np.int64(np.float64(np.int64(x)) * inverse[k, s]))
        rest = x - q * f
        if rest >= f:  # one too few; one too many would wrap round and be so too
            step = np.uint64(1) if rest < f + f else ~np.uint64(0)
            q, rest = q + step, rest - step * f
        states[lane] = (q << np.uint64(SCALE)) + np.uint64(below[k, s]) + rest
    for lane in range(LANES):
        for i in range(4):
            out[start + 4 * lane + i] = np.uint8(
                (states[lane] >> np.uint64(8 * i)) & np.uint64(255)
            )
    count = out.size - 8 - at
    for i in range(count):
        out[start + 16 + i] = out[at + i]
    return start + 16 + count


@njit(nogil=True, cache=True)
def _read_frequencies(data, at, end, frequency):
    """Fill one class's row; returns the place after it, or MALFORMED."""
    if at >= end:
        return MALFORMED
    n = np.int64(data[at])
    at += 1
    total = np.int64(0)
    if n > SYMBOLS:
        return MALFORMED
    for s in range(n):
        if at >= end:
            return MALFORMED
        f = np.int64(data[at])
        at += 1
        if f >= 128:
            if at >= end or data[at] == 0 or data[at] > 32:
                return MALFORMED
            f = (f & 127) | np.int64(data[at]) << 7
            at += 1
        frequency[s] = f
        total += f
    if total != (_TOTAL if n else 0) or (n and frequency[n - 1] == 0):
        return MALFORMED
    return at


@njit(nogil=True, cache=True)
def read_dense(data, start, end, old, new, bits, shift, mask, first, last):
    """Decode a block of `write_dense` over the words `old` into `new`.

    Returns the changed words or MALFORMED. `data` has at least 8 bytes after `end`.
    """
    classes = np.int64(last) + 1
    frequency = np.zeros((classes, SYMBOLS), np.uint32)
    at = start
    for k in range(classes):
        at = _read_frequencies(data, at, end, frequency[k])
        if at < 0:
            return MALFORMED
    if at + 20 > end:
        return MALFORMED
    count = np.int64(_load(data, at) & np.uint64(0xFFFFFFFF))
    low = (at + 4) * 8
    low_end = low + count * 8
    if low_end >> 3 > end - 16:
        return MALFORMED
    return _read_states(
        data, low, low_end, end, old, new, bits, shift, mask, first, last, frequency
    )


@njit(nogil=True, cache=True)
def _read_states(data, low, low_end, end, old, new, bits, shift, mask, first, last, frequency):
    classes = frequency.shape[0]
    symbol = np.zeros((classes, _TOTAL), np.uint8)
    below = np.zeros((classes, SYMBOLS), np.uint32)
    for k in range(classes):
        c = np.int64(0)
        for s in range(SYMBOLS):
            below[k, s] = c
            for _ in range(frequency[k, s]):
                symbol[k, c] = s
                c += 1
    states = np.empty(LANES, np.uint64)
    at = low_end >> 3
    for lane in range(LANES):
        states[lane] = _load(data, at) & np.uint64(0xFFFFFFFF)
        if states[lane] < _LOW:
            return MALFORMED
        at += 4
    width, changed = _width(bits), np.int64(0)
    for i in range(old.size):
        k = _class(old[i], shift, mask, first, last)
        lane = i & (LANES - 1)
        x = states[lane]
        slot = x & np.uint64(_TOTAL - 1)
        s = np.int64(symbol[k, slot])
        f = np.uint64(frequency[k, s])
        if f == 0:
            return MALFORMED
        x = f * (x >> np.uint64(SCALE)) + slot - np.uint64(below[k, s])
        if x < _LOW:
            if at + 2 > end:
                return MALFORMED
            x = x << np.uint64(16) | (_load(data, at) & np.uint64(0xFFFF))
            at += 2
        states[lane] = x
        word = np.uint64(old[i])
        if s:
            sign, low = _get(data, low, low_end, 1)
            size = np.uint64(s)
            if s >= 4:
                e = np.int64(s >> 1)
                rest, low = _get(data, low, low_end, min(e - 1, 32))
                if e - 1 > 32:
                    high, low = _get(data, low, low_end, e - 33)
                    rest |= high << np.uint64(32)
                size = (np.uint64(2 | (s & 1)) << np.uint64(e - 1)) | rest
            if low > low_end or size > width:
                return MALFORMED
            word = (word - size if sign else word + size) & width
            changed += 1
        new[i] = word
    for lane in range(LANES):
        if states[lane] != _LOW:
            return MALFORMED
    if at != end or (low + 7) >> 3 != low_end >> 3:
        return MALFORMED
    if low & 7 and np.uint64(data[(low_end >> 3) - 1]) >> np.uint64(low & 7):
        return MALFORMED
    return changed
