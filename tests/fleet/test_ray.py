"""Processes of a run on real Ray clusters: one of this machine, and one of several nodes of which
one is lost. What runs is a stand-in for `python -m farcast`: a launcher must not care."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from farcast.errors import ConfigError
from farcast.fleet.crew import Crew
from farcast.fleet.launcher import QUIET_CHILD, Handle, ProcessSpec
from farcast.fleet.ray_launcher import NodeNeeds, RayLauncher

pytest.importorskip("ray")
pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]

STAND_IN = """
import os, signal, sys, threading, time
asked = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: asked.set())
threading.Thread(target=lambda: (sys.stdin.read(), asked.set()), daemon=True).start()
print("up", os.environ["OMP_NUM_THREADS"], *sys.argv[1:], flush=True)
open(os.path.join(os.environ["BOOK"], f"{sys.argv[2]}-{os.getpid()}"), "w").close()
if "fails" in sys.argv:
    print("farcast: nothing is as it should be.", flush=True)
    sys.exit(4)
if "stubborn" in sys.argv:
    asked.wait(); time.sleep(60)
asked.wait()
print("left", flush=True)
sys.exit(5)
"""


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., ProcessSpec]:
    package = tmp_path / "path" / "farcast"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(STAND_IN)
    (tmp_path / "book").mkdir()
    environment = {
        **QUIET_CHILD,
        "PYTHONPATH": str(package.parent),
        "BOOK": str(tmp_path / "book"),
    }

    def make(name: str, *more: str) -> ProcessSpec:
        return ProcessSpec(name, ("worker", name, *more), tmp_path / "log", environment)

    return make


def lives(tmp_path: Path, name: str) -> list[int]:
    """Process ids under which it ever ran."""
    return [int(path.name.rpartition("-")[2]) for path in (tmp_path / "book").glob(f"{name}-*")]


def running(tmp_path: Path, name: str) -> list[int]:
    return [pid for pid in lives(tmp_path, name) if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(what: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


@pytest.fixture
def launcher() -> Iterator[RayLauncher]:
    made = RayLauncher(needs=NodeNeeds(cpus=0.1))
    yield made
    made.close()


def test_a_life_on_a_cluster_of_one(
    launcher: RayLauncher, spec: Callable[..., ProcessSpec], tmp_path: Path
) -> None:
    one, fails, stubborn, four = (
        launcher.start(spec(*arguments))
        for arguments in (("one",), ("fails", "fails"), ("stub", "stubborn"), ("four",))
    )
    wait_for(lambda: launcher.words(one).startswith("up 1 worker one --tied"))
    assert launcher.node(one)
    assert wait_for(lambda: launcher.poll(fails)) == 4
    assert launcher.words(fails) == "farcast: nothing is as it should be."
    assert launcher.node(fails) == ""
    assert launcher.poll(one) is None
    launcher.ask(one)
    launcher.ask(one)
    assert launcher.stop(one, grace=20) == 5
    assert launcher.words(one) == "left"
    wait_for(lambda: lives(tmp_path, "stub"))
    assert launcher.stop(stubborn, grace=0.2) == -9
    wait_for(lambda: lives(tmp_path, "four"))
    again = launcher.restart(four, grace=20)
    assert launcher.poll(four) == 5
    wait_for(lambda: len(lives(tmp_path, "four")) == 2)
    assert list(launcher.list()) == [again]
    launcher.kill(again)
    assert launcher.poll(again) == -9
    assert running(tmp_path, "four") == []


def test_a_crew_on_a_cluster_goes_up_and_down_and_its_host_is_made_good(
    launcher: RayLauncher, spec: Callable[..., ProcessSpec], tmp_path: Path
) -> None:
    crew = Crew(launcher, spec, prefix="r", grace=20)
    crew.scale(3)
    for name in ("r1", "r2", "r3"):
        wait_for(lambda name=name: running(tmp_path, name))
    (before,) = running(tmp_path, "r1")
    host = psutil.Process(before).parent()
    assert host is not None
    host.kill()  # Ray's own process dies: its actor is made anew, and starts the process again
    wait_for(lambda: before not in running(tmp_path, "r1") and running(tmp_path, "r1"))
    assert crew.tend(None)[-1].kind == "started"  # nothing that the crew would have to mind
    crew.scale(1)
    wait_for(lambda: not running(tmp_path, "r2") and not running(tmp_path, "r3"))
    crew.close()
    assert running(tmp_path, "r1") == []


def test_a_lost_node_is_made_good_on_another(
    spec: Callable[..., ProcessSpec], tmp_path: Path
) -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": 10**8},
    )
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=10**8) for _ in range(2)]
    try:
        launcher = RayLauncher(cluster.address, needs=NodeNeeds(cpus=0.5))
        handles = [launcher.start(spec(name)) for name in ("a", "b", "c")]
        for name in "abc":
            wait_for(lambda name=name: running(tmp_path, name))
        places = {handle: launcher.node(handle) for handle in handles}
        assert len(set(places.values())) == 2
        lost = next(node for node in nodes if node.unique_id and node.node_id in places.values())
        moved = [handle for handle, place in places.items() if place == lost.node_id]
        before = {handle.name: running(tmp_path, handle.name) for handle in moved}
        cluster.remove_node(lost, allow_graceful=False)
        spare = cluster.add_node(num_cpus=1, object_store_memory=10**8)

        def is_back(handle: Handle) -> bool:
            now = running(tmp_path, handle.name)
            return len(now) == 1 and now != before[handle.name] and launcher.poll(handle) is None

        for handle in moved:
            wait_for(lambda handle=handle: is_back(handle), 120)
            assert wait_for(lambda handle=handle: launcher.node(handle)) != lost.node_id
        assert spare.node_id in {launcher.node(handle) for handle in handles}
        launcher.close()
        for name in "abc":
            assert running(tmp_path, name) == []
    finally:
        cluster.shutdown()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_an_address_where_nothing_is(address: str) -> None:
    with pytest.raises(ConfigError, match=f"There is no Ray cluster at {address};"):
        RayLauncher(address)
