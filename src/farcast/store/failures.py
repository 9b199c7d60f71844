"""Foreign errors become farcast's here, and nowhere else.

Two sources: the operating system (`file://`) and obstore (everything else). Their own texts
are never repeated, since they hold signed URLs, tokens and request headers; the original
stays attached only as a kind ("errno ENOSPC", "status 403").
"""

import contextlib
import errno
from collections.abc import Iterator

from farcast.errors import (
    IntegrityError,
    InvalidKeyError,
    LimitError,
    ObjectNotFoundError,
    StoreAccessError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}


def over_limit(key: str, size: int, max_bytes: int) -> LimitError:
    return LimitError(
        f"The object {key!r} has {size} bytes where at most {max_bytes} are expected; "
        "it was not read. Check who wrote it."
    )


def short_read(key: str, start: int, length: int, got: int) -> IntegrityError:
    return IntegrityError(
        f"The object {key!r} gave {got} of the {length} bytes asked for from {start}; "
        "it is shorter than its description says. Fetch it from another source."
    )


def not_found(url: str, key: str) -> ObjectNotFoundError:
    return ObjectNotFoundError(f"{url} has no object {key!r}.")


@contextlib.contextmanager
def translated_os_errors(url: str, key: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise from_os_error(error, url, key) from None


def from_os_error(error: OSError, url: str, key: str) -> StoreError:
    """The farcast error for what the operating system said about `key` in `url`."""
    code = error.errno or 0
    name = errno.errorcode.get(code, "unknown")
    if code == errno.ENOENT:
        return not_found(url, key)
    if code in _FULL:
        return StoreFullError(
            f"No space or quota is left in {url} ({name}) and {key!r} was not written; "
            "free some and start again."
        )
    if code in _DENIED:
        return StoreAccessError(
            f"The store {url} may not be used by this user ({name} at {key!r}); "
            "check its owner and permissions."
        )
    if code == errno.ELOOP:
        return StoreAccessError(
            f"{key!r} in {url} goes through a symbolic link, which is not followed; "
            "remove the link or point the store at its target."
        )
    if code in (errno.ENOTDIR, errno.EISDIR):
        return InvalidKeyError(
            f"{key!r} in {url} would be both an object and a folder; choose another key."
        )
    return StoreUnavailableError(
        f"The store {url} failed at {key!r} with {name}; check the disk and try again."
    )
