"""What tests of versions share: tensors that change a little, and bits to compare."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from farcast.delta import AnyBits, to_bits
from farcast.store import MemoryStore, Store
from farcast.store.archive import Archive

RUN = "run1"

Tensors = dict[str, np.ndarray[Any, Any]]


def tensors(step: int = 0, *, seed: int = 7, names: tuple[str, ...] = ("a", "b", "c")) -> Tensors:
    """Three tensors of different dtypes; each step changes a few elements of two of them."""
    rng = np.random.default_rng(seed)
    made: Tensors = {
        name: rng.integers(0, 1 << 16, (16, 8), dtype=np.uint16)
        if i % 2
        else rng.normal(size=(9, 7)).astype(np.float32)
        for i, name in enumerate(names)
    }
    for earlier in range(1, step + 1):
        for name in names[:2]:
            made[name].flat[(earlier * 5) % made[name].size] += 1 + earlier
    return made


def copied(values: Mapping[str, np.ndarray[Any, Any]]) -> Tensors:
    return {name: np.array(value) for name, value in values.items()}


def bits_of(values: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """dtype, shape and raw little-endian C-order bytes of each tensor."""
    return plain({name: to_bits(value) for name, value in values.items()})


def plain(bits: Mapping[str, AnyBits]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (b.dtype, tuple(b.shape), to_bits(b).data.tobytes()) for name, b in bits.items()}


def rebuilt(store: Store, version: int, *, run_id: str = RUN) -> dict[str, Any]:
    """What a newcomer gets from the store for `version`, in the form of `bits_of`."""
    return plain(Archive(store, run_id, workers=1).rebuild(version))


def keys(store: Store, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


def contents(store: Store, prefix: str = "") -> dict[str, bytes]:
    return {key: store.get(key, max_bytes=1 << 30) for key in keys(store, prefix)}


def clone(store: Store) -> MemoryStore:
    """The same objects in a store of their own."""
    twin = MemoryStore()
    for key, data in contents(store).items():
        twin.put(key, data)
    return twin
