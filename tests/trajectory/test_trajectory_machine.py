"""Model-based: workers that crash, a trainer that crashes, and a store that fails and loses
replies. At every moment each acknowledged id is in exactly one place: in a committed step, in
the committed drops, or still to come."""

from concurrent.futures import wait
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from farcast.errors import StoreUnavailableError
from farcast.store.testing import Call, Fail, Fault, FaultStore, LoseReply
from farcast.trajectory import GroupBatcher, TrajectoryReceiver, TrajectorySender
from trajectory_world import RUN, episode, ids

WORKERS = ("w0", "w1", "w2")
SIZE = 3


class Home(RuleBasedStateMachine):
    @initialize(every=st.integers(2, 12), shift=st.integers(0, 11), lost=st.booleans())
    def start(self, every: int, shift: int, lost: bool) -> None:
        def decide(call: Call) -> Fault | None:
            if not self.faulty or (call.number + shift) % every:
                return None
            return LoseReply() if lost else Fail()

        self.faulty = True
        self.store = FaultStore(decide=decide)
        self.count = 0
        self.acknowledged: set[str] = set()
        self.written: dict[str, list[list[Any]]] = {worker: [] for worker in WORKERS}
        self.senders = {worker: self.sender(worker) for worker in WORKERS}
        self.used: list[str] = []
        self.dropped: list[str] = []
        self.saved: tuple[Any, ...] | None = None
        self.boot()
        self.checkpoint()

    def sender(self, worker: str) -> TrajectorySender:
        return TrajectorySender(self.store, RUN, worker)

    def boot(self) -> None:
        self.receiver = TrajectoryReceiver(self.store, RUN)
        self.batcher = GroupBatcher(RUN, max_staleness=1, group_timeout=1e9)

    @rule(worker=st.sampled_from(WORKERS), version=st.integers(2, 5), parts=st.integers(1, SIZE))
    def submit(self, worker: str, version: int, parts: int) -> None:
        """A group, in `parts` submissions; what fails is tried again later."""
        self.count += 1
        name = f"{worker}-{self.count}"
        group = [
            episode(f"{name}-{i}", worker=worker, group=name, size=SIZE, version=version)
            for i in range(SIZE)
        ]
        self.written[worker] += [group[i::parts] for i in range(parts)]
        self.retry(worker)

    @rule(worker=st.sampled_from(WORKERS))
    def retry(self, worker: str) -> None:
        while self.written[worker]:
            try:
                self.senders[worker].submit_many(self.written[worker][0])
            except StoreUnavailableError:
                return
            self.acknowledged |= set(ids(self.written[worker].pop(0)))

    @rule(worker=st.sampled_from(WORKERS))
    def repeat(self, worker: str) -> None:
        """A worker that was not told that it is done already."""
        for name in list(self.acknowledged)[:1]:
            if name.startswith(worker):
                group = name.rsplit("-", 1)[0]
                self.written[worker].insert(
                    0, [episode(name, worker=worker, group=group, size=SIZE)]
                )
        self.retry(worker)

    @rule(worker=st.sampled_from(WORKERS))
    def restart_worker(self, worker: str) -> None:
        """Its memory is gone; what it had not sent, it may send again."""
        self.senders[worker] = self.sender(worker)

    @rule(most=st.integers(1, 10))
    def consume(self, most: int) -> None:
        try:
            arrived = self.receiver.consume(most)
        except StoreUnavailableError:
            return
        finally:
            self.settle()
        self.batcher.add(arrived, now=0)

    @rule()
    def prefetch(self) -> None:
        self.receiver.prefetch()
        self.settle()

    def settle(self) -> None:
        """Nothing is under way, so that a failing example can be replayed."""
        wait(self.receiver._coming.values())

    @rule(groups=st.integers(1, 2), version=st.integers(5, 6))
    def step(self, groups: int, version: int) -> None:
        for group in self.batcher.take(groups, version=version, now=0):
            assert len(group.members) == SIZE
            self.used += ids(list(group.members))
        for left in self.batcher.drain_dropped().values():
            self.dropped += left

    @rule()
    def checkpoint(self) -> None:
        self.saved = (
            self.receiver.state(),
            self.batcher.state(now=0),
            list(self.used),
            list(self.dropped),
        )

    @rule()
    @precondition(lambda self: self.saved is not None)
    def crash_trainer(self) -> None:
        assert self.saved is not None
        state, pending, used, dropped = self.saved
        self.boot()
        self.receiver.restore(state)
        self.batcher.restore(pending, now=0)
        self.used, self.dropped = list(used), list(dropped)

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        self.faulty = False
        for worker in WORKERS:
            self.retry(worker)
        while arrived := self.receiver.consume(50):
            self.batcher.add(arrived, now=0)
        while groups := self.batcher.take(1, version=5, now=0):
            self.used += ids(list(groups[0].members))
        self.batcher.take(1, version=5, now=1e10)
        for left in self.batcher.drain_dropped().values():
            self.dropped += left
        counted = sorted(self.used + self.dropped)
        assert counted == sorted(self.acknowledged)
        assert self.batcher.waiting == 0
        self.receiver.close()


Home.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestHome = Home.TestCase
