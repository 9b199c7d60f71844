"""Which keys exist at all. Checked before any I/O, the same for every backend.

A key is `segment("/" segment)*`. Segments hold letters, digits and `_ . = + @ -` and begin
with a letter, a digit or `_`, so that no key can climb out of a prefix, name a drive, hide
a file, or mean different things to different stores (percent-encoding, Unicode forms).
Refuses everything else with `InvalidKeyError`; never repairs a key.
"""

import re

from farcast.errors import InvalidKeyError, LimitError

MAX_KEY_BYTES = 1024
"""S3's limit on a whole key; the other stores allow at least as much."""

MAX_SEGMENT_BYTES = 255
"""What common file systems allow for one name."""

SEGMENT_PATTERN = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.=+@-]{{0,{MAX_SEGMENT_BYTES - 1}}}")


def check_key(key: str) -> list[str]:
    """The key's segments, or `InvalidKeyError`."""
    if not isinstance(key, str) or len(key) > MAX_KEY_BYTES:
        raise InvalidKeyError(
            f"A store key is text of at most {MAX_KEY_BYTES} bytes, not {_shown(key)}; shorten it."
        )
    segments = key.split("/")
    if not all(SEGMENT_PATTERN.fullmatch(segment) for segment in segments):
        raise InvalidKeyError(
            f"{_shown(key)} is not a store key; use segments of letters, digits and _ . = + @ - "
            f"(at most {MAX_SEGMENT_BYTES} each, none beginning with a dot) joined by '/'."
        )
    return segments


def check_prefix(prefix: str) -> list[str]:
    """The segments of a key prefix, which is "" or ends in "/"."""
    if prefix == "":
        return []
    if not isinstance(prefix, str) or not prefix.endswith("/"):
        raise InvalidKeyError(f"{_shown(prefix)} is not a key prefix; it must end in '/'.")
    return check_key(prefix[:-1])


def check_range(start: int, length: int) -> None:
    """Refuse a range that no object has, before a request is made for it."""
    if start < 0 or length < 0:
        raise LimitError(
            f"The range of {length} bytes from {start} is not one; neither may be negative."
        )


def _shown(key: object) -> str:
    text = repr(key)
    return text if len(text) <= 80 else text[:77] + "..."
