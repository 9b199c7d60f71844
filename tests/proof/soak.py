"""Thousands of small versions under faults, with replicas that come and go.

One trainer publishes, a version a round, and collects garbage. Replicas follow at their own pace;
some crash and come back, with their weights or as newcomers. One call in a hundred fails, half of
these after they were done. Trainers are replaced too. After every sync the replica's bits are
compared with what was published under the root that it names.

    python soak.py 10000    # with the folder above in PYTHONPATH
"""

import gc
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import psutil

from farcast.delta import TensorBits, entry_of, root_of, to_bits
from farcast.errors import StoreUnavailableError
from farcast.publish import Publisher
from farcast.replica import MemoryTarget, Subscriber
from farcast.store import MemoryStore, Store
from farcast.store.base import ObjectInfo
from version_world import RUN, Tensors, bits_of, copied, plain

T = TypeVar("T")
Bits = dict[str, tuple[str, tuple[int, ...], bytes]]

FAILING = 0.01
KEEP = 24
REPLICAS = 6
TRIES = 8
"""Of a call of the trainer: what the faults leave of it does not end the run."""


@dataclass
class Soaked:
    """What was seen. Sizes in bytes, after a tenth of the versions and at the end."""

    versions: int = 0
    syncs: int = 0
    failures: int = 0
    crashes: int = 0
    replaced_trainers: int = 0
    mislabelled: int = 0
    objects_largest: int = 0
    bytes_largest: int = 0
    resident_early: int = 0
    resident_end: int = 0


class Unsteady:
    """`store`, where one call in a hundred fails; half of these after they were done."""

    def __init__(self, store: Store, chance: random.Random, found: Soaked) -> None:
        self._store = store
        self._chance = chance
        self._found = found

    @property
    def url(self) -> str:
        return self._store.url

    def _try(self, call: Callable[[], T]) -> T:
        fails = self._chance.random() < FAILING
        self._found.failures += fails
        if fails and self._chance.random() < 0.5:
            raise StoreUnavailableError("The test fails.")
        result = call()
        if fails:
            raise StoreUnavailableError("The test lost the reply.")
        return result

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        self._try(lambda: self._store.put(key, data, if_absent=if_absent))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self._try(lambda: self._store.get(key, max_bytes=max_bytes))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._try(lambda: self._store.get_range(key, start, length))

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        return iter(self._try(lambda: list(self._store.list(prefix, start_after=start_after))))

    def delete(self, key: str) -> None:
        self._try(lambda: self._store.delete(key))


class Soak:
    """One run of it; `go` does so many versions."""

    def __init__(self, *, seed: int = 0) -> None:
        self.found = Soaked()
        self._chance = random.Random(seed)
        self._store = MemoryStore()
        self._random = np.random.default_rng(seed)
        self._weights: Tensors = {
            "a": self._random.integers(0, 1 << 16, (64, 32), dtype=np.uint16),
            "b": self._random.normal(size=(40, 10)).astype(np.float32),
        }
        self._truth: dict[str, Bits] = {}
        self._trainer = self._insist(self._new_trainer)
        self._replicas = [self._new_replica(None) for _ in range(REPLICAS)]

    def go(self, versions: int) -> Soaked:
        for number in range(versions):
            self._publish(number)
            if number % 8 == 7:
                self._insist(lambda: self._trainer.collect_garbage(keep=KEEP, grace=0.0))
            if self._chance.random() < 0.002:
                self._trainer = self._insist(self._new_trainer)
                self.found.replaced_trainers += 1
            for place in range(REPLICAS):
                self._live(place)
            if number == versions // 10:
                self.found.resident_early = _resident()
            if number % 50 == 0:
                self._weigh()
        self._weigh()
        self.found.versions = versions
        self.found.resident_end = _resident()
        return self.found

    def _publish(self, number: int) -> None:
        for _ in range(3):
            flat = self._weights["a" if self._chance.random() < 0.7 else "b"].reshape(-1)
            flat[self._random.integers(flat.size)] += 1
        bits = bits_of(copied(self._weights))
        root = root_of({name: entry_of(to_bits(value)) for name, value in self._weights.items()})
        self._truth[root] = bits
        while len(self._truth) > 4 * KEEP:
            del self._truth[next(iter(self._truth))]
        self._insist(lambda: self._trainer.publish(self._weights, step=number))

    def _live(self, place: int) -> None:
        """One round of one replica: mostly it syncs, sometimes it is busy, dies, or is replaced."""
        fate = self._chance.random()
        if fate < 0.3:
            return
        if fate < 0.31:
            self.found.crashes += 1
            held = self._replicas[place].target
            assert isinstance(held, MemoryTarget)
            keeps = self._chance.random() < 0.5
            self._replicas[place] = self._new_replica(held.tensors if keeps else None)
        replica = self._replicas[place]
        before = replica.ref
        try:
            ref = replica.sync()
        except StoreUnavailableError:
            return
        self.found.syncs += 1
        held_bits = plain({name: replica.target.read(name) for name in replica.target.entries})
        wrong = held_bits != self._truth.get(ref.root) or (before and ref.version < before.version)
        self.found.mislabelled += bool(wrong)

    def _weigh(self) -> None:
        infos = list(self._store.list(""))
        self.found.objects_largest = max(self.found.objects_largest, len(infos))
        total = sum(info.size for info in infos)
        self.found.bytes_largest = max(self.found.bytes_largest, total)

    def _new_trainer(self) -> Publisher:
        store = Unsteady(self._store, self._chance, self.found)
        return Publisher(store, RUN, anchor_every=16, squash=4, workers=1)

    def _new_replica(self, tensors: Mapping[str, TensorBits] | None) -> Subscriber:
        store = Unsteady(self._store, self._chance, self.found)
        return Subscriber(store, RUN, MemoryTarget(tensors), workers=1)

    def _insist(self, call: Callable[[], T]) -> T:
        for _ in range(TRIES):
            try:
                return call()
            except StoreUnavailableError as error:
                last = error
        raise last


def _resident() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    print(Soak().go(int(sys.argv[1])))
