"""The worker's end of the way home: trajectories are durable in the store when `submit` returns.

Rules for writers:

1. A batch is put under `trajectories/<worker>/<sequence>` by a conditional create, never over
   another object. Sequences have no gap: number n+1 is tried only once n is known to be taken.
2. A number that turns out to be taken is read: equal bytes are this writer's own (a reply was
   lost), other bytes are another process with the same worker id, and the next number is tried.
3. An id that a batch of this worker already holds is not written again. A process knows the ids
   it wrote, those it met under rule 2, and after a start those of its last `RECALLED_BATCHES`;
   who was cut off and noted where the sequence stood (`since`) has all batches from there read.

What cannot be put raises, and submitting it again is always safe. A sender that was given a
folder to spool to holds it on this worker's disk instead, within a limit, for as long as the
store does not answer. Refuses to write further ahead of the reader than its bound.
"""

import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from farcast.errors import (
    BacklogFullError,
    FormatError,
    IntegrityError,
    LimitError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreUnavailableError,
)
from farcast.store.base import Store
from farcast.trajectory.encoding import MAX_BATCH_BYTES, Payload, decode_batch, pack, seal
from farcast.trajectory.keys import (
    batch_key,
    batches_prefix,
    checked_name,
    sequence_of,
    worker_key,
)
from farcast.trajectory.membership import check_run
from farcast.trajectory.spool import Spool
from farcast.trajectory.wire import Trajectory

DEFAULT_BATCH_BYTES = 1 << 23
"""8 MiB go up a 100 Mbit/s line in 0.7 s: a batch lost in transit costs no more than that."""

DEFAULT_SPOOL_BYTES = 1 << 30
"""An hour of 80,000 tokens per second at 3.7 bytes each."""

RECALLED_BATCHES = 16
"""What a worker that starts again reads of its own: more than it can have had in flight."""

REMEMBERED_IDS = 1 << 16

_POLL_SECONDS = 0.2
_CREATE_TRIES = 4


class Backlog(NamedTuple):
    """What this worker wrote and the trainer has not read. A batch that an earlier process wrote,
    and that was not recalled, counts as one group."""

    batches: int
    groups: int
    bytes: int


class _Unread(NamedTuple):
    sequence: int
    groups: int
    size: int


