"""Writes a recording (see `data`) from the versions that a run's store holds.

Every version is rebuilt and verified to its root before its change is written. Refuses a folder
that holds something, and a range over which tensors come, go, or change shape.
"""

import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from farcast.bench.data import BASE, DELTAS, HOPS, HopRecord
from farcast.delta import to_bits, word_bytes, words_of
from farcast.errors import ConfigError, UnknownVersionError
from farcast.fleet.finding import open_archive, versions_in
from farcast.replica.shards import check_writable, plan_shard
from farcast.store import Store
from farcast.store.archive import Archive
from farcast.store.rebuilding import Weights

Progress = Callable[[str, int, int], None]


def record(
    store: Store,
    out: Path,
    *,
    first: int | None = None,
    last: int | None = None,
    progress: Progress = lambda *_: None,
) -> list[HopRecord]:
    """Record the versions `first` to `last` (by default all that follow one another up to the
    newest) into the folder `out`. hops.json is written last: without it nothing was recorded."""
    archive = open_archive(store)
    versions = _range(list(versions_in(store)), first, last)
    _claim(out)
    progress("rebuilding the first version", 0, len(versions))
    weights = archive.restore(versions[0])
    _write_base(out / BASE, weights)
    hops: list[HopRecord] = []
    with zipfile.ZipFile(out / DELTAS, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as deltas:
        for done, version in enumerate(versions[1:], start=1):
            progress(f"recording version {version}", done, len(versions))
            weights, hop = _write_hop(archive, weights, version, deltas)
            hops.append(hop)
    (out / HOPS).write_bytes(msgspec.json.format(msgspec.json.encode(hops), indent=1) + b"\n")
    return hops


def _range(versions: list[int], first: int | None, last: int | None) -> list[int]:
    """The consecutive versions asked for; without `first`, back to the nearest gap."""
    held = set(versions)
    end = max(held, default=-1) if last is None else last
    begin = end
    while begin - 1 in held and (first is None or begin > first):
        begin -= 1
    if end not in held or begin == end or (first is not None and begin != first):
        raise UnknownVersionError(
            f"The store does not hold versions {'?' if first is None else first} to {end} without "
            "a gap, two at least; ask for some that `farcast inspect` shows."
        )
    return list(range(begin, end + 1))


def _claim(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ConfigError(f"The folder {out} is not empty; name another one.")


def _write_base(path: Path, weights: Weights) -> None:
    check_writable(weights.entries)
    header, spans = plan_shard(weights.entries, {})
    with path.open("wb") as file:
        file.write(header)
        for name in sorted(spans, key=lambda name: spans[name].start):
            to_bits(weights.bits[name]).data.tofile(file)


def _write_hop(
    archive: Archive, before: Weights, version: int, deltas: zipfile.ZipFile
) -> tuple[Weights, HopRecord]:
    after = archive.restore(version, before)
    _require_alike(before, after)
    run, base = archive.run_id, before.ref.version
    changed = 0
    for name, old in before.bits.items():
        new = after.bits[name]
        if old is new or before.entries[name] == after.entries[name]:
            continue
        words = words_of(to_bits(new))
        positions = np.flatnonzero(words_of(to_bits(old)) != words)
        wide = np.uint32 if words.size <= 1 << 32 else np.uint64
        key = f"{run}/{base}-{version}/{name}"
        _write_arrays(
            deltas,
            ((f"{key}/positions", positions.astype(wide)), (f"{key}/values", words[positions])),
        )
        changed += positions.size
    elements = sum(bits.nbytes // word_bytes(bits.dtype) for bits in after.bits.values())
    return after, HopRecord(run=run, base=base, target=version, changed=changed, elements=elements)


def _require_alike(before: Weights, after: Weights) -> None:
    def kinds(weights: Weights) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {name: (bits.dtype, bits.shape) for name, bits in weights.bits.items()}

    if kinds(before) != kinds(after):
        raise ConfigError(
            f"Tensors came, went or changed shape between {before.ref} and {after.ref}; record "
            "a range of versions that are alike, with --first and --last."
        )


def _write_arrays(archive: zipfile.ZipFile, arrays: Iterable[tuple[str, npt.NDArray[Any]]]) -> None:
    for key, array in arrays:
        with archive.open(f"{key}.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array(file, array, allow_pickle=False)
