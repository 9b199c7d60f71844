"""The sidecar's process: an engine's listener, gate, watch and reconciler, put together.

    event loop       listener, gate's waiting requests, watch over the engine
    farcast-follow   newest manifest -> plan -> fetch -> verify -> stage -> commit under the gate
    farcast-report   the replica's record in the store, a receipt for each commit

The engine keeps serving while a version is staged. Ends with an error, for a supervisor to
replace engine and sidecar, once nothing can be said any more about the engine's weights.
"""

import asyncio
import sys
import time
from collections.abc import Mapping

import uvloop

from farcast.engines.admission import AdmissionGate
from farcast.engines.following import Commit, Follower
from farcast.errors import ConfigError, EngineUnreachableError
from farcast.fleet.connecting import ReplicaStore
from farcast.fleet.finding import open_archive
from farcast.fleet.registry import Registry
from farcast.fleet.reporting import ReplicaReporter
from farcast.fleet.saying import say
from farcast.fleet.signals import StopRequest
from farcast.gateway.backends import Backend, open_backend
from farcast.gateway.engine_watch import EngineWatch
from farcast.gateway.listening import Listener, settle_memory
from farcast.gateway.metrics import Commits, Traffic
from farcast.gateway.routes import ROUTES
from farcast.gateway.sidecar import Sidecar
from farcast.gateway.sidecar_options import SidecarOptions
from farcast.gateway.upstream import Upstream
from farcast.replica import Subscriber

LOOK_SECONDS = 0.2

COMMIT_SECONDS = 60.0
"""More than any pause of an engine that still answers."""

SWITCH_SECONDS = 0.001
"""How long the staging thread may keep the interpreter from the event loop; Python's own 5 ms
would be added to the latency of every request meanwhile."""


def serve_replica(options: SidecarOptions, stop: StopRequest) -> None:
    """Serve until `stop` is requested, then let those in flight finish."""
    if options.host in ("0.0.0.0", "::", "") and options.advertise is None:
        raise ConfigError("Say with --advertise URL under which address others reach this replica.")
    store = options.reach.open()
    run_id = open_archive(store, options.reach.trusted).run_id
    backend = open_backend(
        options.kind,
        options.engine_url,
        options.model,
        caches=options.caches,
        engine_token=options.engine_token,
        scratch=options.scratch,
    )
    subscriber = Subscriber(
        store,
        run_id,
        backend.target,
        served_format=options.reach.served_format,
        trusted_key=options.reach.trusted,
        on_expiry=options.reach.on_expiry,
    )
    sys.setswitchinterval(SWITCH_SECONDS)
    settle_memory()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_Process(options, store, backend, subscriber).run(stop))


