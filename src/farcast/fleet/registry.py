"""Reads and writes the records of `fleet/` in a store.

Every record is bounded when read, decoded strictly, and checked against the key it stood under,
so that a stray object cannot pose as another replica's. A record that fails this is reported to
who asked, by key, and the others are read all the same: no stray file may blind or stop a run.
Anybody who may write to the store may leave records of replicas, so of these a bounded number is
read, those that were written last: a replica that lives rewrites its own every second.
Refuses to overwrite evidence: a step record or a receipt is put once, and a second one that says
something else is an error.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple, TypeVar

import msgspec

from farcast.errors import (
    FormatError,
    LimitError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreUnavailableError,
    VersionConflictError,
)
from farcast.fleet.records import (
    MAX_RECORD_BYTES,
    MAX_REPLICA_BYTES,
    MAX_STEP_BYTES,
    Receipt,
    ReplicaRecord,
    StepRecord,
    TrainerRecord,
)
from farcast.fleet.saying import plain
from farcast.store.base import ObjectInfo, Store
from farcast.store.transfers import in_parallel

TRAINER_KEY = "fleet/trainer.json"
REPLICAS_PREFIX = "fleet/replicas/"
STEPS_PREFIX = "fleet/steps/"
RECEIPTS_PREFIX = "fleet/receipts/"
CLOCK_PREFIX = "fleet/clock/"
_CLOCK_KEY = f"{CLOCK_PREFIX}mark"
_BEFORE_TRAINER = "fleet/trainer"

MAX_REPLICAS = 4096
"""Records of replicas that one look reads: at 16 KiB each these are 64 MiB at most."""

MAX_LISTED = 1 << 17
"""Records of replicas that one look lists: 131 requests to S3."""

READERS = 16
"""Records read at the same time: 4,096 of them, 50 ms away, then take 13 seconds."""

_T = TypeVar("_T", bound=msgspec.Struct)

_BOUNDS: Mapping[type[msgspec.Struct], int] = {
    TrainerRecord: MAX_RECORD_BYTES,
    ReplicaRecord: MAX_REPLICA_BYTES,
    StepRecord: MAX_STEP_BYTES,
    Receipt: MAX_REPLICA_BYTES,
}

Damaged = Callable[[str, FormatError], None]
"""Told the key of a record that cannot be used, and why."""


def refuse(key: str, error: FormatError) -> None:  # noqa: ARG001 - a `Damaged`
    """Raise for the first damaged record: for readers that need them all."""
    raise error


class Sighting(NamedTuple):
    """A replica's record and when the store last saw it written (the store's clock)."""

    record: ReplicaRecord
    modified: float


class Registry:
    """The records of one run. Holds no state of its own, so any number may look at one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def write_trainer(self, record: TrainerRecord) -> None:
        self._store.put(TRAINER_KEY, msgspec.json.encode(record))

    def trainer(self) -> TrainerRecord | None:
        """The trainer's newest record, None before its first."""
        return self._read(TRAINER_KEY, TrainerRecord)

    def trainer_written(self) -> float | None:
        """When the store last saw the trainer's record written, by its own clock."""
        for info in self._store.list("fleet/", start_after=_BEFORE_TRAINER):
            if info.key == TRAINER_KEY:
                return info.modified
        return None

    def mark_time(self) -> float:
        """Write a mark and return the store's time of it. All write the same one: another's that
        came after is later by no more than this call took."""
        self._store.put(_CLOCK_KEY, b"{}")
        for info in self._store.list(CLOCK_PREFIX):
            if info.key == _CLOCK_KEY:
                return info.modified
        raise StoreUnavailableError(
            f"{self._store.url} does not list what was just written there; try again later."
        )

    def write_replica(self, record: ReplicaRecord) -> None:
        self._store.put(_replica_key(record), msgspec.json.encode(record))

    def replicas(self, *, damaged: Damaged = refuse) -> dict[str, Sighting]:
        """Every replica that ever wrote a record, by id; of more than `MAX_REPLICAS` those whose
        records were written last. That there are more is told as damage of the folder."""
        infos, left = _written_last(self._store.list(REPLICAS_PREFIX))
        if left:
            damaged(
                REPLICAS_PREFIX,
                LimitError(
                    f"{REPLICAS_PREFIX} holds at least {left} records beyond the {MAX_REPLICAS} "
                    "that were written last and are read; remove those of replicas that are gone."
                ),
            )

        def read(info: ObjectInfo) -> ReplicaRecord | FormatError | None:
            return self._checked(info, ReplicaRecord, _replica_key)

        found: dict[str, Sighting] = {}
        workers = min(READERS, 1 + len(infos) // 8)  # a small fleet is not worth threads
        for info, record in zip(infos, in_parallel(read, infos, workers=workers), strict=True):
            if isinstance(record, FormatError):
                damaged(info.key, record)
            elif record is not None:
                found[record.replica_id] = Sighting(record, info.modified)
        return found

    def put_step(self, record: StepRecord) -> None:
        """Put a step's record once; the same record again is no error."""
        self._put_once(_step_key(record.version), record, StepRecord)

    def steps(self, *, after: int = -1, damaged: Damaged = refuse) -> Iterator[StepRecord]:
        """Step records with a version above `after`, in order of version."""
        start = _step_key(after) if after >= 0 else None
        for _, record in self._all(STEPS_PREFIX, StepRecord, _key_of_step, damaged, start):
            yield record

    def put_receipt(self, receipt: Receipt) -> None:
        """Put a receipt once. A replica that restarts may commit a version a second time: the
        first receipt stays, and only another root under the same version is an error."""
        key = _receipt_key(receipt.replica_id, receipt.version)
        try:
            self._store.put(key, msgspec.json.encode(receipt), if_absent=True)
        except ObjectExistsError:
            held = self._read(key, Receipt)
            if held is None or held.root != receipt.root:
                raise VersionConflictError(
                    f"Replica {receipt.replica_id} recorded two roots for version "
                    f"{receipt.version}; give each replica an id of its own."
                ) from None

    def receipts(self, *, damaged: Damaged = refuse) -> Iterator[Receipt]:
        """Every receipt, by replica and then by version."""
        for _, receipt in self._all(RECEIPTS_PREFIX, Receipt, _key_of_receipt, damaged):
            yield receipt

    def _all(
        self,
        prefix: str,
        kind: type[_T],
        key_of: Callable[[_T], str],
        damaged: Damaged,
        start_after: str | None = None,
    ) -> Iterator[tuple[ObjectInfo, _T]]:
        for info in self._store.list(prefix, start_after=start_after):
            record = self._checked(info, kind, key_of)
            if isinstance(record, FormatError):
                damaged(info.key, record)
            elif record is not None:
                yield info, record

    def _checked(
        self, info: ObjectInfo, kind: type[_T], key_of: Callable[[_T], str]
    ) -> _T | FormatError | None:
        """The record of that kind under its own key, what is wrong with it, or None if it has
        gone."""
        try:
            record = self._read(info.key, kind)
            if record is not None:
                _check_key(info.key, key_of(record))
        except FormatError as error:
            return error
        return record

    def _put_once(self, key: str, record: _T, kind: type[_T]) -> None:
        try:
            self._store.put(key, msgspec.json.encode(record), if_absent=True)
        except ObjectExistsError:
            if self._read(key, kind) != record:
                raise VersionConflictError(
                    f"{key} was already written with other contents; "
                    "make sure that only one trainer runs on this store."
                ) from None

    def _read(self, key: str, kind: type[_T]) -> _T | None:
        try:
            data = self._store.get(key, max_bytes=_BOUNDS[kind])
        except ObjectNotFoundError:
            return None
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.DecodeError as error:
            # The error may quote what stands in the record, and is shown on terminals.
            raise FormatError(
                f"The record {key} is not valid ({plain(str(error)[:200])}); delete it or restore "
                "it from a backup."
            ) from error


def _written_last(listed: Iterator[ObjectInfo]) -> tuple[list[ObjectInfo], int]:
    """Those that are read, in order of key, and how many more there are."""
    count = 0

    def counted() -> Iterator[ObjectInfo]:
        nonlocal count
        for info in islice(listed, MAX_LISTED):
            count += 1
            yield info

    newest = heapq.nlargest(MAX_REPLICAS, counted(), key=lambda info: info.modified)
    return sorted(newest), count - len(newest)


def _replica_key(record: ReplicaRecord) -> str:
    return f"{REPLICAS_PREFIX}{record.replica_id}.json"


def _key_of_step(record: StepRecord) -> str:
    return _step_key(record.version)


def _key_of_receipt(receipt: Receipt) -> str:
    return _receipt_key(receipt.replica_id, receipt.version)


def _step_key(version: int) -> str:
    return f"{STEPS_PREFIX}{version:012d}.json"


def _receipt_key(replica_id: str, version: int) -> str:
    return f"{RECEIPTS_PREFIX}{replica_id}/{version:012d}.json"


def _check_key(found: str, expected: str) -> None:
    if found != expected:
        raise FormatError(
            f"The record under {found} says it belongs under {expected}; remove the stray copy."
        )
