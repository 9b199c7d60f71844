"""How a version gets from a trainer to replicas: farcast, the format that most peers share, and
a full copy, each as a publisher and as a follower over any store.

All three are polled alike: a small object under the next version's number is asked for until it
is there. The shared format and the full copy are written anew, without checksums, signatures or
resumption, all of which would only slow them.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping

import msgspec
import numpy as np
import zstandard

from farcast.bench.data import Change
from farcast.bench.peers import XorZstd
from farcast.bench.synthetic import synthetic
from farcast.delta import TensorBits, entry_of, root_of
from farcast.errors import ObjectNotFoundError
from farcast.publish import Publisher
from farcast.replica import MemoryTarget, Subscriber
from farcast.store import MemoryStore, Store

RUN = "wan"
FARCAST, SHARED, FULL = "farcast", "XOR + zstd-1 per tensor", "full copy"
WAYS = (FARCAST, SHARED, FULL)

PIECE = 16 << 20
"""Bytes of one object of a full copy at most, which is cut at tensor borders too."""

DENSITY = 0.002
"""Of SmolLM2-135M's words, GRPO with AdamW at 1e-6 changed 0.17 to 0.24 % a step."""

_SMALL = 1 << 20


class Note(msgspec.Struct, frozen=True):
    """The small object of a version that is not farcast's: the sizes of its objects."""

    sizes: list[int]


class Follower(ABC):
    """One replica's side of one way. `apply_seconds`: of the last version, once its bytes were
    there."""

    apply_seconds = 0.0

    @abstractmethod
    def advance(self) -> int | None:
        """Ask once; the version that is live now if a newer one was there and was applied."""

    @abstractmethod
    def root(self) -> str:
        """Over the bits held now."""


class FarcastFollower(Follower):
    """`Subscriber` as replicas use it, into arrays of this process; the root is verified."""

    def __init__(self, store: Store, tensors: Mapping[str, TensorBits] | None) -> None:
        self.subscriber = Subscriber(store, RUN, MemoryTarget(tensors))

    def advance(self) -> int | None:
        staged = self.subscriber.stage()
        if staged is None:
            return None
        version = self.subscriber.commit(staged).version
        last = self.subscriber.last
        self.apply_seconds = last.decode_seconds + last.commit_seconds
        return version

    def root(self) -> str:
        return self.subscriber.target.verify()


class SharedFollower(Follower):
    """Whole-tensor XOR, decoded in place."""

    def __init__(self, store: Store, tensors: Mapping[str, TensorBits], version: int) -> None:
        self._store = store
        self._version = version
        self._held = {
            name: TensorBits(bits.dtype, bits.shape, np.array(bits.data))
            for name, bits in tensors.items()
        }
        self._coding = XorZstd()

    def advance(self) -> int | None:
        note = _note(self._store, self._version + 1)
        if note is None:
            return None
        data = self._store.get(_key(self._version + 1, 0), max_bytes=note.sizes[0])
        began = time.perf_counter()
        expand = zstandard.ZstdDecompressor().decompress
        for name, blob in msgspec.msgpack.decode(data, type=dict[str, bytes]).items():
            self._coding.decode_tensor(blob, self._held[name], expand)
        self.apply_seconds = time.perf_counter() - began
        self._version += 1
        return self._version

    def root(self) -> str:
        return root_of({name: entry_of(bits) for name, bits in self._held.items()})


class FullFollower(Follower):
    """Fetches every piece and keeps none: what it costs to have them is all that is asked."""

    def __init__(self, store: Store, version: int) -> None:
        self._store = store
        self._version = version

    def advance(self) -> int | None:
        note = _note(self._store, self._version + 1)
        if note is None:
            return None
        for piece, size in enumerate(note.sizes):
            self._store.get(_key(self._version + 1, piece), max_bytes=size)
        self._version += 1
        return self._version

    def root(self) -> str:
        return ""


def warm_up(tensors: Mapping[str, TensorBits]) -> None:
    """Compile and load the kernels, with a version of the largest tensor that stays here."""
    name = max(tensors, key=lambda name: tensors[name].data.nbytes)
    base = {name: tensors[name]}
    change = synthetic(base, DENSITY)
    store = MemoryStore()
    with Publisher(store, RUN) as publisher:
        follower = FarcastFollower(store, None)
        for step, weights in enumerate((base, change.target)):
            publisher.publish(weights, step=step)
            follower.advance()


def publish_farcast(publisher: Publisher, change: Change, step: int) -> int:
    """Returns the bytes that a replica has to read."""
    publisher.publish(change.target, step=step)
    report = publisher.last
    return 0 if report is None else report.bytes_sent


def publish_shared(store: Store, change: Change, version: int) -> int:
    """As `publish_farcast`. The bits of all tensors in one object, then the note."""
    encoded = XorZstd().encode(change)
    blobs = {name: blob for name, (_, blob) in encoded.payload.items()}
    return _publish(store, version, [msgspec.msgpack.encode(blobs)])


def publish_full(store: Store, change: Change, version: int, most: int) -> tuple[int, int]:
    """The first `most` bytes of all tensors; returns what was published and what there is."""
    total = change.nbytes
    pieces: list[bytes] = []
    left = min(most, total)
    for bits in change.target.values():
        taken = bits.data[:left]
        pieces += [taken[at : at + PIECE].tobytes() for at in range(0, taken.nbytes, PIECE)]
        left -= taken.nbytes
    _publish(store, version, pieces)
    return sum(map(len, pieces)), total


def _publish(store: Store, version: int, objects: list[bytes]) -> int:
    for index, data in enumerate(objects):
        store.put(_key(version, index), data)
    note = msgspec.json.encode(Note([len(data) for data in objects]))
    store.put(_note_key(version), note)
    return len(note) + sum(map(len, objects))


def _note(store: Store, version: int) -> Note | None:
    try:
        return msgspec.json.decode(store.get(_note_key(version), max_bytes=_SMALL), type=Note)
    except ObjectNotFoundError:
        return None


def _note_key(version: int) -> str:
    return f"notes/{version:012d}.json"


def _key(version: int, index: int) -> str:
    return f"pieces/{version:012d}-{index}"
