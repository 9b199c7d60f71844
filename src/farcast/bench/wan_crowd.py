"""A thousand replicas on one store, in one process and in virtual time.

Each replica is a real `Subscriber` with the real `Pace`; only the clock is made up, and a request
takes no time. All start in the same moment, the worst case. What is asked:

    requests         per replica and version, without those of polls that found nothing; the
                     question right after a version, whether there is more, counts
    polls            from publication until the last replica is live; with failing calls too
    lists            after the start: none
    first tries      the largest share of replicas that first ask for a version in the same tenth
                     of a poll interval; 0.1 is even, 1 is a herd
"""

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import numpy as np

from farcast.engines.pace import Pace
from farcast.errors import FarcastError
from farcast.publish import Publisher
from farcast.replica import MemoryTarget, Subscriber
from farcast.store import CountingStore, MemoryStore
from farcast.store.testing import Call, Fail, Fault, FaultStore

RUN = "crowd"
POLLS_PER_VERSION = 5
BINS = 10


class CrowdReport(msgspec.Struct, frozen=True, kw_only=True):
    """See the module. `behind` are replicas that were not at the newest version in the end."""

    replicas: int
    versions: int
    failing: float
    requests_per_replica_per_version: float
    lists_after_start: int
    polls_to_converge: int
    first_tries_peak: float
    behind: int


@dataclass
class _Replica:
    subscriber: Subscriber
    store: CountingStore
    pace: Pace
    version: int = -1
    quiet: int = 0
    moved: bool = False
    at_start: int = 0
    lists_at_start: int = 0
    polls: Counter[int] = field(default_factory=Counter)
    first_tries: dict[int, float] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return self.store.traffic.total_requests

    @property
    def lists(self) -> int:
        return self.store.traffic.requests.get("list", 0)

    def wake(self, now: float, newest: int, published: float) -> float:
        """Ask once, for `newest` which is there since `published`; returns when to ask next."""
        if self.version < newest:
            self.polls[newest] += 1
            self.first_tries.setdefault(newest, now - published)
        before = self.requests
        try:
            staged = self.subscriber.stage()
            if staged is None:
                if self.version >= 0 and not self.moved:
                    self.quiet += self.requests - before
                self.moved = False
                return now + self.pace.after_quiet()
            self.version = self.subscriber.commit(staged).version
        except FarcastError as error:
            if not error.retry:
                raise
            return now + self.pace.after_failure()
        if not self.at_start:
            self.at_start, self.lists_at_start = self.requests, self.lists
        self.pace.moved()
        self.moved = self.version > 0
        return now


def simulate(
    *, replicas: int, versions: int, failing: float = 0.0, seed: int = 0, poll_seconds: float = 1.0
) -> CrowdReport:
    """`versions` after the first, one every `POLLS_PER_VERSION` polls."""
    chance = random.Random(seed)
    below = MemoryStore()
    publisher = Publisher(below, RUN, squash=4)
    weights = {"w": np.arange(256, dtype=np.uint16)}
    publisher.publish(weights, step=0)

    def decide(_: Call) -> Fault | None:
        return Fail() if chance.random() < failing else None

    crowd = [_make(FaultStore(below, decide=decide), seed + place) for place in range(replicas)]
    queue = [(0.0, place) for place in range(replicas)]
    newest, published, gap = 0, 0.0, POLLS_PER_VERSION * poll_seconds
    end = (versions + 2) * gap
    while queue[0][0] < end:
        now, place = heapq.heappop(queue)
        if newest < versions and now >= published + gap:
            newest, published = newest + 1, published + gap
            weights["w"][newest % 256] += 1
            publisher.publish(weights, step=newest)
        heapq.heappush(queue, (crowd[place].wake(now, newest, published), place))
    return _report(crowd, versions, failing, poll_seconds)


def _make(store: FaultStore, seed: int) -> _Replica:
    counted = CountingStore(store)
    subscriber = Subscriber(counted, RUN, MemoryTarget(), workers=1)
    return _Replica(subscriber, counted, Pace(1.0, random.Random(seed)))


def _report(
    crowd: list[_Replica], versions: int, failing: float, poll_seconds: float
) -> CrowdReport:
    spent = sum(replica.requests - replica.at_start - replica.quiet for replica in crowd)
    peaks = []
    for version in range(1, versions + 1):
        tries = [r.first_tries[version] for r in crowd if version in r.first_tries]
        bins = Counter(int(BINS * wait / poll_seconds) for wait in tries)
        peaks.append(max(bins.values(), default=0) / len(crowd))
    return CrowdReport(
        replicas=len(crowd),
        versions=versions,
        failing=failing,
        requests_per_replica_per_version=spent / len(crowd) / versions,
        lists_after_start=sum(replica.lists - replica.lists_at_start for replica in crowd),
        polls_to_converge=max(n for r in crowd for v, n in r.polls.items() if v),
        first_tries_peak=max(peaks),
        behind=sum(replica.version != versions for replica in crowd),
    )
