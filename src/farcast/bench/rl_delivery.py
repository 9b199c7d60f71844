"""Whether each trajectory counts once: real processes, killed at random, over a store that fails.

Eight workers and a trainer are processes of their own, and all but the reporting of this module
is the code of a real run. A supervisor kills one of the nine with SIGKILL at random moments and
starts it again; in each of them one store call in a hundred fails, half of those after it was
done. A worker notes what was acknowledged in a file of its own, after `submit_many` returned.

    acknowledged   ids that a worker was told are durable
    consumed       ids that the trainer's last checkpoint says it used
    stale          ids that it dropped for their age: one group in fifty claims to be old
    lost           acknowledged, and neither consumed nor dropped
    duplicated     consumed or dropped more than once

    python -m farcast.bench.rl_delivery worker FOLDER NAME GROUPS START
    python -m farcast.bench.rl_delivery trainer FOLDER START
"""

import base64
import contextlib
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from farcast.errors import StoreUnavailableError
from farcast.fleet.launcher import QUIET_CHILD, leave_with_parent
from farcast.store import open_store
from farcast.store.testing import Call, Fail, Fault, FaultStore, LoseReply
from farcast.trajectory import GroupBatcher, Trajectory, TrajectoryReceiver, TrajectorySender, Turn
from farcast.types import PolicySpan

RUN = "delivery"
WORKERS = 8
MEMBERS = 8
PROMPT, ANSWER = 20, 30
FAILING = 0.01
OLD_GROUPS = 50
"""One group in so many claims version 0."""
NOW_VERSION, MAX_STALENESS = 100, 4
KILL_SECONDS = (0.2, 0.8)
GROUP_SECONDS = 0.05
"""What a group takes to sample: else all is sent before anybody could be killed."""

_DONE = "done"

_MODULE = "farcast.bench.rl_delivery"
_T = TypeVar("_T")


class DeliveryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Trajectories, by what became of them."""

    acknowledged: int
    consumed: int
    stale: int
    lost: int
    duplicated: int
    workers: int
    kills_of_workers: int
    kills_of_trainer: int
    failed_calls_share: float
    delivery_seconds: float


class _Saved(msgspec.Struct, kw_only=True):
    """The trainer's checkpoint: read position, what waits, and what was used, in one file."""

    receiver: dict[str, object]
    batcher: str
    used: list[str]
    stale: list[str]


