"""An autoscaler that asks `farcast advise` has the replicas that `farcast up` would have."""

from itertools import pairwise
from pathlib import Path

from farcast.config import RunConfig, encode_config
from farcast.errors import StoreUnavailableError
from farcast.fleet.advising import DECIDE_SECONDS, Advisor
from farcast.fleet.records import ReplicaRecord, StepRecord, TrainerRecord
from farcast.fleet.registry import Registry
from farcast.fleet.scaling import Limits
from farcast.gateway.advice_process import Advice
from farcast.lineage import RunRecord
from farcast.store import MemoryStore, Store, open_store
from farcast.store.archive import Archive
from farcast.store.testing import Fail, FaultStore, Rule
from relay_world import Child
from servers import free_ports
from serving_world import ask, wait_for


def start_run(store: Store) -> None:
    config = RunConfig(run_id="run", store="memory://", model="tiny", out="out")
    settings = encode_config(config).decode()
    Archive(store, "run").create_run(RunRecord(run_id="run", created="now", settings=settings))


class World:
    """A trainer that uses 3.2 trajectories a second, and as many replicas of one a second as the
    autoscaler was told, each there a turn later."""

    def __init__(self, limits: Limits, *, prefix: str = "", others: int = 0) -> None:
        self.store = FaultStore(MemoryStore())
        start_run(self.store)
        self.registry = Registry(self.store)
        self.now = 0.0
        self.said: list[str] = []
        advisor = Advisor(self.store, limits, tell=self.said.append, clock=lambda: self.now)
        self.advice = Advice(advisor, limits, prefix)
        self.names = [f"x{i}" for i in range(others)]
        self.made: dict[str, float] = {}
        self.trainer("training")
        for version in range(1, 4):
            self.registry.put_step(
                StepRecord(
                    version=version,
                    step=version,
                    root="0" * 64,
                    incarnation="a",
                    consumed=tuple(f"t{version}-{i}" for i in range(64)),
                    step_seconds=20.0,
                    waited_seconds=5.0,
                )
            )

    def trainer(self, state: str) -> None:
        record = TrainerRecord(run_id="run", state=state, version=3, step=3)  # type: ignore[arg-type]
        self.registry.write_trainer(record)

    def turn(self) -> int:
        own = [f"r{i}" for i in range(self.advice.wanted)]
        for name in (*own, *self.names):
            self.made[name] = self.made.get(name, 0.0) + DECIDE_SECONDS
            self.registry.write_replica(
                ReplicaRecord(
                    replica_id=name, state="serving", version=3, trajectories=int(self.made[name])
                )
            )
        self.now += DECIDE_SECONDS
        self.advice.look()
        return self.advice.wanted


def test_it_asks_for_what_the_trainer_needs_and_for_nobody_once_it_is_done() -> None:
    world = World(Limits(least=1, most=8))
    asked = [world.turn() for _ in range(6)]
    assert asked[-1] == 4  # 3.2 a second, and headroom
    assert asked == sorted(asked)
    assert max(b / a for a, b in pairwise(asked)) <= 2
    figures = world.advice.figures()
    assert (figures["serving_replicas"], figures["trainer_alive"]) == (4, True)
    world.store.add(Rule(Fail(StoreUnavailableError("away; wait")), verb="list"))
    assert world.turn() == 4
    world.trainer("done")
    assert world.turn() == 0


def test_what_others_have_started_is_not_asked_for_again() -> None:
    world = World(Limits(least=0, most=8), prefix="r", others=2)
    assert [world.turn() for _ in range(6)][-1] == 2


def test_the_command_answers_who_has_the_token(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    store = open_store(url)
    start_run(store)
    Registry(store).write_trainer(TrainerRecord(run_id="run", state="training", version=0, step=0))
    (port,) = free_ports(1)
    child = Child(
        tmp_path,
        "advise",
        *("advise", "--store", url, "--min", "3", "--max", "5", "--port", str(port)),
        *("--token-env", "FARCAST_TEST_TOKEN"),
    )
    try:
        wait_for(lambda: ask(port, "GET", "/health", token=None).status == 200)
        for path in ("/wanted", "/metrics", "/other"):
            assert ask(port, "GET", path, token=None).status == 401
        assert ask(port, "GET", "/wanted").json["wanted"] == 3
        assert ask(port, "GET", "/other").status == 404
        assert ask(port, "POST", "/wanted").status == 404
        metrics = ask(port, "GET", "/metrics").body.decode()
        assert "farcast_wanted_replicas 3.0" in metrics
        assert "farcast_trainer_alive 1.0" in metrics
        Registry(store).write_trainer(TrainerRecord(run_id="run", state="done", version=0, step=0))
        wait_for(lambda: ask(port, "GET", "/wanted").json["wanted"] == 0)
        assert child.stop() == 0
    finally:
        child.kill()
