"""The emulated link takes the time a real one would, and counting counts what passes."""

import threading
import time

import pytest

from farcast.config import LinkConfig
from farcast.errors import ObjectExistsError, ObjectNotFoundError
from farcast.store import CountingStore, LinkedStore, MemoryStore
from farcast.store.link import SharedPipe
from farcast.store.testing import FaultStore


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def linked(rate: float, rtt: float) -> tuple[LinkedStore, Clock]:
    clock = Clock()
    link = LinkConfig(rate=rate, rtt=rtt)
    return LinkedStore(MemoryStore(), link, clock=clock, sleep=clock.sleep), clock


def test_a_transfer_takes_the_round_trip_and_its_bytes() -> None:
    store, clock = linked(rate=1000, rtt=0.08)
    store.put("k", b"x" * 500)
    assert clock.now == pytest.approx(1000 + 0.58)
    store.get("k", max_bytes=500)
    assert clock.now == pytest.approx(1000 + 2 * 0.58)
    store.get_range("k", 0, 100)
    assert clock.now == pytest.approx(1000 + 2 * 0.58 + 0.18)


def test_requests_without_a_body_take_a_round_trip() -> None:
    store, clock = linked(rate=1000, rtt=0.08)
    with pytest.raises(ObjectNotFoundError):
        store.get("k", max_bytes=1)
    store.delete("k")
    assert list(store.list("")) == []
    assert clock.now == pytest.approx(1000 + 3 * 0.08)


def test_a_refused_create_has_travelled() -> None:
    store, clock = linked(rate=1000, rtt=0.08)
    store.put("k", b"", if_absent=True)
    before = clock.now
    with pytest.raises(ObjectExistsError):
        store.put("k", b"x" * 500, if_absent=True)
    assert clock.now - before == pytest.approx(0.58)


def test_a_list_takes_a_round_trip_for_each_page() -> None:
    store, clock = linked(rate=1e12, rtt=0.08)
    for number in range(2500):
        store._store.put(f"n{number:04d}", b"")
    assert len(list(store.list(""))) == 2500
    assert clock.now == pytest.approx(1000 + 3 * 0.08, abs=1e-3)
    next(store.list(""))
    assert clock.now == pytest.approx(1000 + 4 * 0.08, abs=1e-3)


def test_streams_share_the_rate_equally_and_finish_in_their_order() -> None:
    pipe = SharedPipe(rate=100.0)
    long = pipe.start(100, now=0.0)
    assert pipe.remaining(long, now=0.0) == pytest.approx(1.0)
    short = pipe.start(25, now=0.5)
    # 50 bytes are left of the long one; both get 50/s until the short one is through at 1.0.
    assert pipe.remaining(short, now=0.5) == pytest.approx(0.5)
    assert pipe.remaining(long, now=0.5) == pytest.approx(0.75)
    assert pipe.remaining(short, now=1.0) <= 0
    assert pipe.remaining(long, now=1.0) == pytest.approx(0.25)
    # A thread that wakes late changes nothing for the others.
    assert pipe.remaining(long, now=5.0) <= 0


def test_threads_together_get_the_rate_and_no_more() -> None:
    store = LinkedStore(MemoryStore(), LinkConfig(rate=1e6, rtt=0.02))
    threads = [
        threading.Thread(target=store.put, args=(f"k{number}", b"x" * 50_000))
        for number in range(6)
    ]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.31 <= time.monotonic() - start < 0.6


def test_up_and_down_do_not_disturb_each_other() -> None:
    store = LinkedStore(MemoryStore(), LinkConfig(rate=1e6, rtt=0.0))
    store._store.put("k", b"x" * 200_000)
    up = threading.Thread(target=store.put, args=("k2", b"x" * 200_000))
    start = time.monotonic()
    up.start()
    store.get("k", max_bytes=200_000)
    up.join()
    assert 0.19 <= time.monotonic() - start < 0.35


def test_counting_counts_requests_and_bytes_of_all_threads() -> None:
    store = CountingStore(LinkedStore(FaultStore(), LinkConfig(rate=1e9, rtt=0.0)))
    threads = [
        threading.Thread(target=store.put, args=(f"n{number:04d}", b"x" * 10))
        for number in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.get("n0001", max_bytes=10)
    store.get_range("n0001", 0, 4)
    with pytest.raises(ObjectExistsError):
        store.put("n0001", b"abc", if_absent=True)
    store.delete("n0001")
    assert len(list(store.list(""))) == 19
    traffic = store.traffic
    assert traffic.requests == {"put": 21, "get": 1, "get_range": 1, "delete": 1, "list": 1}
    assert (traffic.bytes_up, traffic.bytes_down, traffic.total_requests) == (203, 14, 25)
