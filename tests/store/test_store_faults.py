"""The shipped fault double does what its rules say, and nothing else."""

import pytest

from farcast.errors import (
    IntegrityError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreFullError,
    StoreUnavailableError,
    StoreUnsupportedError,
)
from farcast.store import MemoryStore, probe_conditional_put
from farcast.store.testing import (
    Call,
    Crash,
    Delay,
    DropBytes,
    Fail,
    Fault,
    FaultStore,
    FlipBit,
    Freeze,
    LoseReply,
    Rule,
    Stale,
)


def test_fail_happens_before_and_lose_reply_after_the_write() -> None:
    store = FaultStore(None, Rule(Fail(), nth=1), Rule(LoseReply(), nth=2))
    with pytest.raises(StoreUnavailableError):
        store.put("k", b"1")
    assert list(store.inner.list("")) == []
    with pytest.raises(StoreUnavailableError):
        store.put("k", b"2")
    assert store.inner.get("k", max_bytes=1) == b"2"
    with pytest.raises(ObjectExistsError):
        store.put("k", b"2", if_absent=True)


def test_any_call_can_fail_by_its_number() -> None:
    for number in (1, 2, 3, 4):
        store = FaultStore()
        store.fail_call(number, Fail(StoreFullError("The test is full.")))
        done = 0
        calls = [
            lambda store=store: store.put("k", b"x"),
            lambda store=store: store.get("k", max_bytes=1),
            lambda store=store: list(store.list("")),
            lambda store=store: store.delete("k"),
        ]
        for call in calls:
            try:
                call()
                done += 1
            except StoreFullError:
                break
        assert done == number - 1


def test_rules_pick_by_verb_prefix_and_count() -> None:
    store = FaultStore(None, Rule(Fail(), verb="put", prefix="versions/", nth=2, times=2))
    for key, fails in (
        ("versions/1", False),
        ("objects/1", False),
        ("versions/2", True),
        ("versions/3", True),
        ("versions/4", False),
    ):
        if fails:
            with pytest.raises(StoreUnavailableError):
                store.put(key, b"x")
        else:
            store.put(key, b"x")
    store.add(Rule(Fail(), times=None))
    with pytest.raises(StoreUnavailableError):
        store.get("versions/1", max_bytes=1)
    store.clear()
    assert store.get("versions/1", max_bytes=1) == b"x"


def test_frozen_stays_frozen() -> None:
    store = FaultStore(None, Rule(Freeze(), nth=2))
    store.put("k", b"x")
    for _ in range(3):
        with pytest.raises(Crash):
            store.put("k2", b"x")
    assert [info.key for info in store.inner.list("")] == ["k"]
    assert not issubclass(Crash, Exception)


def test_flipped_bits_on_the_way_in_and_out() -> None:
    store = FaultStore(
        None, Rule(FlipBit(9), verb="put", prefix="in"), Rule(FlipBit(0), verb="get")
    )
    store.put("in", b"\0\0")
    store.put("out", b"\0\0")
    assert store.inner.get("in", max_bytes=2) == b"\0\2"
    assert store.get("out", max_bytes=2) == b"\1\0"
    assert store.get("out", max_bytes=2) == b"\0\0"


def test_a_dropped_chunk_lists_under_its_full_size() -> None:
    store = FaultStore(None, Rule(DropBytes(2, 3), verb="put"))
    store.put("k", b"0123456789")
    assert [info.size for info in store.list("")] == [10]
    assert store.get("k", max_bytes=10) == b"0156789"
    with pytest.raises(IntegrityError):
        store.get_range("k", 5, 5)


def test_stale_reads_show_what_was_there_before() -> None:
    store = FaultStore()
    store.put("latest", b"3")
    store.put("latest", b"4")
    store.put("new", b"x")
    store.add(Rule(Stale(), verb="get", nth=1, times=3), Rule(Stale(), verb="list"))
    assert store.get("latest", max_bytes=1) == b"3"
    assert store.get("latest", max_bytes=1) == b"3"
    with pytest.raises(ObjectNotFoundError):
        store.get("new", max_bytes=1)
    assert store.get("latest", max_bytes=1) == b"4"
    assert [info.key for info in store.list("")] == ["latest"]
    assert [info.key for info in store.list("")] == ["latest", "new"]


def test_delays_use_the_given_sleep() -> None:
    slept: list[float] = []
    store = FaultStore(None, Rule(Delay(2.5), verb="get"), sleep=slept.append)
    store.put("k", b"x")
    assert store.get("k", max_bytes=1) == b"x"
    assert slept == [2.5]


def test_the_log_tells_every_call_and_a_simulator_may_decide() -> None:
    def decide(call: Call) -> Fault | None:
        return Fail() if call.key == "bad" else None

    store = FaultStore(MemoryStore("sim"), decide=decide)
    store.put("k", b"abc", if_absent=True)
    with pytest.raises(StoreUnavailableError):
        store.get("bad", max_bytes=1)
    assert store.calls == (Call(1, "put", "k", 3, True), Call(2, "get", "bad"))
    assert store.counts() == {"put": 1, "get": 1}


def test_probe_reports_a_store_that_overwrites() -> None:
    class Overwriting(FaultStore):
        def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
            super().put(key, data, if_absent=if_absent and key == "never")

    store = Overwriting()
    with pytest.raises(StoreUnsupportedError, match="second create"):
        probe_conditional_put(store)
    assert list(store.list("")) == []


def test_probe_passes_other_errors_on_and_forgives_a_lost_reply() -> None:
    with pytest.raises(StoreFullError):
        probe_conditional_put(FaultStore(None, Rule(Fail(StoreFullError("Full.")), nth=1)))
