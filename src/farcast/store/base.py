"""The five calls farcast needs of an object store, and nothing more.

Refuses: renames, locks, directory semantics, compare-then-write. `put(if_absent=True)`
is the one conditional call; every commit in farcast rests on it, so a backend that cannot
do it natively raises `StoreUnsupportedError` instead of emulating it.

Keys follow `farcast.store.keys`, and a key is a leaf: nobody uses both "a" and "a/b", since
folders and some servers keep objects in a tree and cannot hold both.

Errors: every method raises only subclasses of `farcast.errors.StoreError`.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable


class ObjectInfo(NamedTuple):
    """One listed object: full key, size in bytes, last change in seconds since the epoch
    by the store's clock."""

    key: str
    size: int
    modified: float


@runtime_checkable
class Store(Protocol):
    """An object store, or a prefix of one. Safe to use from several threads."""

    @property
    def url(self) -> str:
        """Where this store is, without credentials: fit for logs."""
        ...

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        """Write a whole object; durable on return.

        With `if_absent`, raises `ObjectExistsError` and changes nothing when the key is taken.
        After a lost reply a retry may report `ObjectExistsError` for the caller's own write:
        the caller compares contents.
        """
        ...

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Read a whole object. Raises `ObjectNotFoundError`, or `LimitError` before
        more than `max_bytes` were read."""
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Read exactly `length` bytes from `start`; fewer raises `IntegrityError`."""
        ...

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Objects whose keys begin with `prefix` (a key prefix ending in "/", or ""), in key
        order, lazily, strictly after `start_after` (a full key) if given."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; an absent one is no error."""
        ...
