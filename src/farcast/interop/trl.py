"""TRL's `AsyncGRPOTrainer` with replicas anywhere, through the two protocols it asks for.

    transfer = FarcastTransfer(Publisher(store, "run1"))
    rollouts = FarcastRollouts(store, "run1", transfer, max_staleness=4)
    AsyncGRPOTrainer(..., weight_transfer=transfer, rollout_worker=rollouts).train()

`transfer` publishes what the trainer streams, and pauses nobody: replicas stage a version while
they serve, and switch between two tokens. `rollouts` reads what workers send home, keeps whole
groups, and says of each sample how many syncs old its oldest token is, so that the trainer's own
`max_staleness` holds over the distance.

TRL counts syncs and farcast versions. A version carries the number of the sync as its step, and
that joins the two, also when a version never arrived because the store was away.

Refuses to sample and to score: workers do (`farcast.rollout.Worker`). TRL's checkpoints hold
nothing of a worker that is not its own; `trl_resume` adds it. A run that resumes without reads from
the first trajectory on that is still in the store; what is too old is dropped, here or by the
trainer. Made for TRL 1.16.
"""

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from farcast.errors import (
    BrokenBatchError,
    FarcastError,
    MissingDependencyError,
    TrajectoryError,
    UnknownVersionError,
)
from farcast.formats import served_bf16
from farcast.interop.overlapping import Overlapped
from farcast.interop.trl_resume import RolloutState, packed, unpacked
from farcast.publish import Publisher
from farcast.store.archive import Archive
from farcast.store.base import Store
from farcast.trajectory import Group, GroupBatcher, TrajectoryReceiver

try:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
except ImportError as error:
    raise MissingDependencyError(
        "TRL's AsyncGRPOTrainer cannot be imported; install farcast[trl]."
    ) from error

_LOG = logging.getLogger(__name__)

_IDLE_SECONDS = 0.05
_JOIN_SECONDS = 30.0
_READ_AT_ONCE = 256


class FarcastTransfer:
    """`weight_transfer=`: each sync becomes a version, in bf16, published beside the next step."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._overlapped = Overlapped(publisher)
        self._step = publisher.newest_step or 0
        self._syncs = 0

    @property
    def step(self) -> int:
        """The number of the last sync, as versions carry it."""
        return self._step

    @property
    def publisher(self) -> Publisher:
        return self._publisher

    @property
    def failures(self) -> int:
        """Versions that did not reach the store; a later one carried what they held."""
        return self._overlapped.failures

    def init_weight_transfer(self) -> None:
        """Nothing to set up: who reads the store needs no introduction."""

    def pause(self) -> None:
        """Replicas are not stopped for a transfer."""

    def resume(self) -> None:
        """See `pause`."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Copy what the trainer streams, and publish it in the background."""
        # The first sync of a resumed run is the last one of the run before.
        step = self._step + (1 if self._syncs else 0)
        served = (
            (name, served_bf16(tensor) if tensor.is_floating_point() else tensor)
            for name, tensor in iterator
        )
        self._overlapped.publish(served, step)
        self._step, self._syncs = step, self._syncs + 1

    def destroy(self) -> None:
        """Wait for the version on its way, and publish no more. A lost one is told, not raised:
        TRL calls this while it leaves, maybe because of another error."""
        try:
            self._overlapped.settle()
        except FarcastError as error:
            _LOG.error("The last version was not published: %s", error)
        self._publisher.close()


class CountedQueue(queue.Queue[Any]):
    """Knows how many were taken out of it."""

    taken = 0

    def _get(self) -> Any:
        self.taken += 1
        return super()._get()


