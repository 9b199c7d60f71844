"""Outages that end are waited out; those that do not, and other errors, come through."""

import threading

import pytest

from farcast.errors import StoreFullError, StoreUnavailableError
from farcast.store import MemoryStore, PatientStore
from farcast.store.testing import Fail, FaultStore, LoseReply, Rule


class Clock:
    """Time passes only by waiting."""

    def __init__(self, *, stopped: bool = False) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self.stopped = stopped

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        self.now += seconds
        return self.stopped


def patient(
    inner: FaultStore, clock: Clock, seconds: float = 600
) -> tuple[PatientStore, list[str]]:
    told: list[str] = []
    return PatientStore(inner, seconds, wait=clock.wait, tell=told.append, clock=clock), told


def test_an_outage_is_waited_out_and_told_once_at_each_end() -> None:
    inner, clock = FaultStore(MemoryStore()), Clock()
    store, told = patient(inner, clock)
    inner.add(Rule(Fail(), verb="put", times=4))
    store.put("a", b"x", if_absent=True)
    assert store.get("a", max_bytes=1) == b"x"
    assert clock.pauses == [0.5, 1, 2, 4]
    assert len(told) == 2
    assert "does not answer" in told[0]
    assert "600 s" in told[0]
    assert told[1] == "the store answers again, after 8 s"


def test_a_long_outage_is_told_about_once_a_minute_and_ends_at_its_bound() -> None:
    inner, clock = FaultStore(MemoryStore()), Clock()
    store, told = patient(inner, clock, seconds=180)
    inner.add(Rule(Fail(), times=None))
    with pytest.raises(StoreUnavailableError):
        store.get("a", max_bytes=1)
    assert clock.now == 180
    assert max(clock.pauses) == 15
    assert len(told) == 3


def test_no_patience_is_none() -> None:
    inner, clock = FaultStore(MemoryStore()), Clock()
    store, _ = patient(inner, clock, seconds=0)
    inner.add(Rule(Fail()))
    with pytest.raises(StoreUnavailableError):
        store.put("a", b"x")
    assert clock.pauses == []


def test_what_waiting_does_not_mend_comes_through_at_once() -> None:
    inner, clock = FaultStore(MemoryStore()), Clock()
    store, told = patient(inner, clock)
    inner.add(Rule(Fail(StoreFullError("full")), verb="put"))
    with pytest.raises(StoreFullError):
        store.put("a", b"x")
    assert (clock.pauses, told) == ([], [])


def test_a_request_to_stop_ends_the_waiting() -> None:
    inner, clock = FaultStore(MemoryStore()), Clock(stopped=True)
    store, _ = patient(inner, clock)
    inner.add(Rule(Fail(), times=None))
    with pytest.raises(StoreUnavailableError):
        store.put("a", b"x")
    assert len(clock.pauses) == 1


@pytest.mark.parametrize("fault", [Fail(), LoseReply()])
def test_a_list_that_breaks_off_gives_every_key_once(fault: Fail | LoseReply) -> None:
    inner, clock = FaultStore(MemoryStore()), Clock()
    for number in range(9):
        inner.put(f"k/{number}", b"")
    store, _ = patient(inner, clock)
    inner.add(Rule(fault, verb="list", times=2))
    assert [i.key for i in store.list("k/", start_after="k/2")] == [f"k/{n}" for n in range(3, 9)]


def test_threads_share_one_outage() -> None:
    inner, told = FaultStore(MemoryStore()), list[str]()
    store = PatientStore(inner, 60, wait=lambda _: False, tell=told.append)
    inner.add(Rule(Fail(), verb="put", times=6))
    threads = [threading.Thread(target=store.put, args=(f"k/{n}", b"x")) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(inner.list("k/"))) == 3
    assert sum("again, after" in line for line in told) >= 1
