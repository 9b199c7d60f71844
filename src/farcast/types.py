"""The words every layer shares. No I/O, no engine, no framework.

`VersionRef` names what produced a token; `TensorEntry` what one served tensor is;
`PolicySpan` which version wrote which tokens.
"""

import re
from typing import Annotated

import msgspec

Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
"""BLAKE3-256 as 64 lower-case hex digits."""

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]
"""A run, worker or replica id. It becomes part of a store key, so it can hold no separator."""

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

MAX_VERSION = 10**12 - 1
"""Keys write versions with twelve digits, so that lists sort by number."""


class VersionRef(msgspec.Struct, frozen=True, order=True):
    """One policy version: `root` is the digest over all served tensors."""

    run_id: Name
    version: Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)]
    root: Digest

    def __str__(self) -> str:
        return f"{self.run_id}@{self.version}({self.root[:12]})"


class TensorEntry(msgspec.Struct, frozen=True):
    """What one served tensor is. `dtype` is written as safetensors writes it ("BF16", "F8_E4M3").

    `digest` is BLAKE3 of the raw bits, little endian, C order.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: Digest


class PolicySpan(msgspec.Struct, frozen=True):
    """Tokens `start <= i < end` of a completion were written by `version` with `root`."""

    start: Annotated[int, msgspec.Meta(ge=0)]
    end: Annotated[int, msgspec.Meta(ge=0)]
    version: Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)]
    root: Digest
