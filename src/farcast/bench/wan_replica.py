"""The process of one replica in `farcast bench wan`: orders come as JSON lines on standard input,
events go as JSON lines to standard output. It reaches the store by the emulated line only.

    python -m farcast.bench.wan_replica
"""

import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from farcast.bench.wan_ways import (
    FARCAST,
    SHARED,
    FarcastFollower,
    Follower,
    FullFollower,
    SharedFollower,
    warm_up,
)
from farcast.delta import TensorBits
from farcast.engines.pace import Pace
from farcast.replica.shards import read_shard
from farcast.store import CountingStore, open_store


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag="setup"):
    """The first line. `base` is a safetensors file with the weights of `version`."""

    bucket: str
    options: dict[str, Any]
    base: str
    version: int
    poll_seconds: float
    seed: int


class Follow(msgspec.Struct, frozen=True, kw_only=True, tag="follow"):
    """Ask by `way` until `version` is live. `Asking` is answered first, then `Live`."""

    way: str
    version: int


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """Come late to the run under `prefix`: with the weights in the file `base`, or with none.
    `Joined` is answered."""

    prefix: str
    base: str | None


class Roots(msgspec.Struct, frozen=True, tag="roots"):
    """`Held` is answered: roots of the bits held now, by way."""


Order: TypeAlias = Follow | Join | Roots


class Asking(msgspec.Struct, frozen=True, tag="asking"):
    """It asks from now on."""


class Live(msgspec.Struct, frozen=True, kw_only=True, tag="live"):
    """`at` is on the clock that all processes of a machine share; `bytes` and `requests` since
    `Asking`, of which `quiet` found nothing newer."""

    at: float
    bytes: int
    requests: int
    quiet: int
    apply_seconds: float


class Joined(msgspec.Struct, frozen=True, kw_only=True, tag="joined"):
    seconds: float
    bytes: int
    requests: int
    objects: int
    root: str


class Held(msgspec.Struct, frozen=True, tag="held"):
    roots: dict[str, str]


Event: TypeAlias = Asking | Live | Joined | Held


class Replica:
    """Keeps one follower for each way it was asked to follow."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._pace = Pace(setup.poll_seconds, random.Random(setup.seed))
        self._base = _read(setup.base)
        self._followers: dict[str, tuple[CountingStore, Follower]] = {}
        warm_up(self._base)

    def obey(self, order: Order) -> None:
        if isinstance(order, Follow):
            self._follow(order)
        elif isinstance(order, Join):
            say(self._join(order))
        else:
            say(Held({way: follower.root() for way, (_, follower) in self._followers.items()}))

    def _follow(self, order: Follow) -> None:
        store, follower = self._follower(order.way)
        before = store.traffic
        say(Asking())
        quiet = 0
        while (live := follower.advance()) is None or live < order.version:
            if live is None:
                quiet += 1
                time.sleep(self._pace.after_quiet())
        at, after = time.monotonic(), store.traffic
        say(
            Live(
                at=at,
                bytes=after.bytes_down - before.bytes_down,
                requests=after.total_requests - before.total_requests,
                quiet=quiet,
                apply_seconds=follower.apply_seconds,
            )
        )

    def _join(self, order: Join) -> Joined:
        store = self._store(order.prefix)
        tensors = None if order.base is None else _read(order.base)
        began = time.monotonic()
        follower = FarcastFollower(store, tensors)
        follower.advance()
        seconds = time.monotonic() - began
        subscriber = follower.subscriber
        return Joined(
            seconds=seconds,
            bytes=store.traffic.bytes_down,
            requests=store.traffic.total_requests,
            objects=subscriber.last.objects,
            root=follower.root(),
        )

    def _follower(self, way: str) -> tuple[CountingStore, Follower]:
        found = self._followers.get(way)
        if found is None:
            store = self._store(prefix_of(way))
            found = self._followers[way] = store, self._made(way, store)
            found[1].advance()  # opens the connection, and finds out which version is at hand
        return found

    def _made(self, way: str, store: CountingStore) -> Follower:
        if way == FARCAST:
            return FarcastFollower(store, self._base)
        if way == SHARED:
            return SharedFollower(store, self._base, self._setup.version)
        return FullFollower(store, self._setup.version)

    def _store(self, prefix: str) -> CountingStore:
        url = f"s3://{self._setup.bucket}/{prefix}"
        return CountingStore(open_store(url, **self._setup.options))


def prefix_of(way: str) -> str:
    """The store's prefix for what goes by `way`."""
    return way.partition(" ")[0].lower()


def _read(path: str) -> Mapping[str, TensorBits]:
    shard = read_shard(Path(path))
    return {name: shard.read(name) for name in sorted(shard.spans)}


def say(event: Event) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    lines = iter(sys.stdin.buffer.readline, b"")
    replica = Replica(msgspec.json.decode(next(lines), type=Setup))
    for line in lines:  # ends when the parent does
        replica.obey(msgspec.json.decode(line, type=Order))


if __name__ == "__main__":
    main()
