"""What a sidecar and a gateway count, for Prometheus."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from farcast.engines.following import Commit

_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PAUSES = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Traffic:
    """Requests by route and status. Children are kept, since looking them up costs more than
    counting."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "farcast_requests", "Requests answered.", ["path", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "farcast_request_seconds",
            "Time to the end of an answer.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._children: dict[tuple[str, int], Counter] = {}
        self.disconnects = Counter(
            "farcast_disconnects", "Clients that left before the end.", registry=self.registry
        )

    def answered(self, path: str, status: int, seconds: float) -> None:
        """`path` is one of a fixed list: a client can't make up new series."""
        key = (path, status)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._requests.labels(path, str(status))
        child.inc()
        self._seconds.observe(seconds)

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
