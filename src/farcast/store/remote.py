"""`s3://`, `gs://` and `az://`: a bucket and a prefix, over obstore.

obstore speaks the protocols, signs and repeats what its own rules call repeatable (5xx, 429,
connections that broke), each bounded. Added here: keys below a prefix, limits before a body is
read, lists checked to be in order, one translation of errors, renewed credentials, and what a
409 to a conditional create means.

Refuses to emulate a conditional create, and to send anything over plain HTTP except to this
machine unless told to.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError

from farcast.errors import (
    FarcastError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreAccessError,
    StoreUnavailableError,
    StoreUnsupportedError,
)
from farcast.store.base import ObjectInfo
from farcast.store.buffers import byte_view
from farcast.store.failures import (
    Place,
    broke_off,
    from_obstore_error,
    no_bucket,
    over_limit,
    short_read,
    status_of,
)
from farcast.store.keys import SEGMENT_PATTERN, check_key, check_prefix, check_range
from farcast.store.listing import early_offset, in_key_order

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

Use = Literal["small", "download", "upload"]
Outcome = Literal["created", "taken", "conflict", "unknown"]

SMALL_BYTES = 8 << 20
"""A put up to this size must end within the request time limit."""

PART_BYTES = 16 << 20
"""Parts of a large put: S3 takes at most 10,000, so this reaches 160 GB."""

BULK_SECONDS = 3600.0
"""Time limit of a request that carries a large body: 4 GiB at 10 Mbit/s take 57 minutes."""

FOREIGN_ERRORS = (BaseError, OSError, ValueError, NotImplementedError)
"""What obstore raises; anything else is a fault in this program and is not hidden."""

_T = TypeVar("_T")

Connect = Callable[["ClientConfig", "RetryConfig"], "ObjectStore"]


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to try. `retries` is per request; `timeout` bounds one small request, and the
    silence within a download."""

    retries: int = 4
    timeout: float = 60.0

    def retry_config(self) -> "RetryConfig":
        return {
            "max_retries": self.retries,
            "retry_timeout": timedelta(seconds=self.timeout),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=5),
                "base": 2,
            },
        }

    def client_config(self, use: Use, *, allow_http: bool) -> "ClientConfig":
        limit = self.timeout if use == "small" else max(self.timeout, BULK_SECONDS)
        config: ClientConfig = {
            "allow_http": allow_http,
            "connect_timeout": timedelta(seconds=min(5.0, self.timeout)),
            "timeout": timedelta(seconds=limit),
        }
        if use == "download":
            config["read_timeout"] = timedelta(seconds=self.timeout)
        return config


class _Connections:
    """obstore handles by use, made on first use and remade when credentials are renewed.

    A handle keeps its credentials for as long as they claim to live; a store that refuses
    them earlier needs a new handle.
    """

    def __init__(self, connect: Connect, patience: Patience, *, allow_http: bool) -> None:
        self._connect = connect
        self._patience = patience
        self._allow_http = allow_http
        self._lock = threading.Lock()
        self._handles: dict[Use, ObjectStore] = {}
        self._generation = 0

    def get(self, use: Use) -> tuple["ObjectStore", int]:
        with self._lock:
            if use not in self._handles:
                self._handles[use] = self._connect(
                    self._patience.client_config(use, allow_http=self._allow_http),
                    self._patience.retry_config(),
                )
            return self._handles[use], self._generation

    def renew(self, generation: int) -> None:
        """Forget the handles, unless another thread already did since `generation`."""
        with self._lock:
            if generation == self._generation:
                self._handles.clear()
                self._generation += 1


