"""Key order from servers that list folder by folder. Pure: listed objects in and out.

S3 promises lists in key order, where "a-b" < "a/c". Servers that keep objects in a file tree
(SeaweedFS) give "a/c" first, since they sort "a" before "a-b", and skip whole folders when
asked to start after a key. The two orders differ only where one name continues another with
a character below "/", so what must wait is one folder's objects at a time.
"""

from collections.abc import Iterator
from itertools import groupby

from farcast.store.base import ObjectInfo


def in_key_order(listing: Iterator[ObjectInfo], prefix: str) -> Iterator[ObjectInfo]:
    """Objects below `prefix`, listed in either order, in key order. Lazy where names are flat;
    a subfolder is held until a name is seen that cannot sort before it."""
    cut = len(prefix)
    held: list[tuple[str, list[ObjectInfo]]] = []
    for name, group in groupby(listing, key=lambda info: info.key[cut:].partition("/")[0]):
        objects = list(group)
        while held and not _may_precede(name, held[-1][0]):
            yield from held.pop()[1]
        if objects[0].key == prefix + name:
            yield objects.pop(0)
        if objects:
            held.append((name, list(in_key_order(iter(objects), f"{prefix}{name}/"))))
    while held:
        yield from held.pop()[1]


def early_offset(prefix: str, start_after: str) -> str | None:
    """A key from which either order gives everything that follows `start_after`, or None to
    list from the beginning. A few earlier objects may come as well."""
    name = start_after.removeprefix(prefix).partition("/")[0]
    if not start_after.startswith(prefix):
        return None
    ends = [position for position, char in enumerate(name) if char < "/"]
    # "a-b" follows folder "a" in a tree, yet "a/..." follows "a-b" as a key: stop before "a".
    stop = min([*ends, len(name)]) - 1
    return prefix + name[:stop] if stop > 0 else None


def _may_precede(name: str, folder: str) -> bool:
    """Whether `name`, which a tree lists after `folder`, comes before its objects as a key."""
    return name.startswith(folder) and name[len(folder) :] < "/"
