"""The cache keeps to its limit and its names, whatever the disk does."""

import errno
import os
from pathlib import Path

import pytest

from farcast.errors import ConfigError, InvalidKeyError
from farcast.relay import cache as cache_module
from farcast.relay.cache import ObjectCache
from relay_world import digest_of, payload

ITEMS = {digest_of(data): data for data in (payload(1000, seed) for seed in range(6))}
NAMES = list(ITEMS)


def content(cache: ObjectCache, digest: str) -> bytes | None:
    held = cache.open(digest)
    if held is None:
        return None
    with os.fdopen(held.descriptor, "rb") as file:
        return file.read()


def file_of(folder: Path, digest: str) -> Path:
    return folder / "objects" / digest[:2] / f"{digest}.{len(ITEMS[digest])}"


def files(folder: Path) -> list[str]:
    return sorted(path.stem for path in (folder / "objects").glob("*/*"))


def test_the_one_unused_for_longest_goes_first(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 3000)
    for name in NAMES[:3]:
        assert cache.keep(name, ITEMS[name])
    assert content(cache, NAMES[0]) == ITEMS[NAMES[0]]
    assert cache.keep(NAMES[3], ITEMS[NAMES[3]])
    assert files(tmp_path) == sorted([NAMES[0], NAMES[2], NAMES[3]])
    assert content(cache, NAMES[1]) is None
    assert (cache.held_bytes, len(cache), cache.evicted) == (3000, 3, 1)
    assert cache.keep(NAMES[0], ITEMS[NAMES[0]])  # again
    assert cache.held_bytes == 3000


def test_names_and_their_order_outlive_the_process(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 10_000)
    for number, name in enumerate(NAMES[:4]):
        cache.keep(name, ITEMS[name])
        os.utime(file_of(tmp_path, name), (1e9, 1e9 + number))
    content(cache, NAMES[0])  # used last
    (tmp_path / "parts" / "half").write_bytes(b"x" * 100)
    (tmp_path / "objects" / "zz").mkdir()
    (tmp_path / "objects" / "zz" / f"{NAMES[5]}.18").write_bytes(b"in the wrong place")
    (tmp_path / "objects" / NAMES[5][:2]).mkdir(exist_ok=True)
    file_of(tmp_path, NAMES[5]).symlink_to("/etc/hostname")
    again = ObjectCache(tmp_path, 2000)
    assert again.held_bytes == 2000
    assert content(again, NAMES[0]) == ITEMS[NAMES[0]]
    assert content(again, NAMES[3]) == ITEMS[NAMES[3]]
    assert content(again, NAMES[5]) is None
    assert list((tmp_path / "parts").iterdir()) == []


def test_what_is_larger_than_all_is_not_kept_and_costs_nobody_a_place(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 1500)
    cache.keep(NAMES[0], ITEMS[NAMES[0]])
    large = payload(1501)
    assert not cache.keep(digest_of(large), large)
    assert "larger than the whole cache" in cache.trouble
    assert files(tmp_path) == [NAMES[0]]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/etc/passwd", "a" * 63, "A" * 64, "a" * 65, "a/../" + "b" * 59]
)
def test_what_is_no_digest_is_no_path(tmp_path: Path, name: str) -> None:
    cache = ObjectCache(tmp_path / "cache", 1000)
    for call in (cache.open, cache.drop, lambda name: cache.keep(name, b"x")):
        with pytest.raises(InvalidKeyError):
            call(name)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_a_full_disk_costs_what_is_oldest_and_then_only_the_keeping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ObjectCache(tmp_path, 10_000)
    for name in NAMES[:3]:
        cache.keep(name, ITEMS[name])
    real = os.fsync
    fails = [1]

    def fsync(descriptor: int) -> None:
        if fails[0]:
            fails[0] -= 1
            raise OSError(errno.ENOSPC, "no space left")
        real(descriptor)

    monkeypatch.setattr(cache_module.os, "fsync", fsync)
    assert cache.keep(NAMES[3], ITEMS[NAMES[3]])  # in the place of the oldest
    assert files(tmp_path) == sorted([NAMES[1], NAMES[2], NAMES[3]])
    fails[0] = 2
    assert not cache.keep(NAMES[4], ITEMS[NAMES[4]])
    assert cache.trouble == "No space left on device"
    assert content(cache, NAMES[3]) == ITEMS[NAMES[3]]
    assert list((tmp_path / "parts").iterdir()) == []
    assert cache.keep(NAMES[5], ITEMS[NAMES[5]])
    assert cache.trouble == ""