class _Process:
    """One life of a sidecar. Made outside the loop, run inside."""

    def __init__(
        self,
        options: SidecarOptions,
        store: ReplicaStore,
        backend: Backend,
        subscriber: Subscriber,
    ) -> None:
        self._options = options
        self._store = store
        self._backend = backend
        self._subscriber = subscriber
        self._traffic = Traffic()
        self._commits = Commits(self._traffic.registry)
        self._gate = AdmissionGate(
            lambda: subscriber.ref,
            mode=options.mode,
            limit=options.limit,
            drain_seconds=options.drain_seconds,
            on_change=self._gate_changed,
        )
        self._follower = Follower(
            subscriber,
            self._gate.commit,
            poll_seconds=options.poll_seconds,
            on_commit=self._committed,
            on_held=self._held,
        )
        self._sidecar: Sidecar | None = None
        self._reporter: ReplicaReporter | None = None

    async def run(self, stop: StopRequest) -> None:
        options, gate = self._options, self._gate
        watch = EngineWatch(
            self._backend.engine, options.engine_url, gate, self._subscriber.target.forget
        )
        unix = options.engine_url.removeprefix("unix:")
        behind_socket = unix != options.engine_url
        upstream = Upstream(unix if behind_socket else None)
        self._sidecar = Sidecar(
            gate,
            upstream,
            "http://engine" if behind_socket else options.engine_url,
            ROUTES[options.kind],
            options.token,
            engine_token=options.engine_token,
            traffic=self._traffic,
            salts=options.caches == "salt",
            suspect=watch.suspect,
            describe=self._describe,
        )
        self._gauges()
        listener = Listener(self._sidecar.handle, options.host, options.port)
        await listener.start()
        url = options.advertise or listener.url
        say(f"listens on {listener.url} before {options.kind} at {options.engine_url}")
        with ReplicaReporter(
            Registry(self._store),
            options.replica_id,
            traffic=self._store,
            url=url,
        ) as self._reporter:
            watching = asyncio.ensure_future(watch.run())
            try:
                await self._until_stopped(stop, watch, watching)
                await self._drain()
            finally:
                await self._leave_engine()
                watching.cancel()
                await listener.stop()
                await upstream.close()

    async def _until_stopped(
        self, stop: StopRequest, watch: EngineWatch, watching: "asyncio.Future[None]"
    ) -> None:
        began, following = time.monotonic(), False
        while not stop.requested:
            self._check()
            if watching.done():
                await watching
            if watch.seen.is_set() and not following:
                self._follower.start()
                following = True
            if not following and time.monotonic() - began > self._options.engine_seconds:
                raise EngineUnreachableError(
                    f"No engine answered at {self._options.engine_url} within "
                    f"{self._options.engine_seconds:.0f} s; start it, or correct --engine-url."
                )
            self._report_state()
            await asyncio.sleep(LOOK_SECONDS)

    def _check(self) -> None:
        if self._follower.failure is not None:
            raise self._follower.failure
        if self._reporter is not None:
            self._reporter.check()

    async def _drain(self) -> None:
        """Let in no more, and wait for those inside. The record says it, so that gateways turn
        elsewhere before the listener is gone."""
        self._gate.close()
        if self._reporter is not None:
            self._reporter.state("draining")
        say(f"stops after {self._gate.in_flight} requests")
        until = time.monotonic() + self._options.drain_seconds
        while self._gate.in_flight and time.monotonic() < until:
            await asyncio.sleep(LOOK_SECONDS / 4)

    async def _leave_engine(self) -> None:
        """Not in the middle of a commit. The requests that it waits for are cut off by the gate."""
        patience = self._options.drain_seconds + COMMIT_SECONDS
        if not await asyncio.to_thread(self._follower.leave, patience):
            say("stops in the middle of a commit; replace the engine too")

    def _report_state(self) -> None:
        if self._reporter is None:
            return
        if self._gate.ref is None:
            self._reporter.state("joining" if self._gate.held is None else "waiting")
        else:
            self._reporter.state("staging" if self._follower.staging else "serving")

    # --- in the follower's thread ------------------------------------------------------------

    def _committed(self, commit: Commit) -> None:
        self._commits.committed(commit)
        say(f"serves {commit.ref} after a pause of {commit.pause_seconds * 1e3:.1f} ms")
        if self._reporter is not None:
            self._reporter.committed(
                commit.ref,
                staged_seconds=commit.staged_seconds,
                commit_seconds=commit.pause_seconds,
                bytes_fetched=commit.bytes_fetched,
                bytes_full=commit.bytes_full,
            )

    def _held(self) -> None:
        """Nothing newer: an engine that had the newest version before us is served now."""
        ref = self._subscriber.ref
        if ref is None or self._gate.held == ref:
            return
        with self._gate.commit():
            began = time.perf_counter()
            self._backend.adopt()
            pause = time.perf_counter() - began
        self._committed(Commit(ref, 0.0, pause, 0, 0))

    # --- for people --------------------------------------------------------------------------

    def _gate_changed(self) -> None:
        if self._sidecar is not None:
            self._sidecar.gate_changed()

    def _describe(self) -> Mapping[str, object]:
        ref = self._gate.ref
        return {
            "replica": self._options.replica_id,
            "run_id": self._subscriber.archive.run_id,
            "version": None if ref is None else ref.version,
            "root": None if ref is None else ref.root,
            "staging": self._follower.staging,
            "phase": self._gate.phase,
            "mode": self._gate.mode,
            "in_flight": self._gate.in_flight,
        }

    def _gauges(self) -> None:
        gate, gauge = self._gate, self._traffic.gauge
        gauge("farcast_version", "Version that is served, -1 for none.", lambda: _version(gate))
        gauge("farcast_ready", "Whether requests are served.", lambda: float(gate.ref is not None))
        gauge("farcast_in_flight", "Requests inside the gate.", lambda: float(gate.in_flight))
        gauge("farcast_staging", "A version is staged now.", lambda: float(self._follower.staging))
        gauge("farcast_cut_off", "Requests ended for a commit.", lambda: float(gate.cut_off))


def _version(gate: AdmissionGate) -> float:
    return -1.0 if gate.ref is None else float(gate.ref.version)
