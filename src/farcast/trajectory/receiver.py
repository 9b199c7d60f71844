"""The trainer's end of the way home: every acknowledged trajectory, once, in a stable order.

Rules for readers:

1. Workers are found under `workers/`, by a list now and then, and before saying that there is
   nothing. Batches are asked for by key, the next number of each worker.
2. Workers take turns, a batch each, in the order of their names. What `consume` returns depends
   on the state and on the store's contents, never on which answer came first.
3. The state is the position in each worker's sequence and the ids seen of late. It moves only
   as trajectories are returned, so a state saved in a checkpoint and restored continues exactly
   there: what was returned after it was saved is returned again, the rest is not.
4. A batch that cannot be read raises `BrokenBatchError`, again each time, until `skip`.

Refuses to judge a trajectory's age or its group: that is the batcher's. Deletes nothing that a
saved state has not passed.
"""

import base64
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from blake3 import blake3

from farcast.errors import (
    BrokenBatchError,
    ConfigError,
    FarcastError,
    FormatError,
    IntegrityError,
    LimitError,
    ObjectNotFoundError,
    RunMismatchError,
)
from farcast.store.base import Store
from farcast.trajectory.encoding import MAX_BATCH_BYTES, decode_batch
from farcast.trajectory.keys import (
    WORKERS_PREFIX,
    batch_key,
    batches_prefix,
    checked_name,
    sequence_of,
)
from farcast.trajectory.membership import check_run
from farcast.trajectory.wire import Trajectory
from farcast.types import MAX_VERSION, NAME_PATTERN, Name

MAX_WORKERS = 1 << 14
"""Positions of so many workers take 1 MB of a checkpoint."""

REMEMBERED_IDS = 4096
"""A worker repeats an id only within its last batches; 4096 ids take 43 kB of a checkpoint."""

KEPT_BATCHES = 64
"""Read batches of each worker that `discard` leaves: more than a worker recalls when it starts
again, so that it finds its place in the sequence."""

_ID_BYTES = 8
_FETCHES = 8
_PREFETCHES = 16
"""Batches fetched while the trainer computes: at most 128 MiB of its memory."""

_GAP_CHECK_SECONDS = 30.0
"""A gap cannot come from a sender, only from an object that was lost: no need to look often."""


class _Position(msgspec.Struct, array_like=True):
    """The batch to read next, and how many of its trajectories were returned already."""

    sequence: Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)] = 0
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0


