"""The file store keeps its promise of durability, and keeps to its own folder."""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farcast.errors import (
    InvalidKeyError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreAccessError,
    StoreFullError,
    StoreUnavailableError,
    StoreUnsupportedError,
)
from farcast.store import Store, open_store
from farcast.store.local import STAGING


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def keys(store: Store) -> list[str]:
    return [info.key for info in store.list("")]


# --- durable on return ---------------------------------------------------------------------------


@pytest.mark.parametrize("if_absent", [False, True])
def test_bytes_name_and_folders_are_synced_in_that_order(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, if_absent: bool
) -> None:
    events: list[str] = []

    def path_of(descriptor: int) -> str:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink()).removeprefix(str(tmp_path))

    def record(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            events.append(f"{name} {path_of(args[0])}" if name == "fsync" else name)
            return real(*args, **options)

        return run

    monkeypatch.setattr(os, "fsync", record("fsync", os.fsync))
    monkeypatch.setattr(os, "link", record("publish", os.link))
    monkeypatch.setattr(os, "replace", record("publish", os.replace))
    store.put("a/b/k", b"x", if_absent=if_absent)
    assert {"fsync ", "fsync /store", "fsync /store/a"} <= set(events)  # new names above
    assert [event.partition("/")[0] for event in events[-3:]] == ["fsync ", "publish", "fsync "]
    assert STAGING in events[-3]
    assert events[-1] == "fsync /store/a/b"


def test_a_refused_create_waits_for_the_winner_to_be_durable(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("k", b"x", if_absent=True)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with pytest.raises(ObjectExistsError):
        store.put("k", b"y", if_absent=True)
    assert synced


CRASH = """
import os, signal, sys
from farcast.store import open_store
from farcast.store.local import FileStore  # imported once, before the forks

def counted(real, state):
    def run(*args, **options):
        state["seen"] += 1
        if state["seen"] == state["kill_at"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)
    return run

def child(root, kill_at, if_absent):
    state = {"seen": 0, "kill_at": kill_at}
    for name in ("open", "mkdir", "write", "fsync", "link", "replace", "unlink"):
        setattr(os, name, counted(getattr(os, name), state))
    open_store(root).put("versions/2", b"new" * 1000, if_absent=if_absent)

folder, if_absent = sys.argv[1], sys.argv[2] == "1"
for kill_at in range(1, 1000):
    process = os.fork()
    if process == 0:
        child(f"{folder}/killed-{kill_at}", kill_at, if_absent)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) != -signal.SIGKILL:
        break
print(kill_at)
"""


@pytest.mark.parametrize("if_absent", [False, True])
def test_killed_at_any_call_leaves_all_or_nothing(tmp_path: Path, if_absent: bool) -> None:
    command = [sys.executable, "-c", CRASH, str(tmp_path), str(int(if_absent))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    whole = int(done.stdout)
    assert 10 < whole < 100
    outcomes: set[bool] = set()
    for kill_at in range(1, whole + 1):
        root = tmp_path / f"killed-{kill_at}"
        store = open_store(root)
        assert keys(store) in ([], ["versions/2"])
        outcomes.add(bool(keys(store)))
        if keys(store):
            assert store.get("versions/2", max_bytes=3000) == b"new" * 1000
        store.put("versions/3", b"after")
        assert keys(store)[-1] == "versions/3"
        assert not list((root / STAGING).iterdir()), f"left behind after call {kill_at}"
    assert outcomes == {False, True}


def test_a_living_writers_temporary_file_is_left_alone(store: Store, tmp_path: Path) -> None:
    store.put("k", b"x")
    staging = tmp_path / "store" / STAGING
    dead, alive = staging / "dead", staging / "alive"
    dead.write_bytes(b"half")
    with alive.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        open_store(tmp_path / "store").put("k2", b"x")
        assert [path.name for path in staging.iterdir()] == ["alive"]
        assert keys(store) == ["k", "k2"]


# --- failing disks -------------------------------------------------------------------------------


def failing(real: Callable[..., Any], code: int, nth: int) -> Callable[..., Any]:
    seen = [0]

    def run(*args: Any, **options: Any) -> Any:
        seen[0] += 1
        if seen[0] == nth:
            raise OSError(code, os.strerror(code))
        return real(*args, **options)

    return run


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.ENOSPC, StoreFullError),
        (errno.EDQUOT, StoreFullError),
        (errno.EACCES, StoreAccessError),
        (errno.EROFS, StoreAccessError),
        (errno.EIO, StoreUnavailableError),
    ],
)
@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_failing_disk_leaves_the_old_object(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    expected: type[Exception],
    call: str,
) -> None:
    store.put("k", b"old")
    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing(getattr(os, call), code, 1))
        with pytest.raises(expected, match=errno.errorcode[code]):
            store.put("k", b"new")
    assert store.get("k", max_bytes=3) == b"old"
    assert files(tmp_path / "store") == ["k"]
    store.put("k", b"new")
    assert store.get("k", max_bytes=3) == b"new"


