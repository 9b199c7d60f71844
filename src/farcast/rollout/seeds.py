"""Seeds that no other worker draws, the same on every machine."""

from blake3 import blake3

SEED_BITS = 31
"""Task sets and random generators differ in what they take; all take 31 bits."""


def seed_of(*parts: str | int) -> int:
    """A seed in [0, 2**31) from what names it, such as a worker, where it started, and a count."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(blake3(text.encode()).digest(4)) >> (32 - SEED_BITS)
