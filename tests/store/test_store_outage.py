"""A real server dies and comes back while writers are at work; what was acknowledged is there."""

import threading
import time
from pathlib import Path

import pytest

from farcast.errors import ObjectExistsError, StoreError
from farcast.store import Store
from servers import running_seaweed

WRITERS = 3
OBJECTS = 60


class Writer(threading.Thread):
    """Writes its objects in order, each until it is acknowledged, as a publisher does: a
    retryable error is tried again, and "exists" is its own write if the content is."""

    def __init__(self, store: Store, number: int) -> None:
        super().__init__()
        self.store = store
        self.number = number
        self.acknowledged: list[str] = []
        self.failures: list[StoreError] = []
        self.waited = 0

    def content(self, turn: int) -> bytes:
        return f"{self.number}/{turn} ".encode() * 200

    def run(self) -> None:
        for turn in range(OBJECTS):
            key = f"trajectories/w{self.number}/{turn:06d}"
            while not self.written(key, self.content(turn)):
                if self.failures:
                    return
                self.waited += 1
                time.sleep(0.1)
            self.acknowledged.append(key)

    def written(self, key: str, data: bytes) -> bool:
        try:
            try:
                self.store.put(key, data, if_absent=True)
            except ObjectExistsError:
                assert self.store.get(key, max_bytes=len(data)) == data
        except StoreError as error:
            if not error.retry:
                self.failures.append(error)
            return False
        return True


@pytest.mark.full
@pytest.mark.timeout(170)
def test_nothing_acknowledged_is_lost_when_the_server_is_killed(tmp_path: Path) -> None:
    with running_seaweed(tmp_path) as server:
        writers = [
            Writer(server.bucket.open("run", retries=1, timeout=5), number)
            for number in range(WRITERS)
        ]
        for writer in writers:
            writer.start()
        while len(writers[0].acknowledged) < OBJECTS // 3:
            time.sleep(0.01)
        server.kill()
        time.sleep(1)
        server.start()
        for writer in writers:
            writer.join()
        assert [writer.failures for writer in writers] == [[]] * WRITERS
        assert sum(writer.waited for writer in writers) > 0
        store = server.bucket.open("run")
        listed = [info.key for info in store.list("")]
        assert listed == sorted(key for writer in writers for key in writer.acknowledged)
        for writer in writers:
            for turn, key in enumerate(writer.acknowledged):
                assert store.get(key, max_bytes=10_000) == writer.content(turn)
