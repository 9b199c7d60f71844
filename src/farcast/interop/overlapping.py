"""Publishing beside a training loop that is not ours: the next step runs while a version goes up.

An outage of the store is no reason to end somebody's training: a version that failed in a way that
may pass is told, and the next one carries its changes too. Any other failure is raised, one step
late at most. `finish` is strict: when it returns, the last step is durable.
"""

import logging

from farcast.errors import FarcastError
from farcast.publish import Publisher, PublishJob
from farcast.publish.publisher import Tensors

_LOG = logging.getLogger(__name__)


class Overlapped:
    """A publisher with one version on its way. For one thread."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._job: PublishJob | None = None
        self.failures = 0
        """Versions that did not reach the store; a later one carried what they held."""

    def publish(self, tensors: Tensors, step: int) -> None:
        """Start to publish; returns once the tensors are copied."""
        self.settle()
        self._job = self._publisher.publish_async(tensors, step)

    def finish(self, tensors: Tensors, step: int) -> None:
        """Wait for what is on its way, and publish `step` if it did not arrive."""
        self.settle()
        self._publisher.publish(tensors, step)

    def settle(self) -> None:
        """Wait for the version on its way, if there is one."""
        job, self._job = self._job, None
        if job is None:
            return
        try:
            job.result()
        except FarcastError as error:
            if not error.retry:
                raise
            self.failures += 1
            _LOG.warning("A version was not published: %s The next one carries its changes.", error)
