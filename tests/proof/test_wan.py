"""`farcast bench wan`: the line it emulates, the versions it sends, and what it says of them."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from farcast.bench.suite import this_machine
from farcast.bench.wan import Effort, Hop, Late, WanReport, _scaled, measure, rate_for
from farcast.bench.wan_crowd import CrowdReport
from farcast.bench.wan_link import WanError, emulated
from farcast.bench.wan_proxy import Direction
from farcast.bench.wan_report import flat, show
from farcast.bench.wan_versions import Drift, cut, made, read_weights, write_weights
from farcast.bench.wan_ways import (
    FARCAST,
    FULL,
    SHARED,
    SharedFollower,
    publish_full,
    publish_shared,
)
from farcast.config import LinkConfig
from farcast.delta import TensorBits, entry_of, nbytes_of, root_of, words_of
from farcast.store import MemoryStore


def weights(elements: int, *, parts: int = 4, seed: int = 1) -> dict[str, TensorBits]:
    """bf16 of the usual sizes, in a few matrices."""
    rng = np.random.default_rng(seed)
    made: dict[str, TensorBits] = {}
    for index in range(parts):
        shape = (elements // parts // 64, 64)
        words = (rng.normal(0, 0.05, shape).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
        bits = TensorBits("BF16", shape, words.reshape(-1).view(np.uint8))
        made[f"model.layers.{index}.weight"] = bits
        assert bits.data.nbytes == nbytes_of("BF16", shape)
    return made


def test_the_line_is_to_the_model_as_ten_gigabit_to_a_trillion() -> None:
    assert rate_for(10**12) == 10e9 / 8
    assert rate_for(134_515_008) * 8e-6 == pytest.approx(1.345, abs=1e-3)


def test_bytes_of_all_connections_pass_one_after_the_other() -> None:
    direction = Direction(1000.0)
    assert direction.through(500, 10.0) == 10.5
    assert direction.through(500, 10.1) == 11.0
    assert direction.through(100, 20.0) == pytest.approx(20.1)
    assert Direction(0.0).through(1 << 30, 5.0) == 5.0


@contextlib.contextmanager
def talker(host: str, size: int) -> Iterator[int]:
    """A server that answers every byte with `size` bytes."""
    with socket.create_server((host, 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        while connection.recv(1):
                            connection.sendall(b"x" * size)

        threading.Thread(target=serve, daemon=True).start()
        yield int(server.getsockname()[1])


def test_a_proxied_line_is_as_slow_as_it_says() -> None:
    size, link = 20_000, LinkConfig(rate=100_000, rtt=0.1)
    with (
        emulated(link, namespaces=False) as wan,
        talker(wan.host, size) as port,
        wan.proxied(port) as url,
    ):
        assert not wan.shaped
        near = int(url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", near)) as line:
            seconds = [asked(line, size) for _ in range(2)]
    # At least so much: a busy machine adds to it. The first also makes the connection.
    assert seconds[0] >= 0.4
    assert seconds[1] >= 0.3


def asked(line: socket.socket, size: int) -> float:
    began = time.monotonic()
    line.sendall(b"?")
    got = 0
    while got < size:
        got += len(line.recv(1 << 16))
    return time.monotonic() - began


def test_a_namespace_that_cannot_be_made_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    link = LinkConfig(rate=1e5, rtt=0.0)
    with pytest.raises(WanError, match="namespace"), emulated(link, namespaces=True):
        raise AssertionError("it was made")
    with emulated(link) as wan:
        assert "user space" in wan.how


def test_the_shared_format_and_the_full_copy_carry_what_they_should() -> None:
    base = weights(4096)
    (change,) = made(base, 1, density=0.01)
    store = MemoryStore()
    follower = SharedFollower(store, base, 0)
    assert follower.advance() is None
    assert publish_shared(store, change, 1) > 0
    assert follower.advance() == 1
    assert follower.root() == root_of({n: entry_of(b) for n, b in change.target.items()})
    assert publish_full(store, change, 1, 1 << 30) == (change.nbytes, change.nbytes)
    assert publish_full(store, change, 2, 5000) == (5000, change.nbytes)
    pieces = [
        info.size for info in store.list("pieces/") if info.key.startswith("pieces/000000000002")
    ]
    assert sum(pieces) == 5000


def test_simulated_weights_go_back_and_forth_like_recorded_ones(tmp_path: Path) -> None:
    base = weights(1 << 16)
    drift = Drift(base)
    states = [drift.tensors]
    for _ in range(6):
        drift.step()
        states.append(drift.tensors)

    def changed(first: int, last: int) -> int:
        pairs = ((states[first][name], states[last][name]) for name in base)
        return sum(int(np.count_nonzero(words_of(a) != words_of(b))) for a, b in pairs)

    single = sum(changed(i, i + 1) for i in range(6))
    assert 0.0005 < single / 6 / (1 << 16) < 0.01
    assert changed(0, 6) < 0.9 * single
    assert sorted(cut(base, 1 << 15)) == sorted(base)[:2]
    write_weights(tmp_path / "w", states[-1])
    assert {n: b.data.tobytes() for n, b in read_weights(tmp_path / "w").items()} == {
        n: b.data.tobytes() for n, b in states[-1].items()
    }


def hop(way: str, seconds: float, limit: float, share: float = 1.0) -> Hop:
    return Hop(
        way=way,
        hop="0-1",
        seconds=seconds,
        publish_seconds=0.1,
        apply_seconds=0.2,
        limit_seconds=limit,
        bytes=1e5,
        requests=3,
        measured_share=share,
    )


def test_the_report_has_the_figures_by_name() -> None:
    crowd = CrowdReport(
        replicas=10,
        versions=1,
        failing=0.0,
        requests_per_replica_per_version=4.0,
        lists_after_start=0,
        polls_to_converge=1,
        first_tries_peak=0.1,
        behind=0,
    )
    hops = [hop(FARCAST, 6, 5), hop(SHARED, 18, 15), hop(FARCAST, 8, 5), hop(SHARED, 20, 15)]
    late = [
        Late(way=w, squash=s, upload=1.0, versions=200, seconds=x, bytes=b, requests=9, objects=4)
        for w, s, x, b in (
            ("2", 2, 2.0, 20),
            ("4", 4, 3.0, 30),
            ("chain", None, 10.0, 100),
            ("a", None, 30.0, 500),
        )
    ]
    report = WanReport(
        data="tests",
        how="by hand",
        link=LinkConfig(rate=1e5, rtt=0.08),
        parameters=10**6,
        bytes_full=2 * 10**6,
        replicas=4,
        poll_seconds=1.0,
        hops=[*hops, hop(FULL, 600, 500, 0.01)],
        late=late,
        late_parameters=10**5,
        crowd=crowd,
        failing_crowd=crowd,
        machine=this_machine(),
        quick=True,
    )
    found = flat(report)
    assert found["seconds_farcast"] == 7
    assert found["speedup_over_shared_format"] == 2.75
    assert found["over_physical_limit"] == pytest.approx(1.4)
    assert found["catchup_bytes_over_chain"] == 0.2
    assert found["catchup_objects"] == 4
    assert found["requests_per_replica_per_version"] == 4
    assert found["polls_to_converge"] == 1
    msgspec.json.encode(found)
    console = Console(record=True, width=120)
    show(report, console)
    said = console.export_text()
    assert "bytes count 4 times" in said
    assert "over physical limit: 1.40 (wanted <= 1.3), missed" in said


def test_a_part_of_a_copy_is_scaled_by_its_bytes_and_the_fixed_time_once() -> None:
    link = LinkConfig(rate=1e5, rtt=0.08)
    fixed = 4 * 0.08 + 0.5
    whole = _scaled(hop(FULL, fixed + 10, fixed + 8), 0.1, link)
    assert whole.seconds == pytest.approx(fixed + 100)
    assert whole.limit_seconds == pytest.approx(fixed + 80)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_measured_from_end_to_end() -> None:
    base = weights(1 << 24, parts=64)
    effort = Effort(1, 1.0, 16 << 10, 16, 1 << 18, 50, 1)
    said: list[str] = []
    report = measure(base, made(base, 1), "tests", effort, quick=True, say=said.append)
    found = flat(report)
    assert [h.way for h in report.hops] == [FARCAST, SHARED, FULL]
    assert float(str(found["seconds_shared_format"])) > report.hops[1].limit_seconds * 0.8
    assert report.hops[0].bytes < report.hops[1].bytes
    assert [late.objects for late in report.late] == [1, 1, 16, 1]
    assert len(said) > 5
