"""Golden files equal regenerated ones, and docs/format.md says what the code does."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard
from golden_inputs import FOLDER, files

from farcast.delta import Patch, TensorBits, blocks, conditioned, encode_bits, writing
from farcast.delta.applying import Blob
from farcast.delta.conditioned import field_of
from farcast.delta.container import (
    MAX_HEADER_BYTES,
    MAX_NAME_CHARACTERS,
    MAX_TABLES,
    MAX_TENSORS,
)

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


@pytest.fixture(autouse=True)
def real_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as change:
        change.setattr(writing, "SMALL_WORDS", 1 << 16)
        change.setattr(blocks, "BLOCK_WORDS", 1 << 20)
        yield


@pytest.mark.parametrize("name", ["anchor-v1.far", "delta-v1.far", "small-v1.far"])
def test_golden_files_equal_regenerated_ones(name: str) -> None:
    stored, fresh = (FOLDER / name).read_bytes(), files()[name]
    old, new = Patch.open(stored), Patch.open(fresh)
    assert (old.entries, old.removed) == (new.entries, new.removed)
    if zstandard.ZSTD_VERSION == (1, 5, 7):  # the frames inside are the library's choice
        assert stored == fresh


def test_a_golden_delta_is_read() -> None:
    words = np.frombuffer((FOLDER / "delta-v1.far").read_bytes(), np.uint8)
    opened = Patch.open(words.tobytes())
    assert opened.removed == ("gone",)
    assert {name: entry.kind for name, entry in opened.entries.items()} == {
        "codes": "sparse", "head": "sparse", "new": "full", "weight": "sparse",
    }  # fmt: skip
    assert {row.coding for row in opened._rows.values()} >= {"blocks", "full"}


def hex_of(section: str) -> bytes:
    """The bytes of the hex block below a heading; what follows two spaces and a bar is comment."""
    block = re.search(rf"### {section}\n.*?```hex\n(.*?)```", PAGE, re.S)
    assert block, section
    return bytes.fromhex("".join(line.split("|")[0] for line in block.group(1).splitlines()))


def worked_example() -> tuple[TensorBits, TensorBits]:
    base = np.array([0x3F80, 0x3F90, 0x4000, 0x3FA0, 0xBF80, 0x4040, 0x3F81, 0x3FFF], "<u2")
    target = base.copy()
    target[3] += 1
    target[5] -= 3
    target[6] += 1
    return tuple(TensorBits("BF16", (8,), words.view(np.uint8)) for words in (base, target))


def test_the_worked_block() -> None:
    base, target = worked_example()
    classes = conditioned.Classes(field_of("BF16"), 127, 128)
    found = blocks.survey(base.data, target.data, 16, classes)
    rows = np.array([[2, 31, 31, 2, 1], [0, 31, 31, 1, 0]], np.uint8)
    table = conditioned.Parameters(127, 128, rows)
    assert table.pack() == hex_of("A table")
    block = blocks.write_block(found, 0, rows, base.data, target.data, 16, classes)
    assert block == hex_of("A block")
    buffer = base.data.copy()
    data = np.frombuffer(block + bytes(8), np.uint8)
    layout = blocks.Layout.of(16, 16)
    blob = Blob(data, [(0, len(block))], layout, field_of("BF16"), [table])
    assert blob.apply(buffer, 3).changed == 3
    assert buffer.tobytes() == target.data.tobytes()


def test_the_worked_file() -> None:
    base, target = worked_example()
    stored = hex_of("A file")
    opened = Patch.open(stored)
    buffer = base.data.copy()
    assert opened.apply_into("w", buffer) == 3
    assert buffer.tobytes() == target.data.tobytes()
    if zstandard.ZSTD_VERSION == (1, 5, 7):
        assert encode_bits({"w": base}, {"w": target}).data == stored


@pytest.mark.parametrize("limit", [MAX_HEADER_BYTES, MAX_TENSORS, MAX_NAME_CHARACTERS, MAX_TABLES])
def test_the_page_names_each_limit(limit: int) -> None:
    assert f"{limit:,}" in PAGE
