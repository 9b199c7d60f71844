"""A publish that goes on while the trainer does."""

from concurrent.futures import Future

from farcast.publish.reports import PublishReport
from farcast.types import VersionRef


class PublishJob:
    """One version on its way. Its error, if any, is raised by `result`, and left the baseline
    as it was: the next version carries its changes too."""

    def __init__(self, future: Future[PublishReport]) -> None:
        self._future = future

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> VersionRef:
        """Wait for the version to be durable. Raises `TimeoutError` after `timeout` seconds."""
        return self._future.result(timeout).ref

    def report(self, timeout: float | None = None) -> PublishReport:
        """Like `result`, with what it took."""
        return self._future.result(timeout)