def measure_delivery(
    folder: Path, *, trajectories: int, seed: int = 0, say: Callable[[str], None] = lambda _: None
) -> DeliveryReport:
    """Run it in `folder`, which must be empty."""
    began, rng = time.perf_counter(), random.Random(seed)
    groups = -(-trajectories // (WORKERS * MEMBERS))
    supervisor = _Supervisor(folder, groups)
    try:
        while not supervisor.workers_done():
            time.sleep(rng.uniform(*KILL_SECONDS))
            supervisor.kill(rng.choice(supervisor.names()))
            say(f"delivery: {len(_acknowledged(folder))} acknowledged, {supervisor.kills} kills")
        supervisor.let_trainer_finish()
    finally:
        supervisor.close()
    acknowledged = set(_acknowledged(folder))
    saved = _load(folder)
    counts = Counter([*saved.used, *saved.stale])
    return DeliveryReport(
        acknowledged=len(acknowledged),
        consumed=len(saved.used),
        stale=len(saved.stale),
        lost=len(acknowledged - counts.keys()),
        duplicated=sum(count - 1 for count in counts.values()),
        workers=WORKERS,
        kills_of_workers=supervisor.kills - supervisor.trainer_kills,
        kills_of_trainer=supervisor.trainer_kills,
        failed_calls_share=FAILING,
        delivery_seconds=time.perf_counter() - began,
    )


class _Supervisor:
    """The nine processes."""

    def __init__(self, folder: Path, groups: int) -> None:
        self._folder = folder
        self._groups = groups
        self._starts = 0
        self.kills = self.trainer_kills = 0
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("trainer", *(f"w{i}" for i in range(WORKERS))):
            self._start(name)

    def names(self) -> list[str]:
        """Those that may be killed: a worker that has sent everything has left."""
        return [name for name, process in self._running.items() if process.poll() is None]

    def workers_done(self) -> bool:
        """Whether all have left. One that ended badly ends the measurement with its words."""
        statuses = [p.poll() for name, p in self._running.items() if name != "trainer"]
        return all(status == 0 for status in statuses)

    def kill(self, name: str) -> None:
        process = self._running[name]
        process.kill()
        process.wait()
        self.kills += 1
        self.trainer_kills += name == "trainer"
        self._start(name)

    def let_trainer_finish(self) -> None:
        """Tell the trainer that nothing more will come, and wait until it found that out."""
        (self._folder / _DONE).touch()
        status = self._running["trainer"].wait(timeout=300)
        if status:
            raise subprocess.CalledProcessError(status, "trainer")

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def _start(self, name: str) -> None:
        self._starts += 1
        what = ["trainer"] if name == "trainer" else ["worker"]
        rest = [] if name == "trainer" else [name, str(self._groups)]
        command = [sys.executable, "-m", _MODULE, *what, str(self._folder), *rest]
        self._running[name] = subprocess.Popen(
            [*command, str(self._starts)],
            stdin=subprocess.PIPE,
            env={**os.environ, **QUIET_CHILD},
        )


# --- the processes -------------------------------------------------------------------------------


def worker(folder: Path, name: str, groups: int, start: int) -> None:
    """Submit every group of this worker that it has not noted yet."""
    log = folder / f"{name}.log"
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sender = TrajectorySender(_store(folder, start), RUN, name)
    for number in range(len(_whole_lines(log)) // MEMBERS, groups):
        time.sleep(GROUP_SECONDS)
        members = _group(name, number)
        _until_it_answers(lambda members=members: sender.submit_many(members))  # type: ignore[misc]
        os.write(out, "".join(f"{member.id}\n" for member in members).encode())


def trainer(folder: Path, start: int) -> None:
    """Read, batch and checkpoint until there is nothing more to come."""
    receiver = TrajectoryReceiver(_store(folder, start), RUN, discover_seconds=0.1)
    batcher = GroupBatcher(RUN, max_staleness=MAX_STALENESS, group_timeout=3600)
    saved = _load(folder)
    if saved.receiver:
        receiver.restore(dict(saved.receiver))
        batcher.restore(base64.b64decode(saved.batcher), now=0)
    while True:
        last = (folder / _DONE).exists()
        arrived = _until_it_answers(lambda: receiver.consume(64))
        batcher.add(arrived, now=0)
        # At least one, so that groups are judged also while only old ones wait.
        whole = batcher.take(max(1, _fresh(batcher)), version=NOW_VERSION, now=0)
        saved.used += [member.id for group in whole for member in group.members]
        saved.stale += batcher.drain_dropped().get("stale", ())
        saved.receiver = receiver.state()
        saved.batcher = base64.b64encode(batcher.state(now=0)).decode()
        if arrived or whole:
            _save(folder, saved)
        elif last:
            return
        else:
            time.sleep(0.02)


def _fresh(batcher: GroupBatcher) -> int:
    """Whole groups that remain once the old ones are dropped."""
    batcher.take(1 << 30, version=NOW_VERSION, now=0)
    return batcher.whole_groups()


def _group(worker_id: str, number: int) -> list[Trajectory]:
    """The same each time it is asked for: a worker that was killed repeats its last group."""
    rng, name = random.Random(f"{worker_id}.{number}"), f"{worker_id}.{number}"
    tokens = PROMPT + ANSWER
    version = 0 if number % OLD_GROUPS == OLD_GROUPS - 1 else NOW_VERSION
    return [
        Trajectory(
            id=f"{name}-{member}",
            group_id=name,
            group_size=MEMBERS,
            worker_id=worker_id,
            token_ids=tuple(rng.randrange(50_000) for _ in range(tokens)),
            logprobs=(0.0,) * PROMPT + tuple(-rng.random() for _ in range(ANSWER)),
            loss_mask=(False,) * PROMPT + (True,) * ANSWER,
            spans=(PolicySpan(PROMPT, tokens, version, f"{version:064x}"),),
            turns=(
                Turn(role="user", start=0, end=PROMPT),
                Turn(role="model", start=PROMPT, end=tokens),
            ),
            reward=rng.random(),
            finish_reason="stop",
        )
        for member in range(MEMBERS)
    ]


def _store(folder: Path, start: int) -> FaultStore:
    rng = random.Random(start)

    def decide(_: Call) -> Fault | None:
        drawn = rng.random()
        return LoseReply() if drawn < FAILING / 2 else Fail() if drawn < FAILING else None

    return FaultStore(open_store(folder / "store"), decide=decide)


def _until_it_answers(call: Callable[[], _T]) -> _T:
    while True:
        with contextlib.suppress(StoreUnavailableError):
            return call()


def _whole_lines(log: Path) -> list[str]:
    return log.read_text().split("\n")[:-1] if log.exists() else []


def _acknowledged(folder: Path) -> list[str]:
    return [line for log in sorted(folder.glob("w*.log")) for line in _whole_lines(log)]


def _load(folder: Path) -> _Saved:
    file = folder / "checkpoint.json"
    if not file.exists():
        return _Saved(receiver={}, batcher="", used=[], stale=[])
    return msgspec.json.decode(file.read_bytes(), type=_Saved)


def _save(folder: Path, saved: _Saved) -> None:
    new = folder / "checkpoint.new"
    new.write_bytes(msgspec.json.encode(saved))
    new.replace(folder / "checkpoint.json")


def _main(arguments: Sequence[str]) -> None:
    leave_with_parent()
    if arguments[0] == "worker":
        worker(Path(arguments[1]), arguments[2], int(arguments[3]), int(arguments[4]))
    else:
        trainer(Path(arguments[1]), int(arguments[2]))


if __name__ == "__main__":
    _main(sys.argv[1:])
