"""Processes of a run on the nodes of a Ray cluster.

Each process has a Ray actor, its host, wherever the cluster has room. Two things may happen to
it, and each has one who minds it. A node that is lost takes its hosts along: **Ray** makes them
anew on other nodes, up to `max_restarts` times each. A process that ends by itself is told by
`poll`: **who started it** decides. A node that was only cut off may go on for a while beside its
replacement; both write under one name, and everything counts once.

The cluster's nodes need farcast, and the store's credentials in the environment of `ray start`:
nothing secret passes through Ray, whose dashboard shows what does. Whoever reaches a Ray cluster
may run code on it, so keep its ports to itself. This process is the driver: its actors end with it.
"""

import itertools
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from farcast.errors import ConfigError, MissingDependencyError
from farcast.fleet.launcher import Handle, ProcessSpec

MAX_RESTARTS = 8
"""A spot machine may go several times a day; one process that goes more often is given up."""

ANSWER_SECONDS = 0.5
"""A host that does not answer at once is busy, waits for room, or is on its way to another node."""

CONNECT_SECONDS = 10.0

LOST = -9
"""The status of a process whose host is gone for good: as if it had been killed."""


class NodeNeeds(NamedTuple):
    """What one process takes of a node, in Ray's units."""

    cpus: float = 1.0
    gpus: float = 0.0
    resources: Mapping[str, float] = {}


class _Hosted:
    """A process and what was last heard of it."""

    def __init__(self, spec: ProcessSpec, actor: Any) -> None:
        self.spec = spec
        self.actor = actor
        self.status: int | None = None
        self.asking: Any = None
        self.words = ""


class RayLauncher:
    """Hosts on the cluster at `address` ("auto": the one this machine belongs to; None: one of
    this machine alone, started here and ended by `close`)."""

    def __init__(
        self,
        address: str | None = None,
        *,
        needs: NodeNeeds = NodeNeeds(),  # noqa: B008 - a constant
        max_restarts: int = MAX_RESTARTS,
    ) -> None:
        self._ray = _connected(address)
        self._host = _host_class(self._ray, needs, max_restarts)
        self._hosted: dict[Handle, _Hosted] = {}
        self._numbers = itertools.count(1)

    def start(self, spec: ProcessSpec) -> Handle:
        actor = self._host.remote(spec.arguments, dict(spec.environment))
        handle = Handle(spec.name, next(self._numbers))
        self._hosted[handle] = _Hosted(spec, actor)
        return handle

    def list(self) -> Sequence[Handle]:
        return [handle for handle in self._hosted if self.poll(handle) is None]

    def node(self, handle: Handle) -> str:
        """The id of the node where it runs, "" if that is not known just now."""
        hosted = self._hosted[handle]
        if hosted.status is not None:
            return ""
        found: str = self._answer(hosted.actor.node.remote(), "")
        return found

    def poll(self, handle: Handle) -> int | None:
        hosted = self._hosted[handle]
        if hosted.status is None:
            hosted.status = self._heard(hosted)
            if hosted.status is not None:
                self._release(hosted)
        return hosted.status

    def words(self, handle: Handle) -> str:
        hosted = self._hosted[handle]
        if hosted.status is None:
            hosted.words = self._answer(hosted.actor.words.remote(), hosted.words)
        return hosted.words

    def kill(self, handle: Handle) -> None:
        hosted = self._hosted[handle]
        if hosted.status is None:
            hosted.status = self._answer(hosted.actor.kill.remote(), LOST, seconds=5.0)
            self._release(hosted)

    def ask(self, handle: Handle) -> None:
        if self._hosted[handle].status is None:
            self._hosted[handle].actor.ask.remote()

    def stop(self, handle: Handle, *, grace: float) -> int:
        hosted = self._hosted[handle]
        if hosted.status is None:
            self.ask(handle)
            waiting = hosted.actor.wait.remote(grace)
            hosted.status = self._answer(waiting, None, seconds=grace + ANSWER_SECONDS)
            if hosted.status is None:
                self.kill(handle)
            else:
                self._release(hosted)
        return LOST if hosted.status is None else hosted.status

    def restart(self, handle: Handle, *, grace: float) -> Handle:
        self.stop(handle, grace=grace)
        return self.start(self._hosted[handle].spec)

    def close(self) -> None:
        for hosted in self._hosted.values():
            if hosted.status is None:
                hosted.actor.kill.remote()
        for handle in self._hosted:
            self.kill(handle)
        self._hosted.clear()
        self._ray.shutdown()

    # --- inside ------------------------------------------------------------------------------

    def _heard(self, hosted: _Hosted) -> int | None:
        """A question that was not answered in time is waited for by the next poll."""
        errors = self._ray.exceptions
        if hosted.asking is None:
            hosted.asking = hosted.actor.poll.remote()
        try:
            status: int | None = self._ray.get(hosted.asking, timeout=ANSWER_SECONDS)
        except errors.GetTimeoutError:
            return None
        except errors.ActorUnavailableError:  # on its way to another node
            status = None
        except errors.RayActorError as error:  # for good, or it never came up
            hosted.words = next((x for x in reversed(str(error).splitlines()) if x.strip()), "")
            status = LOST
        hosted.asking = None
        return status

    def _answer(self, reference: Any, otherwise: Any, *, seconds: float = ANSWER_SECONDS) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference, timeout=seconds)
        except (errors.GetTimeoutError, errors.RayActorError):
            return otherwise

    def _release(self, hosted: _Hosted) -> None:
        """Give its place on the node to others, with its last words kept."""
        hosted.words = self._answer(hosted.actor.words.remote(), hosted.words)
        self._ray.kill(hosted.actor, no_restart=True)


def _connected(address: str | None) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise MissingDependencyError(
            "Launching on Ray needs ray; install it with `pip install 'farcast[ray]'`."
        ) from error
    if address is not None:
        _reach(address)
    # One of our own is for this machine alone, so it listens there alone.
    alone = {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    try:
        ray.init(
            **(alone if address is None else {"address": address}),
            namespace="farcast",
            log_to_driver=False,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _no_cluster(address) from error
    return ray


def _reach(address: str) -> None:
    """Ray itself would try for minutes."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator or not port.isdecimal():
        return  # "auto", which Ray looks up
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address) from error


def _no_cluster(address: str | None) -> ConfigError:
    return ConfigError(
        f"There is no Ray cluster at {address or 'this machine'}; start one with "
        "`ray start --head`, or correct the address."
    )


def _host_class(ray: Any, needs: NodeNeeds, max_restarts: int) -> Any:
    from farcast.fleet.ray_host import ProcessHost

    return ray.remote(
        num_cpus=needs.cpus,
        num_gpus=needs.gpus,
        resources=dict(needs.resources),
        max_restarts=max_restarts,
        # `wait` takes as long as the process; others ask meanwhile.
        max_concurrency=4,
    )(ProcessHost)
