"""What the benchmark's tests share: a small recording, and random changes of any dtype."""

import zipfile
from pathlib import Path

import numpy as np

from farcast.bench.data import Change
from farcast.delta import TensorBits, nbytes_of, words_of
from farcast.lineage import RunRecord
from farcast.publish import Publisher
from farcast.store import Store
from farcast.store.archive import Archive

RUN = "tiny"


def random_bits(random: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> TensorBits:
    data = random.integers(0, 256, nbytes_of(dtype, shape), dtype=np.uint8)
    return TensorBits(dtype, shape, data)


def changed_bits(random: np.random.Generator, bits: TensorBits, share: float) -> TensorBits:
    """Some words replaced by any others, some moved to their neighbours."""
    data = np.array(bits.data)
    words = words_of(TensorBits(bits.dtype, bits.shape, data))
    chosen = random.random(words.size) < share
    other = words_of(random_bits(random, bits.dtype, bits.shape))
    words[chosen] = np.where(random.random(chosen.sum()) < 0.5, other[chosen], words[chosen] ^ 1)
    return TensorBits(bits.dtype, bits.shape, data)


def random_change(
    seed: int, dtypes: tuple[str, ...], shape: tuple[int, ...], share: float
) -> Change:
    random = np.random.default_rng(seed)
    base = {f"{i}.{dtype}": random_bits(random, dtype, shape) for i, dtype in enumerate(dtypes)}
    target = {name: changed_bits(random, bits, share) for name, bits in base.items()}
    return Change(data="random", hop="0-1", base=base, target=target)


def weights(random: np.random.Generator) -> dict[str, np.ndarray]:
    """Masters of a model with a matrix that every quantiser takes, one it refuses, a vector."""
    return {
        "embed": random.normal(0, 0.02, (96, 192)).astype(np.float32),
        "odd": random.normal(0, 0.02, (40, 33)).astype(np.float32),
        "norm": np.ones(192, np.float32),
    }


def publish_run(store: Store, *, versions: int = 4) -> None:
    """A run whose masters take Adam-like steps; served as bf16."""
    start_run(store)
    random = np.random.default_rng(3)
    masters = weights(random)
    publisher = Publisher(store, RUN, anchor_every=3)
    for step in range(versions):
        publisher.publish({name: served(value) for name, value in masters.items()}, step=step)
        for value in masters.values():
            value += (random.integers(0, 2, value.shape) * 2 - 1).astype(np.float32) * 1e-5
    publisher.close()


def start_run(store: Store) -> None:
    Archive(store, RUN).create_run(RunRecord(run_id=RUN, created="now"))


def served(value: np.ndarray) -> TensorBits:
    words = (np.ascontiguousarray(value).view(np.uint32) >> 16).astype("<u2")
    return TensorBits("BF16", value.shape, words.reshape(-1).view(np.uint8))


def rewrite_arrays(path: Path, change: dict[str, np.ndarray]) -> None:
    """Replace arrays of an npz by others, keys by their ending."""
    with np.load(path, allow_pickle=False) as held:
        arrays = {key: held[key] for key in held.files}
    for ending, array in change.items():
        arrays[next(key for key in arrays if key.endswith(ending))] = array
    with zipfile.ZipFile(path, "w") as archive:
        for key, array in arrays.items():
            with archive.open(f"{key}.npy", "w") as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
