import threading
import time

import pytest

from farcast.engines.gate import Gate


def test_a_commit_passes_a_busy_sampler() -> None:
    gate, stop, committed = Gate(), threading.Event(), threading.Event()

    def sample() -> None:
        while not stop.is_set():
            with gate.step():
                time.sleep(0.002)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        for _ in range(20):
            with gate.commit():
                committed.set()
        assert committed.is_set()
    finally:
        stop.set()
        sampler.join(5)


def test_steps_and_commits_never_overlap() -> None:
    gate, inside, worst = Gate(), [0], [0]

    def enter(kind: str) -> None:
        for _ in range(200):
            with gate.step() if kind == "step" else gate.commit():
                inside[0] += 1
                worst[0] = max(worst[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=enter, args=(k,)) for k in ("step", "commit", "step")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert worst[0] == 1


def test_an_error_inside_opens_the_gate_again() -> None:
    gate = Gate()
    for enter in (gate.step, gate.commit):
        with pytest.raises(RuntimeError), enter():
            raise RuntimeError
    with gate.step():
        pass