def test_what_somebody_else_removed_is_not_there(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 10_000)
    cache.keep(NAMES[0], ITEMS[NAMES[0]])
    file_of(tmp_path, NAMES[0]).unlink()
    assert content(cache, NAMES[0]) is None
    assert (cache.held_bytes, len(cache)) == (0, 0)


@pytest.mark.parametrize("left", [0, 999, 1001], ids=["empty", "cut", "longer"])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_file_of_another_length_than_was_kept_is_not_opened(
    tmp_path: Path, left: int, restarted: bool
) -> None:
    cache = ObjectCache(tmp_path, 10_000)
    for name in NAMES[:2]:
        cache.keep(name, ITEMS[name])
    file_of(tmp_path, NAMES[0]).write_bytes((ITEMS[NAMES[0]] + b"!")[:left])
    if restarted:
        cache = ObjectCache(tmp_path, 10_000)
        assert len(cache) == 1
    assert content(cache, NAMES[0]) is None
    assert (files(tmp_path), cache.held_bytes, cache.damaged) == ([NAMES[1]], 1000, 1)
    assert cache.keep(NAMES[0], ITEMS[NAMES[0]])
    assert content(cache, NAMES[0]) == ITEMS[NAMES[0]]


def test_what_an_older_relay_kept_without_a_length_is_fetched_anew(tmp_path: Path) -> None:
    (tmp_path / "objects" / NAMES[0][:2]).mkdir(parents=True)
    (tmp_path / "objects" / NAMES[0][:2] / NAMES[0]).write_bytes(ITEMS[NAMES[0]])
    cache = ObjectCache(tmp_path, 10_000)
    assert (files(tmp_path), len(cache), cache.damaged) == ([], 0, 0)


def test_of_two_lengths_of_one_digest_the_one_used_last_is_taken(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 10_000)
    cache.keep(NAMES[0], ITEMS[NAMES[0]])
    other = file_of(tmp_path, NAMES[0]).with_suffix(".3")
    other.write_bytes(b"abc")
    os.utime(other, (1, 1))
    again = ObjectCache(tmp_path, 10_000)
    assert (again.held_bytes, len(again), other.exists()) == (1000, 1, False)
    assert content(again, NAMES[0]) == ITEMS[NAMES[0]]


def test_a_slow_reader_of_a_rotten_file_does_not_drop_the_one_that_came_since(
    tmp_path: Path,
) -> None:
    cache = ObjectCache(tmp_path, 10_000)
    cache.keep(NAMES[0], ITEMS[NAMES[0]])
    first, second = cache.open(NAMES[0]), cache.open(NAMES[0])
    assert first is not None
    assert second is not None
    cache.drop_damaged(NAMES[0], first)
    assert cache.open(NAMES[0]) is None
    cache.keep(NAMES[0], ITEMS[NAMES[0]])
    cache.drop_damaged(NAMES[0], second)
    assert content(cache, NAMES[0]) == ITEMS[NAMES[0]]
    assert cache.damaged == 1
    for held in (first, second):
        os.close(held.descriptor)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        ObjectCache(tmp_path, 1000)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(ConfigError, match="is not a folder"):
        ObjectCache(tmp_path / "thesis.tex", 1000)