class _State(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    run_id: Name
    positions: Annotated[dict[Name, _Position], msgspec.Meta(max_length=MAX_WORKERS)]
    after: str
    """The worker whose turn was last; the next in order of names comes next."""
    recent: Annotated[str, msgspec.Meta(max_length=1 << 24)]
    duplicates: Annotated[int, msgspec.Meta(ge=0)]
    skipped: Annotated[int, msgspec.Meta(ge=0)]


class _Missing(NamedTuple):
    """The next batch was not written yet."""


class _Broken(NamedTuple):
    cause: FarcastError


class _Ready(NamedTuple):
    trajectories: tuple[Trajectory, ...]


_Batch = tuple[str, int]
"""Worker and sequence number."""

_NOT_YET: Final = _Missing()
_Held = _Ready | _Broken


class TrajectoryReceiver:
    """Reads the trajectories of every worker of a run. One per trainer; not thread-safe."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        *,
        discover_seconds: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._run_id = checked_name("run", run_id)
        self._discover_seconds = discover_seconds
        self._clock = clock
        self._positions: dict[str, _Position] = {}
        self._held: dict[str, _Held] = {}
        self._ahead: dict[_Batch, _Ready] = {}
        self._coming: dict[_Batch, Future[_Held | _Missing]] = {}
        self._listing: Future[list[str]] | None = None
        self._windows: dict[str, int] = {}
        self._recent: OrderedDict[bytes, None] = OrderedDict()
        self._after = ""
        self._duplicates = 0
        self._skipped = 0
        self._discovered_at: float | None = None
        self._refused: dict[str, int] = {}
        self._waiting_since: dict[str, float] = {}
        self._discarded: dict[str, int] = {}
        self._pool = ThreadPoolExecutor(_FETCHES, thread_name_prefix="farcast-receive")

    @property
    def duplicates(self) -> int:
        """Trajectories left out because their id had been returned before."""
        return self._duplicates

    @property
    def skipped(self) -> int:
        """Broken batches passed over by `skip`."""
        return self._skipped

    def consume(self, max_items: int) -> list[Trajectory]:
        """Up to `max_items` new trajectories; an empty list when there are none now.

        Raises `BrokenBatchError` when the next batch in order cannot be read. An error moves
        nothing: what was found before it is returned first, and the next call raises.
        """
        self._discover()
        taken = self._consume(max_items)
        if not taken and self._discover(at_once=True):
            taken = self._consume(max_items)
        return taken

    def prefetch(self) -> None:
        """Begin to fetch what comes next, in the background, for the next `consume` to find. Moves
        nothing and raises nothing: what cannot be had is asked for again then."""
        if self._listing is None and self._is_discovery_due():
            self._listing = self._pool.submit(self._list_workers)
        read = {worker: position.sequence for worker, position in self._positions.items()}
        self._coming = {place: f for place, f in self._coming.items() if place[1] >= read[place[0]]}
        room = _PREFETCHES - len(self._coming)
        for place in self._soon(read):
            if place in self._ahead or not _is_open(self._coming.get(place)):
                continue
            if room <= 0:
                return
            room -= place not in self._coming
            self._coming[place] = self._pool.submit(self._read, *place)

    def _soon(self, read: dict[str, int]) -> Iterator[_Batch]:
        for worker in self._turns():
            first = read[worker] + (worker in self._held)
            yield from ((worker, first + further) for further in range(self._width(worker)))

    def positions(self) -> dict[str, int]:
        """By worker: the next sequence number that will be read."""
        return {worker: p.sequence for worker, p in sorted(self._positions.items())}

    def backlog(self) -> dict[str, int]:
        """By worker: batches in the store that are not wholly read. Lists; not for every step."""
        self._discover(at_once=True)
        return {
            worker: sum(1 for _ in self._sequences(worker, position.sequence))
            for worker, position in sorted(self._positions.items())
        }

    def skip(self, worker_id: str) -> None:
        """Pass over the broken batch at a worker's position, after `BrokenBatchError`.

        Its trajectories are lost to the run, and the batch is counted in `skipped`. Where
        batches are missing, all of the gap is passed.
        """
        position = self._positions.get(worker_id)
        if position is None or self._refused.get(worker_id) != position.sequence:
            raise ConfigError(
                f"The next batch of worker {worker_id[:130]} is not known to be broken; "
                "skip only after consume() has raised BrokenBatchError."
            )
        first = next(self._sequences(worker_id, position.sequence), position.sequence)
        self._ahead.clear()
        self._coming.clear()
        self._advance(worker_id, max(first, position.sequence + 1))
        self._skipped += 1

    def state(self) -> dict[str, Any]:
        """What belongs into the trainer's checkpoint: plain JSON data, small."""
        state = _State(
            run_id=self._run_id,
            positions=dict(sorted(self._positions.items())),
            after=self._after,
            recent=base64.b64encode(b"".join(self._recent)).decode(),
            duplicates=self._duplicates,
            skipped=self._skipped,
        )
        return dict(msgspec.to_builtins(state))

    def restore(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state` was taken, in this process or another."""
        read = self._read_state(state)
        try:
            recent = base64.b64decode(read.recent, validate=True)
        except ValueError as error:
            raise FormatError(
                f"The receiver's state is not valid ({error}); use another checkpoint."
            ) from error
        ids = (recent[i : i + _ID_BYTES] for i in range(0, len(recent), _ID_BYTES))
        self._positions = dict(read.positions)
        self._recent = OrderedDict.fromkeys(ids)
        self._after = read.after
        self._duplicates, self._skipped = read.duplicates, read.skipped
        self._held.clear()
        self._ahead.clear()
        self._coming.clear()
        self._listing = None
        self._windows.clear()
        self._refused.clear()
        self._waiting_since.clear()
        self._discovered_at = None

    def discard(self, state: dict[str, Any], *, keep: int = KEPT_BATCHES) -> int:
        """Delete batches that `state` has passed, all but the last `keep` of each worker.

        Call it once the checkpoint that holds `state` is durable, never before: a trainer that
        falls back to an older checkpoint would miss them. Returns how many were deleted.
        """
        deleted = 0
        for worker, position in self._read_state(state).positions.items():
            end = position.sequence - keep
            if end <= self._discarded.get(worker, 0):
                continue
            for sequence in self._sequences(worker, self._discarded.get(worker, 0)):
                if sequence >= end:
                    break
                self._store.delete(batch_key(worker, sequence))
                deleted += 1
            self._discarded[worker] = end
        return deleted

    def close(self) -> None:
        """Release the fetching threads."""
        self._pool.shutdown(cancel_futures=True)

    def _consume(self, max_items: int) -> list[Trajectory]:
        taken: list[Trajectory] = []
        while len(taken) < max_items:
            turns = self._turns()
            self._fetch(turns, lenient=bool(taken))
            ready = [worker for worker in turns if worker in self._held]
            if not ready:
                break
            for worker in ready:
                held = self._held[worker]
                if isinstance(held, _Broken):
                    # Read anew by the next call: it may be whole in the store.
                    del self._held[worker]
                    if taken:
                        return taken
                    self._refused[worker] = self._positions[worker].sequence
                    raise self._broken(worker, held.cause) from held.cause
                taken += self._take(worker, held, max_items - len(taken))
                if len(taken) == max_items:
                    break
        return taken

    def _read_state(self, state: dict[str, Any]) -> _State:
        try:
            read = msgspec.convert(state, _State)
        except msgspec.ValidationError as error:
            raise FormatError(
                f"The receiver's state is not valid ({error}); use another checkpoint."
            ) from error
        if read.run_id != self._run_id:
            raise RunMismatchError(
                f"The receiver's state is of run {read.run_id}, not {self._run_id}; "
                "use a checkpoint of this run."
            )
        return read

    def _discover(self, *, at_once: bool = False) -> bool:
        """Look for workers not known yet, unless that was done a moment ago. True if some are."""
        now, known = self._clock(), len(self._positions)
        if self._discovered_at is None:
            check_run(self._store, self._run_id)
        coming = self._listing
        if coming is not None and not coming.done() and not at_once:
            return False
        self._listing = None
        if coming is None and not at_once and not self._is_discovery_due():
            return False
        if coming is not None and coming.exception() is None and not at_once:
            names = coming.result()
        else:
            names = self._list_workers()
        for name in names:
            self._positions.setdefault(name, _Position())
        if len(self._positions) > MAX_WORKERS:
            raise LimitError(
                f"The store names over {MAX_WORKERS} workers; remove the strays under workers/."
            )
        self._discovered_at = now
        return len(self._positions) > known

    def _is_discovery_due(self) -> bool:
        last = self._discovered_at
        return last is None or self._clock() - last >= self._discover_seconds

    def _list_workers(self) -> list[str]:
        keys = (info.key for info in self._store.list(WORKERS_PREFIX))
        names = (key.removeprefix(WORKERS_PREFIX) for key in keys)
        return [name for name in names if NAME_PATTERN.fullmatch(name)]

    def _turns(self) -> list[str]:
        """Every worker, beginning after the one whose turn was last."""
        names = sorted(self._positions)
        return [n for n in names if n > self._after] + [n for n in names if n <= self._after]

    def _fetch(self, workers: list[str], *, lenient: bool) -> None:
        """Bring the next batch of each worker that has none in hand, several at a time.

        `lenient` leaves a store error for the next call, so that what was taken is returned."""
        wanted = [worker for worker in workers if worker not in self._held]
        futures = {place: self._asked(place) for place in self._window(wanted)}
        for worker in wanted:
            place = worker, self._positions[worker].sequence
            found: _Held | _Missing | None = self._ahead.pop(place, None)
            try:
                if found is None:
                    found = futures.pop(place).result()
            except FarcastError:
                if lenient:
                    continue
                raise
            if isinstance(found, _Missing):
                self._windows.pop(worker, None)
                self._look_for_gap(worker)
            else:
                self._windows[worker] = min(2 * self._windows.get(worker, 1), _FETCHES)
                self._waiting_since.pop(worker, None)
                self._held[worker] = found
        self._keep_ahead(futures)

    def _asked(self, place: _Batch) -> "Future[_Held | _Missing]":
        """The answer on its way, or one that is: what was not there a while ago is asked anew."""
        coming = self._coming.pop(place, None)
        if coming is None or _is_open(coming):
            return self._pool.submit(self._read, *place)
        return coming

    def _window(self, workers: list[str]) -> Iterator[_Batch]:
        """What to ask for now: over a long line one answer at a time would take a round trip a
        batch, so the next numbers of a worker are asked for with the present one, more of them
        each time as long as they are there. Few workers only: many fill the line by themselves."""
        for worker in workers:
            first = self._positions[worker].sequence
            if (worker, first) in self._ahead:
                continue
            width = min(self._width(worker), max(1, _FETCHES // len(workers)))
            yield from ((worker, first + further) for further in range(width))

    def _width(self, worker: str) -> int:
        """How many batches of this worker are asked for at once."""
        return self._windows.get(worker, 1)

    def _keep_ahead(self, futures: dict[_Batch, "Future[_Held | _Missing]"]) -> None:
        """Keep whole batches, and answers on their way, for their turn; anything else is asked for
        again then."""
        for place, future in futures.items():
            if not future.done():
                self._coming[place] = future
            elif future.exception() is None and isinstance(found := future.result(), _Ready):
                self._ahead[place] = found

    def _read(self, worker: str, sequence: int) -> _Held | _Missing:
        try:
            data = self._store.get(batch_key(worker, sequence), max_bytes=MAX_BATCH_BYTES)
            return _Ready(self._checked(data, worker, sequence))
        except ObjectNotFoundError:
            return _NOT_YET
        except (FormatError, IntegrityError, RunMismatchError) as error:
            return _Broken(error)

    def _checked(self, data: bytes, worker: str, sequence: int) -> tuple[Trajectory, ...]:
        batch = decode_batch(data)
        if batch.run_id != self._run_id:
            raise RunMismatchError(
                f"The batch belongs to run {batch.run_id}, not {self._run_id}; "
                "give each run a store prefix of its own."
            )
        if batch.sequence != sequence or any(t.worker_id != worker for t in batch.trajectories):
            raise FormatError("The batch is not what its key says; remove the stray copy.")
        return batch.trajectories

    def _take(self, worker: str, held: _Ready, most: int) -> list[Trajectory]:
        """The next trajectories of a batch in hand, at most `most`; moves the position."""
        position = self._positions[worker]
        taken: list[Trajectory] = []
        offset = position.offset
        while offset < len(held.trajectories) and len(taken) < most:
            trajectory = held.trajectories[offset]
            offset += 1
            if self._is_new(trajectory.id):
                taken.append(trajectory)
            else:
                self._duplicates += 1
        if offset < len(held.trajectories):
            self._positions[worker] = _Position(position.sequence, offset)
        else:
            self._advance(worker, position.sequence + 1)
        return taken

    def _is_new(self, trajectory_id: str) -> bool:
        key = blake3(trajectory_id.encode()).digest(_ID_BYTES)
        if key in self._recent:
            return False
        self._recent[key] = None
        while len(self._recent) > REMEMBERED_IDS:
            self._recent.popitem(last=False)
        return True

    def _advance(self, worker: str, sequence: int) -> None:
        self._positions[worker] = _Position(sequence)
        self._held.pop(worker, None)
        self._after = worker

    def _look_for_gap(self, worker: str) -> None:
        """A later batch without the next one means that an object was lost: say so, since the
        worker's trajectories would otherwise stop without a word."""
        now = self._clock()
        since = self._waiting_since.setdefault(worker, now)
        if now - since < _GAP_CHECK_SECONDS:
            return
        sequence = self._positions[worker].sequence
        later = next(self._sequences(worker, sequence + 1), None)
        if later is None:
            self._waiting_since[worker] = now
        elif isinstance(self._read(worker, sequence), _Missing):
            self._held[worker] = _Broken(
                IntegrityError(f"Batch {sequence} is missing although batch {later} exists.")
            )

    def _sequences(self, worker: str, first: int) -> Iterator[int]:
        """Sequence numbers from `first` on that exist now, in order."""
        start = batch_key(worker, first - 1) if first else None
        for info in self._store.list(batches_prefix(worker), start_after=start):
            sequence = sequence_of(worker, info.key)
            if sequence is not None:
                yield sequence

    def _broken(self, worker: str, cause: FarcastError) -> BrokenBatchError:
        sequence = self._positions[worker].sequence
        return BrokenBatchError(
            f"Batch {sequence} of worker {worker} cannot be read ({cause}) "
            "Restore it from a backup, or skip it and lose its trajectories.",
            worker_id=worker,
            sequence=sequence,
        )


def _is_open(answer: "Future[_Held | _Missing] | None") -> bool:
    """Whether to ask (again): nobody did, or there was no whole batch."""
    if answer is None or not answer.done():
        return answer is None
    return answer.exception() is not None or not isinstance(answer.result(), _Ready)
