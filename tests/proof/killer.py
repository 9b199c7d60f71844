"""A process that runs a job again and again, each time in a fork that kills itself with SIGKILL at
one chosen moment: at a store call, or at a call that changes a file system.

Moments are counted: each call has one before it and one after it, and a write one in its middle.
The fork starts with everything imported and compiled, so a kill takes milliseconds. What the kernel
has taken is not lost by a kill: what a power failure loses is not tried here.

    python killer.py   # a JSON line in: {"job", "folder", "moment"}; one out: {"killed", "moments"}
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from farcast.publish import Publisher
from farcast.replica import CheckpointDirectory, Subscriber
from farcast.store import Store, open_store
from farcast.store.base import ObjectInfo
from version_world import RUN, tensors

CHANGING = (
    *("write", "pwrite", "fsync", "ftruncate", "fchmod"),
    *("link", "rename", "replace", "unlink", "mkdir", "rmdir"),
)
SHARD = 600


class Moments:
    """Counts, and ends the process at number `fatal` (from 1; 0: never)."""

    def __init__(self, fatal: int) -> None:
        self.count = 0
        self._fatal = fatal

    def pass_one(self) -> None:
        self.count += 1
        if self.count == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch_files(self) -> None:
        for name in CHANGING:
            setattr(os, name, self._watched(getattr(os, name), halves=name in ("write", "pwrite")))
        original = os.open

        def opened(path: Any, flags: int, *rest: Any, **named: Any) -> int:
            if not flags & os.O_CREAT:
                return original(path, flags, *rest, **named)
            return self._watched(original)(path, flags, *rest, **named)

        os.open = opened  # type: ignore[assignment]

    def _watched(self, call: Callable[..., Any], *, halves: bool = False) -> Callable[..., Any]:
        def watched(*args: Any, **named: Any) -> Any:
            self.pass_one()
            if halves:
                self.count += 1
                if self.count == self._fatal:
                    file, data, *rest = args
                    call(file, memoryview(data)[: len(data) // 2], *rest)
                    os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args, **named)
            self.pass_one()
            return result

        return watched


class WatchedStore:
    """`store`, with a moment before and after every call."""

    def __init__(self, store: Store, moments: Moments) -> None:
        self._store = store
        self._moments = moments

    @property
    def url(self) -> str:
        return self._store.url

    def _around(self, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        self._moments.pass_one()
        try:
            return call(*args, **named)
        finally:
            self._moments.pass_one()

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False) -> None:
        self._around(self._store.put, key, data, if_absent=if_absent)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return bytes(self._around(self._store.get, key, max_bytes=max_bytes))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return bytes(self._around(self._store.get_range, key, start, length))

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        return iter(self._around(lambda: list(self._store.list(prefix, start_after=start_after))))

    def delete(self, key: str) -> None:
        self._around(self._store.delete, key)


def publisher(store: Store) -> Publisher:
    """Every version is a delta, every second one squashed or an anchor too."""
    return Publisher(store, RUN, anchor_every=2, squash=2, part_bytes=300, workers=1)


def publish(folder: Path, moments: Moments) -> None:
    """Two more versions, then what is old goes."""
    with publisher(WatchedStore(open_store(folder / "store"), moments)) as trainer:
        first = 0 if trainer.newest is None else trainer.newest.version + 1
        for step in (first, first + 1):
            trainer.publish(tensors(step), step=step)
        trainer.collect_garbage(keep=1, grace=0.0)


def sync(folder: Path, moments: Moments) -> None:
    """The checkpoint folder to the newest version."""
    store = WatchedStore(open_store(folder / "store"), moments)
    target = CheckpointDirectory(folder / "model", max_shard_bytes=SHARD)
    Subscriber(store, RUN, target, workers=1).sync()


JOBS = {"publish": publish, "sync": sync}


def main() -> None:
    publish_twice_here()
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            run(order, writer)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            said = pipe.read().decode()
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            raise SystemExit("the job failed")
        moments = int(said) if said else order["moment"]
        print(json.dumps({"killed": os.WIFSIGNALED(status), "moments": moments}), flush=True)


def run(order: dict[str, Any], writer: int) -> None:
    """The fork: never returns."""
    status, write = 1, os.write
    try:
        moments = Moments(order["moment"])
        moments.watch_files()
        JOBS[order["job"]](Path(order["folder"]), moments)
        write(writer, str(moments.count).encode())
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def publish_twice_here() -> None:
    """Compiles the kernels before the first fork."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        publish(Path(folder), Moments(0))
        sync(Path(folder), Moments(0))


if __name__ == "__main__":
    main()
