"""A store whose objects come from a relay nearby, for as long as it gives the right ones.

    get objects/<digest>    the relay; its bytes are hashed before anybody uses them, and when
                            they are others, or there are none, the store itself is read
    anything else           the store itself: what is newest, who is alive and what the trainer
                            has read changes, and only the store knows

So a relay needs no trust, and its end costs nobody anything but the line:

    what the relay does                            the reader           asks it again after
    gives the object                               uses it              -
    does not have it, or not one of that size      reads the store      -
    does not answer, breaks off, takes too long    reads the store      5 s, doubled up to 60 s
    refuses the token                              reads the store      5 min
    gives other bytes                              reads the store      5 min

Each change is told once, in a line for people. Refuses redirects, an answer longer than was asked
for before it is read, and to wait for longer than the object's size explains.
"""

import contextlib
import http.client
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from blake3 import blake3

from farcast.errors import ConfigError
from farcast.lineage import OBJECTS_PREFIX
from farcast.store.base import ObjectInfo, Store
from farcast.store.keys import check_key

CONNECT_SECONDS = 2.0
"""A relay is near; one that takes longer is not there."""

STALL_SECONDS = 25.0
"""Silence after which a relay is taken to be gone. One that still fetches says so every ten."""

PATIENCE_SECONDS = 30.0
SLOWEST_RATE = 1e6
"""Bytes a second. Over a line that is slower than this a relay is not waited for."""

KEPT_SECONDS = 30.0
"""An idle connection is used again for so long; a relay keeps it for 75 s."""

AWAY_SECONDS = 5.0
LONGEST_AWAY_SECONDS = 60.0
DISTRUST_SECONDS = 300.0

_ANSWER_BYTES = 4096
_OBJECT_KEY = re.compile(rf"{OBJECTS_PREFIX}([0-9a-f]{{64}})")

Trouble = Literal["absent", "away", "refuses", "lies"]


@dataclass(frozen=True, kw_only=True)
class RelayAddress:
    """Where a relay answers, and the header `Authorization` that it asks for."""

    url: str
    authorization: str = field(repr=False)

    def __post_init__(self) -> None:
        wrong = ConfigError("A relay's address is http://HOST:PORT, without anything more.")
        try:
            parts = urlsplit(self.url)
            _ = parts.port
        except ValueError:  # brackets that do not close, a port that is none
            raise wrong from None
        extra = parts.username or parts.password or parts.path.strip("/") or parts.query
        if parts.scheme not in ("http", "https") or not parts.hostname or extra or parts.fragment:
            raise wrong

    def connection(self) -> http.client.HTTPConnection:
        """A connection that is still to be made."""
        parts = urlsplit(self.url)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        return kind(parts.hostname or "", parts.port, timeout=CONNECT_SECONDS)


