"""What `farcast.store.base.Store` promises, held against every backend and every wrapper."""

import threading
from collections.abc import Callable

import pytest

from farcast.errors import (
    IntegrityError,
    InvalidKeyError,
    LimitError,
    ObjectExistsError,
    ObjectNotFoundError,
)
from farcast.store import Store, probe_conditional_put

Make = Callable[[], Store]

BAD_KEYS = [
    "",
    ".",
    "..",
    "/",
    "/etc/x",
    "../x",
    "a/../../x",
    "a/./b",
    "a//b",
    "a/",
    "x\0y",
    "a\\b",
    "C:\\x",
    "C:/x",
    "a b",
    "a\nb",
    "é",
    "a%2e%2e/b",
    ".hidden",
    "a/.farcast-staging/x",
    "k" * 256,
    "/".join(["k" * 100] * 11),
]


def keys(store: Store, prefix: str = "", start_after: str | None = None) -> list[str]:
    return [info.key for info in store.list(prefix, start_after=start_after)]


def test_put_then_get_gives_the_same_bytes(store: Store) -> None:
    for size in (0, 1, 100_000):
        data = bytes(range(256)) * (size // 256 + 1)
        store.put(f"objects/n{size}", data[:size])
        assert store.get(f"objects/n{size}", max_bytes=size) == data[:size]


def test_any_memory_layout_is_stored_in_order(store: Store) -> None:
    store.put("strided", memoryview(bytes(range(20)))[::3])
    assert store.get("strided", max_bytes=20) == bytes(range(0, 20, 3))
    store.put("words", memoryview(b"\1\0\0\0\2\0\0\0").cast("I"))
    assert store.get("words", max_bytes=20) == b"\1\0\0\0\2\0\0\0"
    store.put("mutable", memoryview(bytearray(b"abc")))
    assert store.get("mutable", max_bytes=20) == b"abc"


def test_overwrite_replaces_the_whole_object(store: Store) -> None:
    store.put("k", b"a longer first content")
    store.put("k", b"short")
    assert store.get("k", max_bytes=100) == b"short"


def test_second_create_loses_and_changes_nothing(store: Store) -> None:
    store.put("versions/1", b"first", if_absent=True)
    with pytest.raises(ObjectExistsError):
        store.put("versions/1", b"second", if_absent=True)
    assert store.get("versions/1", max_bytes=100) == b"first"


def test_create_after_delete_works(store: Store) -> None:
    store.put("k", b"1", if_absent=True)
    store.delete("k")
    store.put("k", b"2", if_absent=True)
    assert store.get("k", max_bytes=100) == b"2"


def test_racing_creates_have_one_winner(make: Make) -> None:
    stores = [make() for _ in range(6)]
    barrier = threading.Barrier(len(stores))
    won: list[bytes] = []

    def run(number: int) -> None:
        own = f"writer {number}".encode() * 1000
        barrier.wait()
        try:
            stores[number].put("contested", own, if_absent=True)
        except ObjectExistsError:
            return
        won.append(own)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [stores[0].get("contested", max_bytes=10**6)] == won


def test_probe_accepts_it(store: Store) -> None:
    probe_conditional_put(store)
    assert keys(store) == []


def test_absent_object_is_not_found(store: Store) -> None:
    for read in (
        lambda: store.get("nothing/here", max_bytes=10),
        lambda: store.get_range("nothing/here", 0, 1),
    ):
        with pytest.raises(ObjectNotFoundError, match="nothing/here"):
            read()


def test_get_refuses_an_object_over_the_limit(store: Store) -> None:
    store.put("k", b"x" * 1001)
    with pytest.raises(LimitError, match="1001"):
        store.get("k", max_bytes=1000)
    assert len(store.get("k", max_bytes=1001)) == 1001


def test_ranges_are_exact_or_refused(store: Store) -> None:
    store.put("k", b"0123456789")
    assert store.get_range("k", 0, 10) == b"0123456789"
    assert store.get_range("k", 3, 4) == b"3456"
    assert store.get_range("k", 9, 1) == b"9"
    assert store.get_range("k", 4, 0) == b""
    for start, length in ((0, 11), (9, 2), (10, 1), (100, 5)):
        with pytest.raises(IntegrityError):
            store.get_range("k", start, length)
    for start, length in ((-1, 2), (2, -1)):
        with pytest.raises(LimitError):
            store.get_range("k", start, length)


def test_list_is_ordered_by_whole_key(store: Store) -> None:
    names = ["a-b", "a/b", "a/c/d", "a0", "a/b.x", "b", "B", "a/b0", "aa/x"]
    for name in names:
        store.put(name, name.encode())
    assert keys(store) == sorted(names)
    assert [info.size for info in store.list("")] == [len(name) for name in sorted(names)]
    assert keys(store, "a/") == ["a/b", "a/b.x", "a/b0", "a/c/d"]
    assert keys(store, "a/c/") == ["a/c/d"]
    assert keys(store, "none/") == []
    for after in names:
        assert keys(store, start_after=after) == [name for name in sorted(names) if name > after]


def test_start_after_need_not_exist(store: Store) -> None:
    for number in (1, 2, 5):
        store.put(f"versions/{number:012d}.json", b"")
    after = "versions/000000000003.json"
    assert keys(store, "versions/", after) == ["versions/000000000005.json"]
    assert keys(store, "versions/", "versions/000000000005.json") == []
    assert keys(store, "versions/", "w") == []


def test_list_tells_when_an_object_changed_by_the_stores_clock(store: Store) -> None:
    import time

    store.put("k", b"")
    (info,) = store.list("")
    assert abs(info.modified - time.time()) < 60


def test_delete_removes_and_forgives(store: Store) -> None:
    store.put("a/k", b"x")
    store.delete("a/k")
    store.delete("a/k")
    store.delete("never/was")
    assert keys(store) == []
    with pytest.raises(ObjectNotFoundError):
        store.get("a/k", max_bytes=10)


@pytest.mark.parametrize("key", BAD_KEYS)
def test_bad_keys_are_refused_before_any_io(store: Store, key: str) -> None:
    for call in (
        lambda: store.put(key, b"x"),
        lambda: store.put(key, b"x", if_absent=True),
        lambda: store.get(key, max_bytes=10),
        lambda: store.get_range(key, 0, 1),
        lambda: store.delete(key),
        lambda: next(store.list(f"{key}/"), None),
        lambda: next(store.list("", start_after=key), None) if key else store.put(key, b""),
    ):
        with pytest.raises(InvalidKeyError):
            call()


def test_prefix_must_end_in_a_slash(store: Store) -> None:
    with pytest.raises(InvalidKeyError):
        next(store.list("versions"), None)


def test_a_second_handle_sees_the_same_store(make: Make) -> None:
    first, second = make(), make()
    first.put("k", b"x")
    assert second.get("k", max_bytes=1) == b"x"
    assert first.url == second.url


def test_large_objects_survive(store: Store) -> None:
    data = bytes(range(256)) * (20 * 4096)  # 20 MiB: several parts where there are parts
    store.put("big", data)
    assert store.get("big", max_bytes=len(data)) == data
    assert store.get_range("big", 17 << 20, 1000) == data[17 << 20 :][:1000]
    store.put("big2", data, if_absent=True)
    with pytest.raises(ObjectExistsError):
        store.put("big2", data, if_absent=True)


def test_threads_may_share_a_store(store: Store) -> None:
    def run(number: int) -> None:
        for turn in range(5):
            store.put(f"t{number}/{turn}", bytes([number]) * 1000)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys(store)) == 20
    assert store.get("t3/4", max_bytes=1000) == b"\3" * 1000
