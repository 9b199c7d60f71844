"""Numbers as people read them. Pure."""

from collections.abc import Sequence
from itertools import pairwise

_BLOCKS = "▁▂▃▄▅▆▇█"


def human_bytes(count: float) -> str:
    """`1.5 MB`, with decimal prefixes as networks use them."""
    if abs(count) < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if abs(count) < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"


def human_count(count: float) -> str:
    """`850`, `12.3k`, `1.2M`."""
    if abs(count) < 10_000:
        return f"{count:.0f}"
    for unit in ("k", "M", "G"):
        count /= 1000
        if abs(count) < 1000:
            return f"{count:.1f}{unit}"
    return f"{count / 1000:.1f}T"


def human_age(seconds: float) -> str:
    """`30s`, `5m`, `2h`, `3d`: how long ago, at a glance."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def shortened(text: str, length: int) -> str:
    """Both ends of what is too long."""
    if len(text) <= length:
        return text
    head = (length - 1) // 2
    return f"{text[:head]}…{text[head + 1 - length :]}"


def human_seconds(seconds: float) -> str:
    """`850 ms`, `12.3 s`, `4:05`, `1:02:03`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def times(whole: float, part: float) -> str:
    """How many times `part` fits into `whole`: `312x`, or a dash when nothing was sent."""
    if part <= 0:
        return "-"
    factor = whole / part
    return f"{factor:.0f}x" if factor >= 100 else f"{factor:.1f}x"


def spark(values: Sequence[float], *, width: int = 32) -> str:
    """A line of blocks, one per value or per equal share of them, scaled to their own range."""
    if not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges) if b > a]
    low, high = min(values), max(values)
    if high == low:
        return _BLOCKS[3] * len(values)
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((value - low) / (high - low) * top)] for value in values)


def smooth(values: Sequence[float], *, window: int) -> list[float]:
    """The mean of up to `window` values ending at each one."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means


def signed(value: float | None) -> str:
    """A loss; None is one that was no finite number."""
    return "not finite" if value is None else f"{value:+.4f}"
