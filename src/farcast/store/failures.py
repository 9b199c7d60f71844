"""Foreign errors become farcast's here, and nowhere else.

Two sources: the operating system (`file://`) and obstore (everything else). Their own texts
are never repeated, since they hold signed URLs, tokens and request headers; only a kind is
kept of them ("ENOSPC", "403 AccessDenied").
"""

import contextlib
import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass

from farcast.errors import (
    FarcastError,
    IntegrityError,
    InvalidKeyError,
    LimitError,
    ObjectNotFoundError,
    StoreAccessError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    StoreUnsupportedError,
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


def no_bucket(place: "Place") -> StoreAccessError:
    return StoreAccessError(
        f"The bucket or container of {place} does not exist; create it or correct the URL."
    )


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


@dataclass(frozen=True)
class Place:
    """Where a remote store is, for messages: its URL without secrets, its endpoint if it is not
    the provider's own, and whether puts carry the extra checksum headers."""

    url: str
    endpoint: str = ""
    checksums: bool = False

    def __str__(self) -> str:
        return f"{self.url} at {self.endpoint}" if self.endpoint else self.url


_STATUS = re.compile(r"status code: (\d{3})\b")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_NO_BUCKET = re.compile(
    r"NoSuchBucket|ContainerNotFound|ContainerBeingDeleted|specified bucket does not exist"
)
_NO_CREDENTIALS = re.compile(
    r"169\.254\.169\.254|metadata\.google\.internal|[Cc]redential provider|application_default"
)
_REFUSED_CREDENTIALS = re.compile(
    r"ExpiredToken|InvalidAccessKeyId|InvalidToken|TokenRefreshRequired|SignatureDoesNotMatch"
    r"|RequestTimeTooSkewed|AuthenticationFailed|InvalidClientTokenId|RequestExpired"
)
_WRONG_REGION = re.compile(
    r"AuthorizationHeaderMalformed|PermanentRedirect|redirect without LOCATION"
)
_FULL_CODES = re.compile(r"QuotaExceeded|StorageFull|InsufficientStorage|NoSpaceLeft")

_PAST_THE_END = re.compile(r"Wanted range starting at|StartTooLarge")
_BROKE_OFF = re.compile(r"kind: (Interrupted|Timeout|Unknown|Decode)\b")

_CHECKSUM_HINT = (
    " An older server may refuse the extra checksum headers: if so, set checksum='when_required'."
)


def status_of(error: BaseException) -> int | None:
    """The HTTP status in what obstore raised, or None when there was no answer."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def broke_off(error: BaseException) -> bool:
    """Whether the request may have arrived, got no answer, and was not tried again."""
    text = str(error)
    return status_of(error) is None and bool(_BROKE_OFF.search(text)) and "retries," not in text


def from_obstore_error(error: Exception, place: Place, key: str) -> FarcastError:
    """The farcast error for what obstore raised about `key`; holds none of its text."""
    text, status = str(error), status_of(error)
    code = _CODE.search(text)
    answer = " ".join(filter(None, [str(status or ""), code[1] if code else ""]))
    if _NO_BUCKET.search(text):
        return no_bucket(place)
    if isinstance(error, FileNotFoundError):
        return not_found(place.url, key)
    if status == 416 or _PAST_THE_END.search(text):
        return IntegrityError(
            f"The object {key!r} in {place} is shorter than what was asked of it; "
            "fetch it from another source."
        )
    if status == 507 or _FULL_CODES.search(text):
        return StoreFullError(
            f"No space or quota is left in {place} ({answer}) and {key!r} was not written; "
            "free some and start again."
        )
    if _WRONG_REGION.search(text):
        return StoreAccessError(
            f"{place} is not in the region that was asked ({answer}); set the option region."
        )
    if status in (401, 403) or _REFUSED_CREDENTIALS.search(text) or _NO_CREDENTIALS.search(text):
        return _access_error(text, place, key, answer)
    if status is None or status >= 500 or status in (408, 425, 429):
        return _unavailable(status, place, key, answer)
    return StoreUnsupportedError(
        f"{place} refuses a request for {key!r} ({answer}); check that it is an object store "
        f"of this kind.{_CHECKSUM_HINT if place.checksums else ''}"
    )


def _access_error(text: str, place: Place, key: str, answer: str) -> StoreAccessError:
    if _NO_CREDENTIALS.search(text):
        return StoreAccessError(
            f"No usable credentials were found for {place}; set them in the environment or as "
            "options, or look why the credential provider failed."
        )
    if "RequestTimeTooSkewed" in text:
        return StoreAccessError(
            f"{place} refuses a request because this machine's clock is off; set the clock."
        )
    return StoreAccessError(
        f"{place} refuses these credentials for {key!r} ({answer}); check the key, its expiry "
        "and its permissions (S3 says this of an absent object too, when listing is not allowed)."
        f"{_CHECKSUM_HINT if place.checksums else ''}"
    )


def _unavailable(status: int | None, place: Place, key: str, answer: str) -> StoreError:
    if status is None:
        return StoreUnavailableError(
            f"{place} cannot be reached or broke off at {key!r}; check address and network, "
            "then try again."
        )
    if status == 501:
        return StoreUnsupportedError(
            f"{place} does not implement a request that farcast needs ({answer} at {key!r})."
            f"{_CHECKSUM_HINT if place.checksums else ' Use another store.'}"
        )
    return StoreUnavailableError(
        f"{place} answers {answer} at {key!r} after several tries; try again later."
    )
