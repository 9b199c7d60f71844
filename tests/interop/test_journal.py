"""What a recorder was told is durable is read back by the next one, whatever happened to the disk;
what cannot be read is kept."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from farcast.errors import FarcastError, LimitError
from farcast.interop import journal as module
from farcast.interop.journal import Closed, Journal

ENTRIES = [b"first" * 20, b"second" * 30, b"third" * 40]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    journal = Journal(tmp_path)
    for entry in ENTRIES:
        journal.append("s", entry)
    journal.append("other", b"x")
    journal.close()
    return tmp_path


def read(folder: Path) -> dict[str, list[bytes]]:
    journal = Journal(folder)
    found = dict(journal.sessions())
    journal.close()
    return found


def test_an_entry_that_no_start_would_read_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ENTRY", 100)
    journal = Journal(tmp_path)
    journal.append("s", b"x" * 100)
    with pytest.raises(LimitError, match="100"):
        journal.append("s", b"x" * 101)
    journal.append("s", b"y")
    journal.close()
    assert read(tmp_path) == {"s": [b"x" * 100, b"y"]}


def test_every_cut_of_the_tail_leaves_the_whole_entries(folder: Path) -> None:
    whole = (folder / "s.log").read_bytes()
    borders = [24 + len(ENTRIES[0]), 48 + len(ENTRIES[0]) + len(ENTRIES[1])]
    for cut in range(len(whole)):
        (folder / "s.log").write_bytes(whole[:cut])
        kept = sum(cut >= border for border in borders)
        assert read(folder)["s"] == ENTRIES[:kept]
        assert (folder / "s.log").stat().st_size == [0, *borders][kept]


def test_a_tail_of_zeros_is_what_a_file_system_left_of_a_write(folder: Path) -> None:
    whole = (folder / "s.log").read_bytes()
    (folder / "s.log").write_bytes(whole + bytes(4096))
    assert read(folder)["s"] == ENTRIES
    assert (folder / "s.log").read_bytes() == whole


def test_a_flipped_bit_anywhere_loses_no_byte(folder: Path) -> None:
    """It is set aside as it is, the session is not open, and all others are."""
    whole = (folder / "s.log").read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << (at % 8)
        (folder / "s.log").write_bytes(damaged)
        journal = Journal(folder)
        assert dict(journal.sessions()) == {"other": [b"x"]}
        (aside,) = journal.set_aside
        journal.close()
        assert aside.read_bytes() == damaged
        assert not (folder / "s.log").exists()
        aside.unlink()


def test_what_is_set_aside_covers_nothing_set_aside_before(folder: Path) -> None:
    damaged = bytearray((folder / "s.log").read_bytes())
    damaged[30] ^= 1
    for _ in range(3):
        (folder / "s.log").write_bytes(damaged)
        read(folder)
    kept = [p for p in folder.iterdir() if "damaged" in p.name]
    assert [p.read_bytes() for p in kept] == [damaged] * 3


def test_a_torn_line_of_what_went_home_swallows_no_other(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    first, second = Closed("a", "d", ["a-0"]), Closed("b", "d", ["b-0"])
    journal.settle(first)
    journal.close()
    with (tmp_path / "closed").open("ab") as file:
        file.write(b'{"session":"torn","dig')
    journal = Journal(tmp_path)
    assert journal.closed() == [first]
    journal.settle(second)
    journal.close()
    journal = Journal(tmp_path)
    assert journal.closed() == [first, second]
    journal.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_write_that_failed_and_could_not_be_undone_is_undone_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    journal = Journal(tmp_path)
    journal.append("s", b"one")

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        patch.setattr(os, "ftruncate", fail)
        with pytest.raises(FarcastError):
            journal.append("s", b"refused")
    journal.append("s", b"two")
    journal.close()
    assert read(tmp_path) == {"s": [b"one", b"two"]}


def test_a_folder_that_is_gone_is_a_typed_error_and_never_half_a_session(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.append("s", b"one")
    shutil.rmtree(tmp_path / "journal")
    for session in ("s", "new"):
        with pytest.raises(FarcastError, match="journal"):
            journal.append(session, b"two")
    (tmp_path / "journal").mkdir()
    with pytest.raises(FarcastError, match="journal"):
        journal.append("s", b"two")
    journal.append("new", b"one")
    (tmp_path / "journal" / "closed").mkdir()
    with pytest.raises(FarcastError, match="journal"):
        journal.settle(Closed("new", "d", []))
    journal.close()
    assert list((tmp_path / "journal").glob("*.log")) == [tmp_path / "journal" / "new.log"]


def test_what_went_home_long_ago_leaves_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CLOSED", 3)
    journal = Journal(tmp_path)
    every = [Closed(f"s{number}", "d", []) for number in range(7)]
    for closed in every:
        journal.settle(closed)
    journal.close()
    journal = Journal(tmp_path)
    assert journal.closed() == every[-3:]
    journal.settle(Closed("last", "d", []))
    journal.close()
    lines = (tmp_path / "closed").read_text().splitlines()
    assert len(lines) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["closed", "lock"]