class RemoteStore:
    """A bucket's prefix. Made by `farcast.store.options.open_remote`.

    `tree_lists`: the server may list folder by folder instead of by key.
    """

    def __init__(
        self,
        place: Place,
        prefix: str,
        connect: Connect,
        *,
        patience: Patience,
        allow_http: bool,
        renewable: bool,
        tree_lists: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._place = place
        self._prefix = f"{prefix}/" if prefix else ""
        self._connections = _Connections(connect, patience, allow_http=allow_http)
        self._retries = patience.retries
        self._renewable = renewable
        self._tree_lists = tree_lists
        self._sleep = sleep

    @property
    def url(self) -> str:
        return self._place.url

    def __repr__(self) -> str:
        return f"RemoteStore({self.url!r})"

    def check_settings(self) -> None:
        """Build a connection without using it. Raises what obstore raises for bad settings."""
        self._connections.get("small")

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        path = self._path(key)
        view = byte_view(data)
        use: Use = "small" if view.nbytes <= SMALL_BYTES else "upload"
        if if_absent:
            self._create(path, key, view, use)
        else:
            self._call(
                use, key, lambda store: obstore.put(store, path, view, chunk_size=PART_BYTES)
            )

    def get(self, key: str, *, max_bytes: int) -> bytes:
        path = self._path(key)

        def read(store: "ObjectStore") -> bytes:
            result = obstore.get(store, path)
            size = result.meta["size"]
            if size > max_bytes:
                raise over_limit(key, size, max_bytes)
            data = result.bytes().to_bytes()
            if len(data) != size:
                raise short_read(key, 0, size, len(data))
            return data

        return self._read("download", key, read)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        path = self._path(key)
        if length == 0:
            return b""

        def read(store: "ObjectStore") -> bytes:
            result = obstore.get(store, path, options={"range": (start, start + length)})
            first, end = result.range
            if (first, end) != (start, start + length):
                raise short_read(key, start, length, max(0, end - start))
            data = result.bytes().to_bytes()
            if len(data) != length:
                raise short_read(key, start, length, len(data))
            return data

        return self._read("download", key, read)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        if start_after is not None:
            check_key(start_after)
        return self._list(prefix, start_after or "")

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            self._read("small", key, lambda store: obstore.delete(store, path))
        except ObjectNotFoundError:
            return

    def _path(self, key: str) -> str:
        check_key(key)
        return self._prefix + key

    def _create(self, path: str, key: str, view: memoryview, use: Use) -> None:
        """Create `path`, or raise ObjectExistsError because it is there.

        412 is final: the key is taken. 409 only says that something else was going on at the
        key; S3 answers it with nothing stored, Azure when the blob exists. So a 409 is final
        only if the object can be seen, and is tried again otherwise. So is a request whose
        answer was lost, which obstore leaves alone: if it had arrived, the next try is "taken".
        """

        def create(store: "ObjectStore") -> Outcome:
            try:
                obstore.put(store, path, view, mode="create")
            except AlreadyExistsError as error:
                return "conflict" if status_of(error) == 409 else "taken"
            except BaseError as error:
                if broke_off(error):
                    return "unknown"
                raise
            return "created"

        for attempt in range(self._retries + 1):
            outcome = self._call(use, key, create)
            if outcome == "created":
                return
            if outcome == "taken" or (outcome == "conflict" and self._exists(path, key)):
                raise ObjectExistsError(f"{self.url} already has an object {key!r}.")
            self._sleep(random.uniform(0, min(5.0, 0.1 * 2**attempt)))
        raise StoreUnavailableError(
            f"{self.url} did not settle a create of {key!r} in {self._retries + 1} tries "
            "(conflicts, or answers lost); try again later."
        )

    def _exists(self, path: str, key: str) -> bool:
        try:
            self._read("small", key, lambda store: obstore.head(store, path))
        except ObjectNotFoundError:
            return False
        return True

    def _list(self, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        offset = early_offset(prefix, start_after) if self._tree_lists else start_after or None
        listing = self._listing(prefix, offset)
        last = start_after
        for info in in_key_order(listing, prefix) if self._tree_lists else listing:
            if info.key <= start_after:
                continue
            if info.key <= last:
                raise StoreUnsupportedError(
                    f"{self.url} lists keys out of order ({info.key!r} after {last!r}); "
                    "use a bucket whose lists are sorted (not an S3 directory bucket)."
                )
            last = info.key
            yield info

    def _listing(self, prefix: str, offset: str | None) -> Iterator[ObjectInfo]:
        """Keys below `prefix` in the server's order. Credentials refused between two pages are
        renewed, and the list goes on after the last key that was given."""
        renewed = False
        while True:
            _, generation = self._connections.get("small")
            try:
                for info in self._pages(prefix, offset):
                    yield info
                    offset, renewed = info.key, False
                return
            except StoreAccessError:
                if renewed or not self._renewable:
                    raise
            self._connections.renew(generation)
            renewed = True

    def _pages(self, prefix: str, offset: str | None) -> Iterator[ObjectInfo]:
        below = self._prefix + prefix
        store, _ = self._connections.get("small")
        stream = obstore.list(
            store,
            below.rstrip("/") or None,
            offset=None if offset is None else self._prefix + offset,
            chunk_size=1000,
        )
        while True:
            try:
                page = self._translated(prefix, lambda: next(stream, None))
            except ObjectNotFoundError:
                raise no_bucket(self._place) from None
            if page is None:
                return
            for meta in page:
                key = meta["path"].removeprefix(self._prefix)
                if meta["path"].startswith(below) and _is_key(key):
                    yield ObjectInfo(key, meta["size"], meta["last_modified"].timestamp())

    def _call(self, use: Use, key: str, action: Callable[["ObjectStore"], _T]) -> _T:
        """Run a request that no absent object can fail: "not found" means the bucket."""
        try:
            return self._read(use, key, action)
        except ObjectNotFoundError:
            raise no_bucket(self._place) from None

    def _read(self, use: Use, key: str, action: Callable[["ObjectStore"], _T]) -> _T:
        """Run one request. Refused credentials are renewed once, if there is a way to."""
        store, generation = self._connections.get(use)
        try:
            return self._translated(key, lambda: action(store))
        except StoreAccessError:
            if not self._renewable:
                raise
        self._connections.renew(generation)
        store, _ = self._connections.get(use)
        return self._translated(key, lambda: action(store))

    def _translated(self, key: str, action: Callable[[], _T]) -> _T:
        failure: FarcastError | None = None
        try:
            return action()
        except FOREIGN_ERRORS as error:
            failure = from_obstore_error(error, self._place, key)
        # Raised out here so that obstore's own text, which may hold a signed URL, is not
        # chained to it.
        raise failure


def _is_key(key: str) -> bool:
    return all(SEGMENT_PATTERN.fullmatch(segment) for segment in key.split("/"))