def test_full_in_the_middle_of_a_large_object(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farcast.store.local._MAX_WRITE", 1000)
    for nth in (1, 5, 10):
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", failing(os.write, errno.ENOSPC, nth))
            with pytest.raises(StoreFullError, match="free some"):
                store.put("objects/big", b"x" * 10_000, if_absent=True)
        assert files(tmp_path / "store") == []
    store.put("objects/big", b"x" * 10_000, if_absent=True)
    assert len(store.get("objects/big", max_bytes=10_000)) == 10_000


def test_a_really_full_disk() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    from farcast.store.failures import translated_os_errors
    from farcast.store.local import _write

    descriptor = os.open(full, os.O_WRONLY)
    try:
        with pytest.raises(StoreFullError), translated_os_errors("file:///x", "k"):
            _write(descriptor, memoryview(b"x" * 100_000))
    finally:
        os.close(descriptor)


UNPRIVILEGED = """
import os, sys
from farcast.errors import StoreError
from farcast.store import open_store
store = open_store(sys.argv[1])
if os.getuid() == 0:
    os.setuid(65534)
for call in (lambda: store.put("k", b"x"), lambda: store.put("old", b"x", if_absent=True)):
    try:
        call()
    except StoreError as error:
        print(type(error).__name__, error)
"""


def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    folder = tmp_path / "readonly"
    folder.mkdir()
    folder.chmod(0o555)
    command = [sys.executable, "-c", UNPRIVILEGED, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("StoreAccessError") and "EACCES" in line for line in lines)


# --- places that cannot be -----------------------------------------------------------------------


def test_reading_makes_nothing(store: Store, tmp_path: Path) -> None:
    assert keys(store) == []
    store.delete("k")
    with pytest.raises(ObjectNotFoundError):
        store.get("k", max_bytes=1)
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_cannot_be_made_is_one_clear_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file/below", Path("/proc/nothing/here")):
        with pytest.raises(StoreAccessError, match="folder"):
            open_store(path).put("k", b"x")


def test_a_root_that_is_gone_is_an_outage_and_is_never_made_anew(
    store: Store, tmp_path: Path
) -> None:
    """A renamed folder or a lost mount: an empty store in its place would take half of a run."""
    root, away = tmp_path / "store", tmp_path / "away"
    store.put("a/k", b"x")
    reader = open_store(root)
    assert keys(reader) == ["a/k"]
    root.rename(away)
    for one in (store, reader):
        for call in (
            lambda s: s.put("a/k", b"y"),
            lambda s: s.put("b/new", b"y", if_absent=True),
            lambda s: s.get("a/k", max_bytes=1),
            lambda s: s.get_range("a/k", 0, 1),
            lambda s: list(s.list("")),
            lambda s: s.delete("a/k"),
        ):
            for _ in range(2):
                with pytest.raises(StoreUnavailableError, match="put it back"):
                    call(one)
    assert not root.exists()
    away.rename(root)
    store.put("b/new", b"y", if_absent=True)
    assert keys(reader) == ["a/k", "b/new"]


def test_a_folder_removed_inside_the_root_is_made_again_by_the_next_try(
    store: Store, tmp_path: Path
) -> None:
    import shutil

    store.put("a/k", b"x")
    shutil.rmtree(tmp_path / "store/a")
    with pytest.raises(StoreUnavailableError, match="removed"):
        store.put("a/k", b"x")
    store.put("a/k", b"x")
    assert keys(store) == ["a/k"]


def test_an_object_is_no_folder(store: Store) -> None:
    store.put("a/b", b"x")
    with pytest.raises(InvalidKeyError):
        store.put("a/b/c", b"x")
    for if_absent in (False, True):
        with pytest.raises(InvalidKeyError, match="folder of other objects"):
            store.put("a", b"x", if_absent=if_absent)
    for absent in ("a/b/c", "a"):
        with pytest.raises(ObjectNotFoundError):
            store.get(absent, max_bytes=1)
    assert store.get("a/b", max_bytes=1) == b"x"


def test_links_out_of_the_store_are_never_followed(store: Store, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"s")
    store.put("in/k", b"x")
    (tmp_path / "store/out").symlink_to(outside)
    (tmp_path / "store/in/link").symlink_to(outside / "secret")
    for call in (
        lambda: store.put("out/new", b"x"),
        lambda: store.put("out/new", b"x", if_absent=True),
        lambda: store.put("out/deep/new", b"x"),
        lambda: store.get("out/secret", max_bytes=9),
        lambda: store.get_range("out/secret", 0, 1),
        lambda: store.delete("out/secret"),
        lambda: list(store.list("out/")),
        lambda: store.get("in/link", max_bytes=9),
    ):
        with pytest.raises(StoreAccessError, match="symbolic link"):
            call()
    assert files(outside) == ["secret"]
    assert keys(store) == ["in/k"]
    store.put("in/link", b"x")  # replaces the link, not its target
    assert (outside / "secret").read_bytes() == b"s"


def test_a_root_may_itself_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    open_store(tmp_path / "link").put("k", b"x")
    assert keys(open_store(tmp_path / "real")) == ["k"]


def test_foreign_files_are_not_objects(store: Store, tmp_path: Path) -> None:
    store.put("k", b"x")
    (tmp_path / "store/.DS_Store").write_bytes(b"")
    (tmp_path / "store/with space").write_bytes(b"")
    os.mkfifo(tmp_path / "store/pipe")
    assert keys(store) == ["k"]


def test_a_pipe_in_the_folder_does_not_hold_a_reader(store: Store, tmp_path: Path) -> None:
    store.put("k", b"x")
    os.mkfifo(tmp_path / "store/pipe")
    read = f"open_store({str(tmp_path / 'store')!r}).get('pipe', max_bytes=9)"
    code = f"from farcast.store import open_store; {read}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30)
    assert b"ObjectNotFoundError" in done.stderr


def test_folders_deeper_than_any_key_are_passed_over(store: Store, tmp_path: Path) -> None:
    store.put("k", b"x")
    folder = os.open(tmp_path / "store", os.O_RDONLY)
    for _ in range(600):
        os.mkdir("d", dir_fd=folder)
        below = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(os.open("k", os.O_CREAT, dir_fd=folder))
    os.close(folder)
    assert keys(store) == ["k"]


def test_no_descriptor_leaks(store: Store) -> None:
    store.put("a/b/c", b"x")

    def use() -> None:
        store.put("a/b/c", b"x")
        store.get("a/b/c", max_bytes=9)
        list(store.list(""))
        next(store.list(""))
        store.delete("a/b/c")
        for absent in ("a/b/c", "a/x/c"):
            with pytest.raises(ObjectNotFoundError):
                store.get(absent, max_bytes=9)

    use()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        use()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_a_file_system_without_hard_links_cannot_create_conditionally(
    store: Store, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "link", failing(os.link, code, 1))
    with pytest.raises(StoreUnsupportedError, match="hard links"):
        store.put("k", b"x", if_absent=True)
    assert keys(store) == []
