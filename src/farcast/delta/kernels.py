"""The loops of the conditioned coding, compiled by numba without the interpreter lock. Pure.

Nothing here raises, and nothing here trusts a byte: a kernel returns a negative number where its
input is malformed or its output would not fit, and every index it forms is bounded first.

The speed comes from `_classes`, `_equal` and `_differ`: one call looks at 64 words and answers
with a 64-bit mask, so that words are looked at one by one only where they are rare or changed.
Only `farcast.delta.conditioned` imports this module, and only when it first codes something:
importing numba takes a second.
"""

# mypy: ignore-errors
# ruff: noqa: ARG001, C901
# What numba compiles is typed by numba, and an intrinsic takes what numba hands it. The two
# longest loops read a format from top to bottom; split up they would hide its order.

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

GROUP = 64
MAX_QUOTIENT = 24
"""A Rice quotient from here on is written as 24 ones and the whole number: a bound on the cost
of a number no parameter foresaw."""
MAX_PARAMETER = 24
"""24 ones, a stop bit and 24 low bits fit the 57 bits one unaligned load always gives."""
NO_RUNS = 31
"""The parameter that says a class has no run-length coding of zero gaps."""

RARE = 256
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


@intrinsic
def _classes(
    typing: Any, words: Any, index: Any, shift: Any, mask: Any, first: Any, last: Any, out: Any
) -> Any:
    """`out[:64]` = class of each of the 64 words from `index` on:
    min(max(((word >> shift) & mask) - first, 0), last)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = signature.args[0].dtype.bitwidth
        small = ir.VectorType(ir.IntType(8), GROUP)
        words_ = _vector_at(context, builder, signature.args[0], args[0], args[1])
        amount = args[2]
        if width < 64:
            amount = builder.trunc(amount, ir.IntType(width))
        lanes = builder.lshr(words_, _splat(builder, amount, width))
        if width > 8:
            lanes = builder.trunc(lanes, small)
        lanes = builder.and_(lanes, _splat(builder, args[3], 8))
        low = _splat(builder, args[4], 8)
        above = builder.icmp_unsigned(">", lanes, low)
        lanes = builder.select(above, builder.sub(lanes, low), ir.Constant(small, [0] * GROUP))
        high = _splat(builder, args[5], 8)
        lanes = builder.select(builder.icmp_unsigned("<", lanes, high), lanes, high)
        data = cgutils.create_struct_proxy(signature.args[6])(context, builder, value=args[6]).data
        builder.store(lanes, builder.bitcast(data, small.as_pointer()), align=1)
        return context.get_dummy_value()

    signature = types.void(
        words, types.int64, types.uint64, types.uint8, types.uint8, types.uint8, out
    )
    return signature, generate


def _compare(operator: str) -> Any:
    @intrinsic
    def compare(typing: Any, classes: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            zero = ir.Constant(ir.IntType(64), 0)
            lanes = _vector_at(context, builder, signature.args[0], args[0], zero)
            same = builder.icmp_unsigned(operator, lanes, _splat(builder, args[1], 8))
            return builder.bitcast(same, ir.IntType(64))

        return types.uint64(classes, types.uint8), generate

    return compare


_equal = _compare("==")
_below = _compare("<")


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


@njit(nogil=True, cache=True, inline="always")
def _class(word, shift, mask, first, last):
    code = np.int64((np.uint64(word) >> shift) & np.uint64(mask)) - np.int64(first)
    return min(max(code, 0), np.int64(last))


@njit(nogil=True, cache=True)
def sample(words, shift, mask, first, last):
    """From which class on classes are frequent, by about 1024 evenly spaced words."""
    seen = np.zeros(256, np.int64)
    step = max(1, words.size // 1024)
    total = 0
    for i in range(0, words.size, step):
        seen[_class(words[i], shift, mask, first, last)] += 1
        total += 1
    cut, below = 0, 0
    while cut < last and (below + seen[cut]) * RARE <= total:
        below += seen[cut]
        cut += 1
    return cut


@njit(nogil=True, cache=True)
def find(old, new, lo, hi, shift, mask, first, last, cut, event_class, event_rank, event_pos):
    """Changed words of `lo <= i < hi`: class, rank among its class in the block, position.

    Ascending within each class. Returns their number. The event arrays hold `hi - lo` each.
    """
    counts = np.zeros(256, np.int64)
    classes = np.empty(64, np.uint8)
    found = 0
    whole = lo + (hi - lo) // 64 * 64
    for at in range(lo, whole, 64):
        changed = _differ(old, new, at)
        _classes(old, at, shift, mask, first, last, classes)
        while changed != 0:
            bit = _lowest(changed)
            changed &= changed - np.uint64(1)
            k = classes[bit]
            under = (np.uint64(1) << np.uint64(bit)) - np.uint64(1)
            event_class[found] = k
            event_rank[found] = counts[k] + _ones(_equal(classes, k) & under)
            event_pos[found] = at + bit
            found += 1
        rare = _below(classes, np.uint8(cut))
        while rare != 0:
            counts[classes[_lowest(rare)]] += 1
            rare &= rare - np.uint64(1)
        for k in range(np.uint64(cut), np.uint64(last) + np.uint64(1)):
            counts[k] += _ones(_equal(classes, np.uint8(k)))
    for at in range(whole, hi):
        k = _class(old[at], shift, mask, first, last)
        if old[at] != new[at]:
            event_class[found], event_rank[found], event_pos[found] = k, counts[k], at
            found += 1
        counts[k] += 1
    return found


@njit(nogil=True, cache=True)
def arrange(old, new, found, event_class, event_rank, event_pos, bounds, gap, size, negative):
    """Sort events by class: `bounds[k]:bounds[k+1]` of gap, size (|difference|), sign."""
    width = old.itemsize * 8
    top = np.uint64(1) << np.uint64(width - 1)
    bounds[:] = 0
    for i in range(found):
        bounds[np.int64(event_class[i]) + 1] += 1
    for k in range(256):
        bounds[k + 1] += bounds[k]
    fill = bounds[:256].copy()
    before = np.full(256, -1, np.int64)
    for i in range(found):
        k, at = np.int64(event_class[i]), event_pos[i]
        j = fill[k]
        fill[k] += 1
        gap[j] = np.int64(event_rank[i]) - before[k] - 1
        before[k] = np.int64(event_rank[i])
        change = np.uint64(new[at]) - np.uint64(old[at])
        if width < 64:
            change &= (np.uint64(1) << np.uint64(width)) - np.uint64(1)
        if change > top:  # modulo the width, the shorter way round is down
            negative[j] = 1
            change = np.uint64(0) - change
            if width < 64:
                change &= (np.uint64(1) << np.uint64(width)) - np.uint64(1)
        else:
            negative[j] = 0
        size[j] = change


@njit(nogil=True, cache=True)
def bucket(value):
    """Numbers below 16 have their own bucket, larger ones share an eighth of an octave."""
    if value < np.uint64(16):
        return np.int64(value)
    value = min(value, np.uint64(0xFFFFFFFF))
    length = 63 - _leading(value)
    return np.int64(16 + (length - 4) * 8) + np.int64(
        (value >> np.uint64(length - 3)) & np.uint64(7)
    )


@njit(nogil=True, cache=True)
def measure(classes, bounds, gap, size, seen):
    """Add up the numbers a block holds: `seen[series, class, bucket]`.

    Series: 0 gaps, 1 runs of zero gaps, 2 gaps after such a run less one,
    3 runs of differences of one, 4 larger differences less two, 5 changes of the class.
    """
    small, opened_in = 0, -1
    for k in range(classes):
        zeros = 0
        seen[5, k, bucket(np.uint64(bounds[k + 1] - bounds[k]))] += 1
        for j in range(bounds[k], bounds[k + 1]):
            seen[0, k, bucket(np.uint64(gap[j]))] += 1
            if gap[j] == 0:
                zeros += 1
            else:
                seen[1, k, bucket(np.uint64(zeros))] += 1
                seen[2, k, bucket(np.uint64(gap[j] - 1))] += 1
                zeros = 0
            if opened_in < 0:
                opened_in = k
            if size[j] == 1:
                small += 1
            else:
                seen[3, opened_in, bucket(np.uint64(small))] += 1
                seen[4, k, bucket(size[j] - np.uint64(2))] += 1
                small, opened_in = 0, -1
        if zeros:
            seen[1, k, bucket(np.uint64(zeros))] += 1
    if small:
        seen[3, opened_in, bucket(np.uint64(small))] += 1


@njit(nogil=True, cache=True)
def _put(out, at, value, bits, held, fill):
    """Append the low `bits` (at most 57) of `value`.

    `held` are the last `fill` < 64 bits, not yet stored at byte `at`; returned are the three after
    it. A store is never read back: that would stall the next one.
    """
    held |= value << np.uint64(fill)
    if fill + bits < 64:
        return at, held, fill + bits
    _store(out, at, held)
    taken = np.uint64(64 - fill)
    return at + 8, (value >> taken if fill else np.uint64(0)), fill + bits - 64


@njit(nogil=True, cache=True)
def _put_rice(out, at, value, k, held, fill):
    high = value >> np.uint64(k)
    if high < np.uint64(MAX_QUOTIENT):
        q = np.int64(high)
        low = value & ((np.uint64(1) << np.uint64(k)) - np.uint64(1))
        ones = (np.uint64(1) << np.uint64(q)) - np.uint64(1)
        return _put(out, at, ones | (low << np.uint64(q + 1)), q + 1 + k, held, fill)
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
def _put_golomb(out, at, value, g, held, fill):
    """Even g: Rice with g/2. Odd g: Golomb with 3 << (g-1)/2, the step between two Rice codes."""
    if g & 1 == 0:
        return _put_rice(out, at, value, g >> 1, held, fill)
    k = g >> 1
    high = value >> np.uint64(k)
    q = high // np.uint64(3)
    if q >= np.uint64(MAX_QUOTIENT):
        return _put_rice(out, at, value, 0, held, fill)
    third = high - q * np.uint64(3)
    low = value & ((np.uint64(1) << np.uint64(k)) - np.uint64(1))
    ones = (np.uint64(1) << np.uint64(q)) - np.uint64(1)
    code, bits = np.uint64(0), np.int64(1)
    if third:
        code, bits = np.uint64(1) | ((third - np.uint64(1)) << np.uint64(1)), np.int64(2)
    n = np.int64(q) + 1
    word = ones | (code << np.uint64(n)) | (low << np.uint64(n + bits))
    return _put(out, at, word, n + bits + k, held, fill)


@njit(nogil=True, cache=True)
def _ahead(values, value, j, end):
    """How many of `values[j:end]` equal `value` before the first that does not."""
    n = 0
    while j + n < end and values[j + n] == value:
        n += 1
    return n


@njit(nogil=True, cache=True)
def write(classes, bounds, gap, size, negative, table, out, start):
    """Code one block into the zeroed `out` from byte `start` on; returns the end, or TOO_LARGE.

    `table[k]` = parameters of gaps, runs of zero gaps, runs of ones, larger differences, counts.
    """
    at, held, fill = start, np.uint64(0), np.int64(0)
    limit = out.size - 80  # what one change and one count can take at most
    total = bounds[classes]
    small = -1
    for k in range(classes):
        if at > limit:
            return TOO_LARGE
        at, held, fill = _put_rice(
            out, at, np.uint64(bounds[k + 1] - bounds[k]), np.int64(table[k, 4]), held, fill
        )
        kg, kz = np.int64(table[k, 0]), np.int64(table[k, 1])
        kr, km = np.int64(table[k, 2]), np.int64(table[k, 3])
        zeros = -1
        for j in range(bounds[k], bounds[k + 1]):
            if at > limit:
                return TOO_LARGE
            if kz == NO_RUNS:
                at, held, fill = _put_golomb(out, at, np.uint64(gap[j]), kg, held, fill)
            else:
                if zeros < 0:
                    zeros = _ahead(gap, 0, j, bounds[k + 1])
                    at, held, fill = _put_rice(out, at, np.uint64(zeros), kz, held, fill)
                if zeros == 0:
                    at, held, fill = _put_golomb(out, at, np.uint64(gap[j] - 1), kg, held, fill)
                zeros -= 1
            if small < 0:
                small = _ahead(size, np.uint64(1), j, total)
                at, held, fill = _put_rice(out, at, np.uint64(small), kr, held, fill)
            if small == 0:
                at, held, fill = _put_rice(out, at, size[j] - np.uint64(2), km, held, fill)
            small -= 1
            at, held, fill = _put(out, at, np.uint64(negative[j]), 1, held, fill)
    _store(out, at, held)
    return at + ((fill + 7) >> 3)


@njit(nogil=True, cache=True)
def _get(data, at, limit, bits):
    """`bits` (at most 57) from bit `at`, and the place after them; past `limit` it is over it."""
    if at + bits > limit:
        return np.uint64(0), limit + 1
    word = _load(data, at >> 3) >> np.uint64(at & 7)
    return word & ((np.uint64(1) << np.uint64(bits)) - np.uint64(1)), at + bits


@njit(nogil=True, cache=True)
def _get_rice(data, at, limit, k):
    if at >= limit:
        return np.uint64(0), limit + 1
    word = _load(data, at >> 3) >> np.uint64(at & 7)
    q = _lowest(~word)
    if q < MAX_QUOTIENT:
        low = (word >> np.uint64(q + 1)) & ((np.uint64(1) << np.uint64(k)) - np.uint64(1))
        at += q + 1 + k
        if at > limit:
            return np.uint64(0), limit + 1
        return (np.uint64(q) << np.uint64(k)) | low, at
    bits, at = _get(data, at + MAX_QUOTIENT, limit, 6)
    count = np.int64(bits) + 1
    value, at = _get(data, at, limit, min(count, 32))
    if count > 32:
        high, at = _get(data, at, limit, count - 32)
        value |= high << np.uint64(32)
    return value, at


@njit(nogil=True, cache=True)
def _get_golomb(data, at, limit, g):
    if g & 1 == 0 or at >= limit:
        return _get_rice(data, at, limit, g >> 1)
    word = _load(data, at >> 3) >> np.uint64(at & 7)
    q = _lowest(~word)
    if q >= MAX_QUOTIENT:
        return _get_rice(data, at, limit, 0)
    k = g >> 1
    word >>= np.uint64(q + 1)
    third, bits = np.uint64(0), np.int64(1)
    if word & np.uint64(1):
        third, bits = np.uint64(1) + ((word >> np.uint64(1)) & np.uint64(1)), np.int64(2)
    low = (word >> np.uint64(bits)) & ((np.uint64(1) << np.uint64(k)) - np.uint64(1))
    at += q + 1 + bits + k
    if at > limit:
        return np.uint64(0), limit + 1
    return ((np.uint64(q) * np.uint64(3) + third) << np.uint64(k)) | low, at


@njit(nogil=True, cache=True)
def parse(data, start, end, words, classes, table, first, bounds, rank, delta):
    """Read one block's events into `rank[first:]` and `delta[first:]`, class after class.

    Returns their number or MALFORMED. `data` has at least 8 bytes after `end`. A rank is below
    `words`, ranks ascend within a class, and the bytes are used up to the last.
    """
    at, limit = start * 8, end * 8
    room = rank.size - first
    found, small = 0, np.int64(-1)
    for k in range(classes):
        bounds[k] = first + found
        number, at = _get_rice(data, at, limit, np.int64(table[k, 4]))
        if at > limit or number > np.uint64(room - found):
            return MALFORMED
        kg, kz = np.int64(table[k, 0]), np.int64(table[k, 1])
        kr, km = np.int64(table[k, 2]), np.int64(table[k, 3])
        before, zeros = np.int64(-1), np.int64(-1)
        for _ in range(np.int64(number)):
            gap = np.uint64(0)
            if kz == NO_RUNS:
                gap, at = _get_golomb(data, at, limit, kg)
            else:
                if zeros < 0:
                    value, at = _get_rice(data, at, limit, kz)
                    zeros = np.int64(min(value, np.uint64(words)))
                if zeros == 0:
                    gap, at = _get_golomb(data, at, limit, kg)
                    if gap >= np.uint64(words):
                        return MALFORMED
                    gap += np.uint64(1)
                zeros -= 1
            if at > limit or gap >= np.uint64(words):
                return MALFORMED
            before += np.int64(gap) + 1
            if before >= words:
                return MALFORMED
            if small < 0:
                value, at = _get_rice(data, at, limit, kr)
                small = np.int64(min(value, np.uint64(words)))
            size = np.uint64(1)
            if small == 0:
                size, at = _get_rice(data, at, limit, km)
                size += np.uint64(2)
            small -= 1
            sign, at = _get(data, at, limit, 1)
            if at > limit:
                return MALFORMED
            rank[first + found] = before
            delta[first + found] = np.uint64(0) - size if sign else size
            found += 1
    for k in range(classes, 257):
        bounds[k] = first + found
    if (at + 7) >> 3 != end:
        return MALFORMED
    if at & 7 and np.uint64(data[end - 1]) >> np.uint64(at & 7):
        return MALFORMED
    return found


@njit(nogil=True, cache=True)
def _select(mask, rank):
    """Index of the set bit that has `rank` set bits below it, without a branch to guess."""
    at = np.uint64(0)
    for step in (32, 16, 8, 4, 2, 1):
        below = _ones((mask >> at) & ((np.uint64(1) << np.uint64(step)) - np.uint64(1)))
        over = rank >= below
        rank -= below if over else 0
        at += np.uint64(step if over else 0)
    return np.int64(at)


@njit(nogil=True, cache=True)
def locate(words, lo, hi, shift, mask, first, last, cut, bounds, rank, place):
    """Turn the ranks of one block's events into positions in `place`; writes no word.

    Returns 0, or MALFORMED where a class has fewer words than its events ask for.
    """
    classes = np.empty(64, np.uint8)
    following = bounds[:256].copy()
    left = np.full(256, NEVER, np.int64)  # words of the class before its next event
    for k in range(np.int64(last) + 1):
        if bounds[k] < bounds[k + 1]:
            left[k] = rank[bounds[k]]
    whole = lo + (hi - lo) // 64 * 64
    for at in range(lo, whole, 64):
        _classes(words, at, shift, mask, first, last, classes)
        rare = _below(classes, np.uint8(cut))
        while rare != 0:
            bit = _lowest(rare)
            rare &= rare - np.uint64(1)
            k = classes[bit]
            if left[k] == 0:
                left[k] += _hit(np.int64(k), at + bit, following, bounds, rank, place)
            left[k] -= 1
        hit = np.int64(0)
        for k in range(np.uint64(cut), np.uint64(last) + np.uint64(1)):
            left[k] -= _ones(_equal(classes, np.uint8(k)))
            hit |= left[k]
        if hit >= 0:
            continue
        for k in range(np.uint64(cut), np.uint64(last) + np.uint64(1)):
            if left[k] < 0:
                same = _equal(classes, np.uint8(k))
                total = _ones(same)
                while left[k] < 0:
                    bit = _select(same, left[k] + total)
                    left[k] += _hit(np.int64(k), at + bit, following, bounds, rank, place)
    for at in range(whole, hi):
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
def add(words, place, delta, bits):
    """`words[place] += delta`, modulo the width. Every place was formed by `locate`."""
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1) if bits < 64 else ~np.uint64(0)
    for j in range(place.size):
        i = place[j]
        words[i] = (np.uint64(words[i]) + delta[j]) & mask
