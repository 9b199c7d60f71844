"""The file of words: what was written is read, and nothing else is ever believed."""

from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from farcast.engines.words_file import Change, WordsWriter, read_words
from farcast.errors import FarcastError, FormatError, IntegrityError


def change(name: str, positions: list[int], kind: str = "<u2") -> Change:
    count = len(positions)
    return Change(
        name,
        1000,
        np.array(positions, np.uint32),
        np.arange(count).astype(kind),
        np.arange(count).astype(kind) + 7,
    )


def write_words(path: Path, changes: list[Change]) -> str:
    writer = WordsWriter(path)
    for one in changes:
        writer.add(one)
    return writer.finish()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    changes = [change("a", [0, 5, 999]), change("empty", []), change("b", [3], "<u8")]
    digest = write_words(tmp_path / "w", changes)
    for read, written in zip(read_words(tmp_path / "w", digest), changes, strict=True):
        assert read.name == written.name
        assert all(np.array_equal(a, b) for a, b in zip(read[2:], written[2:], strict=True))
        assert read.new.dtype == written.new.dtype


def test_another_file_is_not_read(tmp_path: Path) -> None:
    digest = write_words(tmp_path / "a", [change("a", [1])])
    write_words(tmp_path / "b", [change("a", [2])])
    with pytest.raises(IntegrityError):
        list(read_words(tmp_path / "b", digest))


@pytest.mark.parametrize(
    "positions", [[5, 4], [5, 5], [1000], [0, 4_000_000_000]], ids=["falls", "twice", "out", "far"]
)
def test_positions_that_no_writer_makes_are_refused(tmp_path: Path, positions: list[int]) -> None:
    digest = write_words(tmp_path / "w", [change("a", positions)])
    with pytest.raises(FormatError):
        list(read_words(tmp_path / "w", digest))


@settings(deadline=None)
@given(data=st.binary(max_size=200))
def test_any_bytes_end_in_a_typed_error(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.words"
    for body in (data, b"fcw1" + data, b"fcw1" + data + b"[]\x02\0\0\0"):
        path.write_bytes(body)
        try:
            assert list(read_words(path, blake3(body).hexdigest())) == []
        except FarcastError:
            continue


def test_a_link_is_never_written_through(tmp_path: Path) -> None:
    (tmp_path / "w").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="exist"):
        write_words(tmp_path / "w", [change("a", [1])])
    assert not (tmp_path / "elsewhere").exists()