class RelayTroubleError(Exception):
    """The relay did not give the object."""

    def __init__(self, kind: Trouble, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class RelayClient:
    """Asks one relay for objects. Safe to use from several threads."""

    def __init__(self, address: RelayAddress) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []

    def fetch(self, digest: str, *, max_bytes: int) -> bytes:
        """The object, hashed. Raises `RelayTroubleError`."""
        until = time.monotonic() + PATIENCE_SECONDS + max_bytes / SLOWEST_RATE
        while True:
            seconds = until - time.monotonic()
            if seconds <= 0:
                raise RelayTroubleError("away", "takes too long")
            status, data = self._ask(f"/{OBJECTS_PREFIX}{digest}", max_bytes, seconds)
            if status != http.client.ACCEPTED:
                break
            time.sleep(0.1)  # it is on its way there
        if status == http.client.OK:
            if blake3(data).hexdigest() != digest:
                raise RelayTroubleError("lies", f"gave other bytes than {digest[:12]} names")
            return data
        if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            raise RelayTroubleError("refuses", "does not take the token")
        if status in (http.client.NOT_FOUND, http.client.REQUEST_ENTITY_TOO_LARGE):
            raise RelayTroubleError("absent", "does not have it")
        raise RelayTroubleError("away", f"answers with status {status}")

    def _ask(self, path: str, max_bytes: int, seconds: float) -> tuple[int, bytes]:
        try:
            kept = self._kept()
            if kept is not None:
                with contextlib.suppress(ConnectionError, http.client.BadStatusLine):
                    return self._ask_over(kept, path, max_bytes, seconds)
                # It was closed on the other side meanwhile: nothing was begun.
            return self._ask_over(self._address.connection(), path, max_bytes, seconds)
        except (OSError, http.client.HTTPException) as error:
            raise RelayTroubleError("away", f"does not answer ({type(error).__name__})") from error

    def _ask_over(
        self, connection: http.client.HTTPConnection, path: str, max_bytes: int, seconds: float
    ) -> tuple[int, bytes]:
        """One request. Whatever the other side does, it ends after `seconds`."""
        try:
            if connection.sock is None:
                connection.connect()
            line = connection.sock
            line.settimeout(STALL_SECONDS)
            watchdog = threading.Timer(seconds, _cut, [line])
            watchdog.daemon = True
            watchdog.start()
            try:
                headers = {"Authorization": self._address.authorization}
                connection.request("GET", path, headers=headers)
                response = connection.getresponse()
                data = _body(response, max_bytes)
            finally:
                watchdog.cancel()
        except BaseException:
            connection.close()
            raise
        if response.will_close:
            connection.close()
        else:
            with self._lock:
                self._idle.append((connection, time.monotonic()))
        return response.status, data

    def _kept(self) -> http.client.HTTPConnection | None:
        with self._lock:
            while self._idle:
                connection, used = self._idle.pop()
                if time.monotonic() - used < KEPT_SECONDS:
                    return connection
                connection.close()
        return None


class RelayedStore:
    """`store`, with its objects from the relay at `address`. `tell` gets a line for people."""

    def __init__(
        self,
        store: Store,
        address: RelayAddress,
        *,
        tell: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._address = address
        self._client = RelayClient(address)
        self._tell = tell
        self._clock = clock
        self._lock = threading.Lock()
        self._trouble: Trouble | None = None
        self._ask_from = 0.0
        self._pause = 0.0
        self._bytes = 0

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def bytes_relayed(self) -> int:
        """What came from the relay and was right."""
        with self._lock:
            return self._bytes

    def __repr__(self) -> str:
        return f"RelayedStore({self._store!r}, {self._address.url!r})"

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        self._store.put(key, data, if_absent=if_absent)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        check_key(key)
        named = _OBJECT_KEY.fullmatch(key)
        found = None if named is None else self._from_relay(named[1], max_bytes)
        return self._store.get(key, max_bytes=max_bytes) if found is None else found

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """From the store: a part of an object has no digest to check it by."""
        return self._store.get_range(key, start, length)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        return self._store.list(prefix, start_after=start_after)

    def delete(self, key: str) -> None:
        self._store.delete(key)

    # --- inside ------------------------------------------------------------------------------

    def _from_relay(self, digest: str, max_bytes: int) -> bytes | None:
        with self._lock:
            if self._clock() < self._ask_from:
                return None
        try:
            data = self._client.fetch(digest, max_bytes=max_bytes)
        except RelayTroubleError as trouble:
            if trouble.kind != "absent":
                self._note(trouble)
            return None
        with self._lock:
            self._bytes += len(data)
            again, self._trouble, self._pause = self._trouble, None, 0.0
        if again is not None:
            self._tell(f"the relay {self._address.url} gives objects again")
        return data

    def _note(self, trouble: RelayTroubleError) -> None:
        """Leave the relay alone for a while, and say so where it is news."""
        with self._lock:
            news = self._trouble != trouble.kind
            self._trouble = trouble.kind
            if trouble.kind == "away":
                longest = min(2 * self._pause, LONGEST_AWAY_SECONDS)
                if self._clock() >= self._ask_from:  # not for each of several threads at once
                    self._pause = max(AWAY_SECONDS, longest)
            else:
                self._pause = DISTRUST_SECONDS
            self._ask_from = max(self._ask_from, self._clock() + self._pause)
            pause = self._pause
        if news:
            self._tell(
                f"the relay {self._address.url} {trouble}; objects come from the store itself, "
                f"and it is asked again in {pause:.0f} s"
            )


def _body(response: http.client.HTTPResponse, max_bytes: int) -> bytes:
    if response.status != http.client.OK:
        said = response.read(_ANSWER_BYTES)
        if response.read(1):
            raise http.client.HTTPException("too long a refusal")
        return said
    if response.length is None or response.length > max_bytes:
        raise RelayTroubleError("lies", "gave more bytes than the object has")
    return response.read()


def _cut(line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