class TrajectorySender:
    """Submits one worker's trajectories. Safe to use from several threads.

    Batches are kept within `max_batch_bytes`; one trajectory that is larger goes alone, within
    `max_trajectory_bytes`.

    `position_of_reader` returns the next sequence number of this worker that the trainer will
    read (None while it is not known), and is asked before every write; with it, at most
    `max_backlog_groups` groups and `max_backlog_bytes` stay unread. A full backlog raises
    `BacklogFullError` after `wait_seconds`.

    `spool` is a folder of this worker alone. With it, `submit` returns once a batch is durable
    on this disk when the store is not available; later submissions, and `flush`, send it first.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        worker_id: str,
        *,
        max_batch_bytes: int = DEFAULT_BATCH_BYTES,
        max_trajectory_bytes: int = MAX_BATCH_BYTES,
        max_backlog_groups: int | None = None,
        max_backlog_bytes: int | None = None,
        position_of_reader: Callable[[], int | None] | None = None,
        wait_seconds: float = 0.0,
        spool: Path | None = None,
        max_spool_bytes: int = DEFAULT_SPOOL_BYTES,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._run_id = checked_name("run", run_id)
        self._worker_id = checked_name("worker", worker_id)
        self._max_batch_bytes = max_batch_bytes
        self._max_trajectory_bytes = max_trajectory_bytes
        self._max_backlog_groups = max_backlog_groups
        self._max_backlog_bytes = max_backlog_bytes
        self._position_of_reader = position_of_reader
        self._wait_seconds = wait_seconds
        self._clock = clock
        self._sleep = sleep
        self._writing = threading.RLock()
        self._books = threading.Lock()
        self._spool = Spool(spool, run_id, max_bytes=max_spool_bytes) if spool is not None else None
        self._opened = False
        self._next = 0
        self._position = 0
        self._known: OrderedDict[str, None] = OrderedDict()
        self._unread: deque[_Unread] = deque()
        self.bytes_sent = 0

    @property
    def worker_id(self) -> str:
        return self._worker_id

    @property
    def next_sequence(self) -> int:
        """The number that the next batch will try first."""
        self._open()
        return self._next

    def submit(self, trajectory: Trajectory) -> None:
        """Durable on return; a second call with the same id does nothing."""
        self.submit_many((trajectory,))

    def check(self, trajectories: Iterable[Trajectory]) -> None:
        """Raise what `submit_many` raises of the trajectories themselves, and write nothing: who
        promises to send them asks first."""
        given = tuple(trajectories)
        self._check_worker(given)
        if given:
            self._pack(given)

    def submit_many(self, trajectories: Iterable[Trajectory], *, since: int | None = None) -> None:
        """Submit several, in as few batches as the limit allows, each wholly or not at all.

        Raises `TrajectoryTooLargeError` or `FormatError` before anything is written. After
        any other error some batches may be durable; call again with the same trajectories.

        `since` is for who was cut off before it knew how an earlier submission ended: what
        `next_sequence` said before that. Batches from there on are read, and what they hold is
        not written again, however long ago that was.
        """
        with self._writing:
            outage = self._come_online()
            fresh = self._unknown(trajectories)
            if since is not None and fresh and outage is None:
                there = self._found_since(since, {t.id for t in fresh})
                fresh = [t for t in fresh if t.id not in there]
            payloads = self._pack(fresh) if fresh else []
            try:
                while payloads:
                    if outage is not None:
                        raise outage
                    self._wait_for_room(payloads[0].size)
                    self._write(payloads[0])
                    del payloads[0]
            except StoreUnavailableError:
                if since is not None or not all(map(self._spooled, payloads)):
                    raise

    def flush(self) -> None:
        """Send what is spooled. Raises `StoreUnavailableError` while the store does not answer."""
        with self._writing:
            self._open()
            self._send_spooled()

    def close(self) -> None:
        """Let go of the spool's folder; what is in it waits for the next process."""
        if self._spool is not None:
            self._spool.close()

    @property
    def spooled_bytes(self) -> int:
        """Bytes on this worker's disk that wait for the store."""
        return self._spool.bytes if self._spool else 0

    def backlog(self) -> Backlog:
        """What this worker wrote and the trainer has not read, as far as is known here.
        Does not wait for a submission that another thread has under way."""
        self._open()
        position = self._reader()
        with self._books:
            while self._unread and self._unread[0].sequence < position:
                self._unread.popleft()
            return Backlog(
                len(self._unread),
                sum(batch.groups for batch in self._unread),
                sum(batch.size for batch in self._unread),
            )

    def is_full(self, coming_bytes: int = 0, *, coming_groups: int = 0) -> bool:
        """Whether the bound leaves no room for one more batch of `coming_bytes`, after
        `coming_groups` that are on their way. A batch larger than the whole bound may go when
        nothing else is unread, or it could never go."""
        batches, groups, size = self.backlog()
        bound = self._max_backlog_groups
        if bound is not None and groups + coming_groups >= bound:
            return True
        if self._max_backlog_bytes is None or not batches:
            return False
        return size + coming_bytes > self._max_backlog_bytes

    def _reader(self) -> int:
        """The reader's position as last heard of: to know less of it only makes room later."""
        if self._position_of_reader is not None:
            with contextlib.suppress(StoreUnavailableError):
                self._position = self._position_of_reader() or 0
        return self._position

    def _unknown(self, trajectories: Iterable[Trajectory]) -> list[Trajectory]:
        given = tuple(trajectories)
        self._check_worker(given)
        fresh: dict[str, Trajectory] = {}
        for trajectory in given:
            spooled = self._spool is not None and trajectory.id in self._spool
            if trajectory.id not in self._known and not spooled:
                fresh.setdefault(trajectory.id, trajectory)
        return list(fresh.values())

    def _check_worker(self, trajectories: Sequence[Trajectory]) -> None:
        for trajectory in trajectories:
            if trajectory.worker_id != self._worker_id:
                raise FormatError(
                    f"Trajectory {str(trajectory.id)[:130]} says it is of another worker than "
                    f"{self._worker_id}; submit it through that worker's sender."
                )

    def _found_since(self, since: int, wanted: set[str]) -> set[str]:
        """Those of `wanted` that batches from number `since` on hold."""
        found: set[str] = set()
        before = batch_key(self._worker_id, since - 1) if since else None
        for info in self._store.list(batches_prefix(self._worker_id), start_after=before):
            sequence = sequence_of(self._worker_id, info.key)
            if sequence is not None and found != wanted:
                found |= wanted & {t.id for t in self._recalled(sequence)}
        return found

    def _come_online(self) -> StoreUnavailableError | None:
        """Open the store and send what is spooled. Where there is a spool, an outage is no
        reason to raise yet."""
        try:
            self.flush()
        except StoreUnavailableError as error:
            if self._spool is None:
                raise
            return error
        return None

    def _pack(self, trajectories: Sequence[Trajectory]) -> list[Payload]:
        return pack(
            trajectories,
            run_id=self._run_id,
            max_bytes=self._max_batch_bytes,
            max_trajectory_bytes=self._max_trajectory_bytes,
        )

    def _spooled(self, payload: Payload) -> bool:
        """Hold a batch on disk; False when there is no room for it."""
        if self._spool is None or not self._spool.has_room(payload.size):
            return False
        self._spool.add(payload)
        return True

    def _send_spooled(self) -> None:
        """Bytes are durable in the store before they leave the disk."""
        while self._spool is not None and (held := self._spool.oldest()) is not None:
            number, trajectories = held
            fresh = [t for t in trajectories if t.id not in self._known]
            for payload in self._pack(fresh) if fresh else ():
                self._wait_for_room(payload.size)
                self._write(payload)
            self._spool.remove(number)

    def _wait_for_room(self, size: int) -> None:
        deadline = self._clock() + self._wait_seconds
        while self.is_full(size):
            if self._clock() >= deadline:
                _, groups, unread = self.backlog()
                raise BacklogFullError(
                    f"The trainer has not read {groups} groups ({unread} bytes) of worker "
                    f"{self._worker_id}; wait until it has, then submit again."
                )
            self._sleep(_POLL_SECONDS)

    def _write(self, payload: Payload) -> None:
        todo = [payload]
        while todo:
            payload = todo.pop(0)
            self._next = max(self._next, self._reader())
            data = seal(payload, self._next)
            if self._create(data):
                self._note(payload.trajectories, len(data))
                continue
            rest = [t for t in payload.trajectories if t.id not in self._known]
            if len(rest) == len(payload.trajectories):
                todo.insert(0, payload)
            elif rest:
                todo[:0] = self._pack(rest)

    def _create(self, data: bytes) -> bool:
        """Put `data` under the next number. False when another process holds that number; its
        ids are then known and the number is passed."""
        key = batch_key(self._worker_id, self._next)
        for _ in range(_CREATE_TRIES):
            try:
                self._store.put(key, data, if_absent=True)
            except ObjectExistsError:
                try:
                    held = self._held(self._next)
                except ObjectNotFoundError:
                    continue  # refused, yet nothing is there: some stores answer so under load
                if held != data:
                    self._note(self._contents(held), len(held))
                    return False
            self.bytes_sent += len(data)
            return True
        raise StoreUnavailableError(
            f"The store refuses to create {key!r} as if it existed, but holds nothing there; "
            "submit again later."
        )

    def _note(self, trajectories: Sequence[Trajectory], size: int) -> None:
        """The batch under the next number is durable."""
        with self._books:
            groups = len({trajectory.group_id for trajectory in trajectories})
            self._unread.append(_Unread(self._next, max(1, groups), size))
            self._next += 1
        for trajectory in trajectories:
            self._known[trajectory.id] = None
        while len(self._known) > REMEMBERED_IDS:
            self._known.popitem(last=False)

    def _held(self, sequence: int) -> bytes:
        """What stands under a number; nothing of use when it is larger than a batch may be."""
        key = batch_key(self._worker_id, sequence)
        try:
            return self._store.get(key, max_bytes=MAX_BATCH_BYTES)
        except LimitError:
            return b""

    @staticmethod
    def _contents(data: bytes) -> tuple[Trajectory, ...]:
        try:
            return decode_batch(data).trajectories
        except (FormatError, IntegrityError):
            # Damaged bytes hold no id that counts; the reader reports them, and the number
            # is taken all the same.
            return ()

    def _open(self) -> None:
        """Find where this worker stopped, once."""
        if self._opened:
            return
        with self._writing:
            if not self._opened:
                check_run(self._store, self._run_id)
                self._recall()
                self._announce()
                self._opened = True

    def _recall(self) -> None:
        """One list of this worker's own prefix, then the contents of its last batches."""
        found = [
            (sequence, info.size)
            for info in self._store.list(batches_prefix(self._worker_id))
            if (sequence := sequence_of(self._worker_id, info.key)) is not None
        ]
        self._unread.clear()
        for sequence, size in found:
            recall = sequence > found[-1][0] - RECALLED_BATCHES
            self._next = sequence
            self._note(self._recalled(sequence) if recall else (), size)
        self._next = max(self._next, self._reader())

    def _recalled(self, sequence: int) -> tuple[Trajectory, ...]:
        try:
            return self._contents(self._held(sequence))
        except ObjectNotFoundError:
            return ()  # read and discarded by the trainer since it was listed

    def _announce(self) -> None:
        """Durable before the first batch, so that no acknowledged batch is out of sight."""
        try:
            self._store.put(worker_key(self._worker_id), b"", if_absent=True)
        except ObjectExistsError:
            return
