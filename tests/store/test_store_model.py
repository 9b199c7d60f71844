"""Any sequence of calls leaves a store as it would leave a dictionary, whoever makes them."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from farcast.errors import (
    IntegrityError,
    InvalidKeyError,
    LimitError,
    ObjectExistsError,
    ObjectNotFoundError,
)
from farcast.store import MemoryStore, Store, open_store
from servers import Bucket

SEGMENTS = st.sampled_from(["a", "a-b", "a.b", "a0", "b"])
KEYS = st.lists(SEGMENTS, min_size=1, max_size=3).map("/".join)
BYTES = st.binary(max_size=50)


class StoreMachine(RuleBasedStateMachine):
    """`folders`: what happens to an object that is to lie below another, or to be its folder.
    The contract forbids it; a flat store allows it, a folder refuses it, some servers muddle."""

    folders: Literal["allowed", "refused", "avoided"] = "allowed"

    def open(self) -> Store:
        return MemoryStore()

    def __init__(self) -> None:
        super().__init__()
        self.store = self.open()
        self.model: dict[str, bytes] = {}
        self.made: set[str] = set()

    def blocked(self, key: str) -> bool:
        above = [key[:at] for at, char in enumerate(key) if char == "/"]
        return self.folders != "allowed" and (
            key in self.made or any(path in self.model for path in above)
        )

    @rule(key=KEYS, data=BYTES, if_absent=st.booleans())
    def put(self, key: str, data: bytes, if_absent: bool) -> None:
        if self.blocked(key):
            if self.folders == "avoided":
                return
            with pytest.raises((InvalidKeyError, ObjectExistsError)):
                self.store.put(key, data, if_absent=if_absent)
        elif if_absent and key in self.model:
            with pytest.raises(ObjectExistsError):
                self.store.put(key, data, if_absent=True)
        else:
            self.store.put(key, data, if_absent=if_absent)
            self.model[key] = data
        above = [key[:at] for at, char in enumerate(key) if char == "/"]
        for path in above:
            if path in self.model:
                break
            self.made.add(path)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        if not self.blocked(key):
            self.store.delete(key)
            self.model.pop(key, None)

    @rule(key=KEYS, limit=st.integers(0, 60))
    def get(self, key: str, limit: int) -> None:
        data = self.model.get(key)
        if data is None:
            with pytest.raises(ObjectNotFoundError):
                self.store.get(key, max_bytes=limit)
        elif len(data) > limit:
            with pytest.raises(LimitError):
                self.store.get(key, max_bytes=limit)
        else:
            assert self.store.get(key, max_bytes=limit) == data

    @rule(key=KEYS, start=st.integers(0, 60), length=st.integers(1, 60))
    def get_range(self, key: str, start: int, length: int) -> None:
        data = self.model.get(key)
        if data is None:
            with pytest.raises(ObjectNotFoundError):
                self.store.get_range(key, start, length)
        elif start + length > len(data):
            with pytest.raises(IntegrityError):
                self.store.get_range(key, start, length)
        else:
            assert self.store.get_range(key, start, length) == data[start : start + length]

    @rule(prefix=st.none() | KEYS, after=st.none() | KEYS)
    def list(self, prefix: str | None, after: str | None) -> None:
        below = f"{prefix}/" if prefix else ""
        found = [(info.key, info.size) for info in self.store.list(below, start_after=after)]
        assert found == [
            (key, len(self.model[key]))
            for key in sorted(self.model)
            if key.startswith(below) and key > (after or "")
        ]

    @invariant()
    def lists_all(self) -> None:
        assert [info.key for info in self.store.list("")] == sorted(self.model)


class FileMachine(StoreMachine):
    folders = "refused"

    def open(self) -> Store:
        self.folder = Path(tempfile.mkdtemp())
        return open_store(self.folder)

    def teardown(self) -> None:
        shutil.rmtree(self.folder)


TestMemoryModel = StoreMachine.TestCase
TestMemoryModel.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestFileModel = FileMachine.TestCase
TestFileModel.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@pytest.mark.full
def test_s3_model(seaweed_bucket: Bucket) -> None:
    import secrets

    from hypothesis.stateful import run_state_machine_as_test

    class S3Machine(StoreMachine):
        folders = "avoided"

        def open(self) -> Store:
            return seaweed_bucket.open(f"model/{secrets.token_hex(8)}")

    run_state_machine_as_test(
        S3Machine, settings=settings(max_examples=40, stateful_step_count=20, deadline=None)
    )


RACE = """
import sys, time
from farcast.errors import ObjectExistsError
from farcast.store import open_store
root, name, start = sys.argv[1], sys.argv[2], float(sys.argv[3])
store, won = open_store(root), []
while time.time() < start:
    pass
for turn in range(50):
    try:
        store.put(f"versions/{turn}", name.encode() * 100, if_absent=True)
        won.append(turn)
    except ObjectExistsError:
        pass
print(*won)
"""


def test_processes_that_race_for_files_have_one_winner_each(tmp_path: Path) -> None:
    import time

    start = time.time() + 1.0
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(tmp_path / "new"), str(number), str(start)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    won = [[int(turn) for turn in racer.communicate(timeout=60)[0].split()] for racer in racers]
    assert sorted(turn for turns in won for turn in turns) == list(range(50))
    store = open_store(tmp_path / "new")
    for number, turns in enumerate(won):
        for turn in turns:
            assert store.get(f"versions/{turn}", max_bytes=1000) == str(number).encode() * 100
