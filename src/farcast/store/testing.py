"""A store that misbehaves on request: the double that farcast's own tests use.

Wraps any store and keeps its contract except where a `Rule` says otherwise. A rule picks calls
by verb, key prefix and count, and names a fault:

    store = FaultStore(MemoryStore())
    store.add(Rule(LoseReply(), verb="put", prefix="versions/", nth=2))
    store.add(Rule(FlipBit(77), verb="get", prefix="objects/", times=None))

Deterministic: what happens depends only on the order of calls, never on a clock or chance.
Refuses nothing by itself.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from farcast.errors import ObjectNotFoundError, StoreUnavailableError
from farcast.store.base import ObjectInfo, Store
from farcast.store.buffers import byte_view
from farcast.store.failures import over_limit, short_read
from farcast.store.memory import MemoryStore

Verb = Literal["put", "get", "get_range", "list", "delete"]


class Crash(BaseException):
    """The process dies here. Not an `Exception`: no handler may survive it, as in life."""


@dataclass(frozen=True)
class Fail:
    """Raise before anything is done."""

    error: BaseException = field(default_factory=lambda: StoreUnavailableError("The test fails."))


@dataclass(frozen=True)
class LoseReply:
    """Do it, then raise: the request arrived, the answer did not."""

    error: BaseException = field(
        default_factory=lambda: StoreUnavailableError("The test lost the reply.")
    )


@dataclass(frozen=True)
class Delay:
    """Wait, then do it."""

    seconds: float


@dataclass(frozen=True)
class FlipBit:
    """Flip bit number `bit`, modulo the size, of what a get returns or a put stores."""

    bit: int


@dataclass(frozen=True)
class DropBytes:
    """Leave `length` bytes from `start` out of what a put stores or a get returns. A dropped
    put still lists under its full size."""

    start: int
    length: int


@dataclass(frozen=True)
class Stale:
    """Answer a read as of before the newest put of that key: the older content, or "not found".
    A stale list leaves out the key that was put last."""


@dataclass(frozen=True)
class Freeze:
    """Raise before acting, and on every later call too: the machine is gone."""

    error: BaseException = field(default_factory=Crash)


Fault = Fail | LoseReply | Delay | FlipBit | DropBytes | Stale | Freeze


class Call(NamedTuple):
    """One call, in the order of arrival; `number` counts from 1 over all verbs."""

    number: int
    verb: Verb
    key: str
    size: int = 0
    if_absent: bool = False


@dataclass(frozen=True)
class Rule:
    """`fault` meets the `nth` matching call (from 1, counted from when the rule was added) and
    the `times - 1` after it; `times=None` means from then on."""

    fault: Fault
    verb: Verb | None = None
    prefix: str = ""
    nth: int = 1
    times: int | None = 1

    def matches(self, call: Call) -> bool:
        return self.verb in (None, call.verb) and call.key.startswith(self.prefix)


class FaultStore:
    """`store`, with faults. Thread-safe; `calls` is the log."""

    def __init__(
        self,
        store: Store | None = None,
        *rules: Rule,
        decide: Callable[[Call], Fault | None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`decide`, if given, is asked about every call that no rule has met: for simulators."""
        self._store = MemoryStore() if store is None else store
        self._decide = decide
        self._sleep = sleep
        self._lock = threading.RLock()
        self._rules: list[tuple[Rule, list[int]]] = []
        self._calls: list[Call] = []
        self._previous: dict[str, bytes | None] = {}
        self._claimed: dict[str, int] = {}
        self._last_put = ""
        self.add(*rules)

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def inner(self) -> Store:
        """The store below, where a test looks at what is really there."""
        return self._store

    @property
    def calls(self) -> Sequence[Call]:
        with self._lock:
            return tuple(self._calls)

    def counts(self) -> dict[Verb, int]:
        """Calls so far, by verb."""
        totals: dict[Verb, int] = defaultdict(int)
        for call in self.calls:
            totals[call.verb] += 1
        return dict(totals)

    def add(self, *rules: Rule) -> None:
        with self._lock:
            self._rules.extend((rule, [0]) for rule in rules)

    def fail_call(self, number: int, fault: Fault | None = None) -> None:
        """Let the `number`-th call from now (from 1, any verb) meet `fault`; `Fail` if none."""
        self.add(Rule(Fail() if fault is None else fault, nth=number))

    def clear(self) -> None:
        """Drop all rules: the store behaves from now on. The log stays."""
        with self._lock:
            self._rules.clear()

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        view = byte_view(data)
        fault = self._begin("put", key, view.nbytes, if_absent)
        stored = _damaged(bytes(view), fault) if isinstance(fault, FlipBit | DropBytes) else view
        before = self._content(key)
        self._store.put(key, stored, if_absent=if_absent)
        with self._lock:
            self._previous[key] = before
            self._last_put = key
            self._claimed.pop(key, None)
            if isinstance(fault, DropBytes):
                self._claimed[key] = view.nbytes
        _end(fault)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        fault = self._begin("get", key)
        if isinstance(fault, Stale):
            data = self._older(key)
            if len(data) > max_bytes:
                raise over_limit(key, len(data), max_bytes)
        else:
            data = self._store.get(key, max_bytes=max_bytes)
        _end(fault)
        return _damaged(data, fault)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        fault = self._begin("get_range", key, length)
        if isinstance(fault, Stale):
            data = self._older(key)[start : start + length]
            if len(data) < length:
                raise short_read(key, start, length, len(data))
        else:
            data = self._store.get_range(key, start, length)
        _end(fault)
        return _damaged(data, fault)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Counted when it is called; a fault shows when it is read, as with a real store."""
        fault = self._choose("list", prefix)
        return self._listed(prefix, start_after, fault)

    def delete(self, key: str) -> None:
        fault = self._begin("delete", key)
        self._store.delete(key)
        with self._lock:
            self._claimed.pop(key, None)
        _end(fault)

    def _begin(self, verb: Verb, key: str, size: int = 0, if_absent: bool = False) -> Fault | None:
        fault = self._choose(verb, key, size, if_absent)
        self._strike(fault)
        return fault

    def _strike(self, fault: Fault | None) -> None:
        """What a fault does before the call acts."""
        if isinstance(fault, Fail | Freeze):
            raise fault.error
        if isinstance(fault, Delay):
            self._sleep(fault.seconds)

    def _choose(self, verb: Verb, key: str, size: int = 0, if_absent: bool = False) -> Fault | None:
        with self._lock:
            call = Call(len(self._calls) + 1, verb, key, size, if_absent)
            self._calls.append(call)
            fault = self._fault(call)
            if isinstance(fault, Freeze):
                self._rules.insert(0, (Rule(fault, times=None), [0]))
        return fault

    def _fault(self, call: Call) -> Fault | None:
        """The fault of the first rule that meets `call`. Every matching rule counts it."""
        met: Fault | None = None
        for rule, seen in self._rules:
            if not rule.matches(call):
                continue
            seen[0] += 1
            due = seen[0] >= rule.nth
            if due and (rule.times is None or seen[0] < rule.nth + rule.times):
                met = met if met is not None else rule.fault
        if met is None and self._decide is not None:
            met = self._decide(call)
        return met

    def _content(self, key: str) -> bytes | None:
        try:
            return self._store.get(key, max_bytes=1 << 40)
        except ObjectNotFoundError:
            return None

    def _older(self, key: str) -> bytes:
        with self._lock:
            known = key in self._previous
            data = self._previous.get(key)
        if not known:
            data = self._content(key)
        if data is None:
            raise ObjectNotFoundError(f"{self.url} has no object {key!r}.")
        return data

    def _listed(
        self, prefix: str, start_after: str | None, fault: Fault | None
    ) -> Iterator[ObjectInfo]:
        self._strike(fault)
        hidden = self._last_put if isinstance(fault, Stale) else ""
        for info in self._store.list(prefix, start_after=start_after):
            if info.key != hidden:
                yield info._replace(size=self._claimed.get(info.key, info.size))
        _end(fault)


def _end(fault: Fault | None) -> None:
    if isinstance(fault, LoseReply):
        raise fault.error


def _damaged(data: bytes, fault: Fault | None) -> bytes:
    if isinstance(fault, FlipBit) and data:
        changed = bytearray(data)
        bit = fault.bit % (8 * len(data))
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)
    if isinstance(fault, DropBytes):
        return data[: fault.start] + data[fault.start + fault.length :]
    return data
