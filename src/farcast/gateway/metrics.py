"""What a sidecar and a gateway count, for Prometheus."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from farcast.engines.following import Commit

_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PAUSES = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Traffic(Collector):
    """Requests by route and status, and how long they took. Plain numbers of the event loop's own
    thread, put into Prometheus's form when somebody asks: its counters lock at each step."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.disconnects = 0
        """Clients that left before the end."""
        self._answered: dict[tuple[str, int], int] = {}
        self._buckets = [0] * (len(_SECONDS) + 1)
        self._seconds = 0.0
        self._counts: list[tuple[str, str, Callable[[], float]]] = []

    def answered(self, path: str, status: int, seconds: float) -> None:
        """`path` is one of a fixed list: a client can't make up new series."""
        key = (path, status)
        self._answered[key] = self._answered.get(key, 0) + 1
        self._buckets[bisect_left(_SECONDS, seconds)] += 1
        self._seconds += seconds

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "farcast_requests", "Requests answered.", labels=["path", "status"]
        )
        for (path, status), count in self._answered.items():
            requests.add_metric([path, str(status)], count)
        yield requests
        yield CounterMetricFamily(
            "farcast_disconnects", "Clients that left before the end.", value=self.disconnects
        )
        limits = [*map(str, map(float, _SECONDS)), "+Inf"]
        yield HistogramMetricFamily(
            "farcast_request_seconds",
            "Time to the end of an answer.",
            buckets=list(zip(limits, accumulate(self._buckets), strict=True)),
            sum_value=self._seconds,
        )
        for name, help, value in self._counts:
            yield CounterMetricFamily(name, help, value=value())

    def count(self, name: str, help: str, value: Callable[[], float]) -> None:
        """A number that only grows."""
        self._counts.append((name, help, value))

    def gauge(self, name: str, help: str, value: Callable[[], float]) -> None:
        Gauge(name, help, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class Commits:
    """Versions that went live."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._pause = Histogram(
            "farcast_commit_pause_seconds",
            "How long the engine stood still for a commit.",
            buckets=_PAUSES,
            registry=registry,
        )
        self._staging = Histogram(
            "farcast_staging_seconds",
            "Fetching, decoding and verifying a version while the one before was served.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._bytes = Counter(
            "farcast_fetched_bytes", "Bytes of versions from the store.", registry=registry
        )

    def committed(self, commit: Commit) -> None:
        self._pause.observe(commit.pause_seconds)
        self._staging.observe(commit.staged_seconds)
        self._bytes.inc(commit.bytes_fetched)