class _Handed:
    """A group on its way to the trainer. `end` is the number of samples up to its last one."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.end = 0


class FarcastRollouts:
    """`rollout_worker=`: whole groups of what workers sent home, as the trainer's samples.

    At most `ahead` samples wait to be trained on; beyond that nothing is read, and workers are
    held back by their bound on what is unread (`position` is what they need for it).
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        transfer: FarcastTransfer,
        *,
        max_staleness: int,
        group_timeout: float = 600.0,
        ahead: int = 64,
    ) -> None:
        self.rollout_buffer = CountedQueue(maxsize=max(ahead, 1))
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._run_id = run_id
        self._transfer = transfer
        self._archive = Archive(store, run_id)
        self._receiver = TrajectoryReceiver(store, run_id)
        # One more than the trainer's bound, which it applies itself when it takes a sample.
        self._batcher = GroupBatcher(
            run_id, max_staleness=max_staleness + 1, group_timeout=group_timeout
        )
        self._manifests: dict[int, tuple[int, str]] = {}
        self._model_version = 0
        self._groups = 0
        self._reading = threading.Lock()
        self._handed: deque[_Handed] = deque()
        """Whole groups that were taken from the batcher, until they are released."""
        self._keeps = False
        self._next = 0
        """Of those, how many were made samples of."""
        self._samples_made = 0
        self._positions: dict[str, int] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._heard = time.monotonic()

    @property
    def dropped(self) -> dict[str, int]:
        """Trajectories that were not handed to the trainer, by reason."""
        return {str(reason): count for reason, count in self._batcher.totals.items()}

    @property
    def duplicates(self) -> int:
        return self._receiver.duplicates

    def position(self, worker_id: str) -> int | None:
        """What a `TrajectorySender` in this process asks for as `position_of_reader`."""
        return self._positions.get(worker_id)

    # --- what its checkpoints hold -----------------------------------------------------------

    @property
    def taken(self) -> int:
        """Samples that the trainer took so far."""
        return self.rollout_buffer.taken

    def keep(self) -> None:
        """Hold on to groups until `release`: there will be a checkpoint to put them in."""
        self._keeps = True

    def release(self, trained: int) -> None:
        """The first `trained` of the samples that were taken need not come again, but for the group
        of the last of them: a batch that was full leaves that one to the next."""
        with self._reading:
            while self._next and self._handed[0].end < trained:
                self._handed.popleft()
                self._next -= 1

    def state(self) -> RolloutState:
        """Where reading stands, and the groups that were read and not released."""
        with self._reading:
            return RolloutState(
                run_id=self._run_id,
                receiver=self._receiver.state(),
                batcher=self._batcher.state(now=time.monotonic()),
                groups=[packed(handed.group, self._run_id) for handed in self._handed],
            )

    def restore(self, state: RolloutState) -> None:
        """Continue where `state` was taken. Before `start`."""
        groups = [unpacked(batches, self._run_id) for batches in state.groups]
        self._receiver.restore(state.receiver)
        self._batcher.restore(state.batcher, now=time.monotonic())
        self._handed = deque(_Handed(group) for group in groups)
        self._next = 0

    # --- what the trainer calls --------------------------------------------------------------

    def start(self) -> None:
        if self._thread is None:
            self._heard = time.monotonic()
            self._thread = threading.Thread(
                target=self._run, name="farcast-trl-rollouts", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
        self._receiver.close()

    def update_model_version(self, model_version: int) -> None:
        self._model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise what ended the reading, or `TrajectoryError` once the store is silent for long."""
        if self._failure is not None:
            raise self._failure
        silent = time.monotonic() - self._heard
        if silent > stale_after_s:
            raise TrajectoryError(
                f"The store has not answered for {silent:.0f} s; see that it can be reached, then "
                "resume from the last checkpoint."
            )

    # --- the reading thread ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                if not self._turn():
                    self._stopping.wait(_IDLE_SECONDS)
        except Exception as error:  # noqa: BLE001 - raised by check_health, in the trainer
            self._failure = error

    def _turn(self) -> bool:
        """Hand over what is whole, then read once; whether there was anything."""
        try:
            self._hand_over()
            with self._reading:
                arrived = self._receiver.consume(_READ_AT_ONCE)
                self._batcher.add(arrived, now=time.monotonic())
                self._handed += map(_Handed, self._take())
        except BrokenBatchError as error:
            _LOG.warning("%s It is passed over.", error)
            self._receiver.skip(error.worker_id)
            return True
        except FarcastError as error:
            if not error.retry:
                raise
            _LOG.warning("%s Reading goes on when it does.", error)
            return False
        self._heard = time.monotonic()
        self._positions = self._receiver.positions()
        self._report()
        return bool(arrived)

    def _take(self) -> list[Group]:
        # A replica may serve a version before this process has heard that it is durable; whether
        # it exists, and with which root, is asked of its manifest.
        newest = self._transfer.publisher.newest
        return self._batcher.take(
            self._batcher.whole_groups(),
            version=(-1 if newest is None else newest.version) + 1,
            now=time.monotonic(),
            root_of=self._root_of,
        )

    def _hand_over(self) -> None:
        while (samples := self._next_samples()) is not None:
            for sample in samples:
                while not self._stopping.is_set():
                    with contextlib.suppress(queue.Full):
                        self.rollout_buffer.put(sample, timeout=_IDLE_SECONDS)
                        break
                    self._heard = time.monotonic()  # the trainer is what is waited for

    def _next_samples(self) -> list[Any] | None:
        with self._reading:
            if self._stopping.is_set() or self._next == len(self._handed):
                return None
            handed = self._handed[self._next]
            samples = self._samples(handed.group)
            self._next += 1
            self._samples_made += len(samples)
            handed.end = self._samples_made
            if not self._keeps:
                self._handed.popleft()
                self._next = 0
        return samples

    def _samples(self, group: Group) -> list[Any]:
        rewards = np.array([member.reward for member in group.members])
        mean, spread = float(rewards.mean()), float(rewards.std())
        number, self._groups = self._groups, self._groups + 1
        oldest = group.oldest_version
        if oldest is None:
            return []  # nothing that the model wrote is in the loss
        late = self._transfer.step - self._manifest(oldest)[0]
        return [
            RolloutSample(
                prompt=[],
                completion=[],
                input_ids=np.asarray(member.token_ids, dtype=np.int64),
                completion_mask=np.asarray(member.loss_mask, dtype=np.int64),
                old_log_probs=np.asarray(member.logprobs, dtype=np.float32),
                advantage=(member.reward - mean) / (spread + 1e-8),
                model_version=self._model_version - late,
                group_id=number,
                metrics={
                    "reward": member.reward,
                    "reward_std": spread,
                    **{f"rewards/{name}": part for name, part in member.rewards.items()},
                },
                enqueued_at=time.time(),
            )
            for member in group.members
        ]

    def _report(self) -> None:
        """What the trainer logs: its counters are sums of what is pushed."""
        for reason, ids in self._batcher.drain_dropped().items():
            self.metrics_queue.put({f"rollout/dropped_{reason}_total": float(len(ids))})

    def _root_of(self, version: int) -> str | None:
        try:
            return self._manifest(version)[1]
        except UnknownVersionError:
            return None

    def _manifest(self, version: int) -> tuple[int, str]:
        """Step and root of a version. Versions never change, so each is asked for once."""
        if version not in self._manifests:
            manifest = self._archive.manifest(version)
            self._manifests[version] = (manifest.step, manifest.root)
        return self._manifests[version]
