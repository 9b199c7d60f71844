"""One test per malformed input: a typed refusal, at once, with the buffer as it was."""

import tracemalloc

import numpy as np
import pytest
from forging import Bits, base_bits, one_class, reheadered, sealed, valid

from farcast.delta import Patch, encode
from farcast.delta.coding import decode_sparse
from farcast.delta.container import MAGIC, PREFIX
from farcast.errors import FormatError, IntegrityError, LimitError


def refused_untouched(data: bytes, words: int = 100) -> None:
    patch = Patch.open(data)
    buffer = np.arange(words, dtype="<u2").view(np.uint8).copy()
    before = buffer.copy()
    with pytest.raises(FormatError):
        patch.apply_into("w", buffer)
    assert (buffer == before).all()


def change_row(field: int, value: object) -> bytes:
    def change(header: list) -> None:
        header[2][0][field] = value

    return reheadered(change)


def test_the_forge_makes_valid_files() -> None:
    blob = Bits().rice(2, 0)
    blob.rice(3, 0).rice(0, 0).raw(0, 1)  # gap 3, a difference of one, up
    blob.rice(4, 0).rice(6, 0).raw(1, 1)  # gap 4, a difference of 7, down
    patch = Patch.open(one_class(blob.bytes(), changed=2))
    buffer = np.full(100, 50, "<u2").view(np.uint8)
    assert patch.apply_into("w", buffer, verify=False) == 2
    words = buffer.view("<u2")
    assert (words[3], words[8]) == (51, 43)
    assert np.count_nonzero(words != 50) == 2


def test_case_025_a_position_at_the_end() -> None:
    """Case 025: index == numel."""
    refused_untouched(
        one_class(Bits().rice(1, 0).rice(100, 0).rice(0, 0).raw(0, 1).bytes(), changed=1)
    )


def test_case_025_a_position_far_behind_the_end() -> None:
    blob = Bits().rice(1, 0).rice(2**63, 0).rice(0, 0).raw(0, 1)
    refused_untouched(one_class(blob.bytes(), changed=1))


def test_case_025_more_changes_than_the_header_says() -> None:
    blob = Bits().rice(2, 0)
    for _ in range(2):
        blob.rice(0, 0).rice(0, 0).raw(0, 1)
    refused_untouched(one_class(blob.bytes(), changed=1))


def test_fewer_changes_than_the_header_says() -> None:
    blob = Bits().rice(1, 0).rice(0, 0).rice(0, 0).raw(0, 1)
    refused_untouched(one_class(blob.bytes(), changed=2))


def test_a_count_beyond_the_tensor() -> None:
    refused_untouched(one_class(Bits().rice(2**40, 0).bytes(), changed=1))


def test_a_block_that_ends_inside_a_number() -> None:
    blob = Bits().rice(1, 0).rice(90, 0).rice(0, 0).raw(0, 1).bytes()
    refused_untouched(one_class(blob[:-1], changed=1))


def test_an_endless_unary_number() -> None:
    refused_untouched(one_class(b"\xff" * 40, changed=1))


def test_bytes_after_the_last_number() -> None:
    blob = Bits().rice(1, 0).rice(0, 0).rice(0, 0).raw(0, 1).bytes()
    refused_untouched(one_class(blob + b"\x00", changed=1))


def test_padding_that_is_not_zero() -> None:
    blob = bytearray(Bits().rice(1, 0).rice(0, 0).rice(0, 0).raw(0, 1).bytes())
    blob[-1] |= 0x80
    refused_untouched(one_class(bytes(blob), changed=1))


def test_an_empty_block() -> None:
    refused_untouched(one_class(b"", changed=1))


def test_block_lengths_beyond_the_tensor() -> None:
    refused_untouched(one_class(b"\xff\xff\xff\xff\x00", changed=1, words=200), words=200)


def test_a_class_without_enough_words() -> None:
    """The base is another one: the class has fewer words than the change asks for."""
    patch = Patch.open(valid())
    buffer = np.zeros(base_bits().data.size, np.uint8)
    with pytest.raises(IntegrityError):
        patch.apply_into("w", buffer)
    assert not buffer.any()


def test_another_base_is_told_by_its_digest() -> None:
    buffer = base_bits().data.copy()
    buffer[0] ^= 1
    with pytest.raises((IntegrityError, FormatError)):
        Patch.open(valid()).apply_into("w", buffer)


def test_a_buffer_of_the_wrong_size() -> None:
    with pytest.raises(FormatError):
        Patch.open(valid()).apply_into("w", np.zeros(10, np.uint8))


@pytest.mark.parametrize("size", [0, 1, 47, 55])
def test_truncated_files(size: int) -> None:
    with pytest.raises((FormatError, IntegrityError)):
        Patch.open(valid()[:size])


def test_trailing_bytes() -> None:
    with pytest.raises(IntegrityError):
        Patch.open(valid() + b"\x00")


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 10**4])
@pytest.mark.parametrize("which", ["raw", "packed"])
def test_case_101_header_lengths(which: str, length: int) -> None:
    """Case 101: no length is believed before it is bounded."""
    data = valid()
    _, raw, packed = PREFIX.unpack_from(data)
    raw, packed = (length, packed) if which == "raw" else (raw, length)
    tracemalloc.start()
    with pytest.raises(FormatError):
        Patch.open(sealed(PREFIX.pack(MAGIC, raw, packed) + data[PREFIX.size : -32]))
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_case_101_an_impossible_shape() -> None:
    with pytest.raises(LimitError):
        Patch.open(change_row(2, [2**62, 4]))


def test_a_negative_dimension() -> None:
    with pytest.raises(FormatError):
        Patch.open(change_row(2, [-300]))


def test_seventeen_dimensions() -> None:
    with pytest.raises(FormatError):
        Patch.open(change_row(2, [1] * 17))


def test_an_unknown_dtype() -> None:
    with pytest.raises(FormatError):
        Patch.open(change_row(1, "BF17"))


def test_case_025_another_dtype_of_the_same_size() -> None:
    """Case 025: wrong dtype. The new bits' digest is what closes this."""
    buffer = base_bits().data.copy()
    with pytest.raises((FormatError, IntegrityError)):
        Patch.open(change_row(1, "F16")).apply_into("w", buffer)


def test_an_unknown_coding() -> None:
    with pytest.raises(FormatError):
        Patch.open(change_row(3, "pickle"))


def rekinded(kind: int) -> bytes:
    """A valid container whose last block, the only byte of its third, says another kind."""
    body = bytearray(valid()[:-32])
    patch = Patch.open(valid())
    blob = patch._spans["w"][0]
    first, second = np.frombuffer(bytes(body[blob : blob + 8]), "<u4").tolist()
    body[blob + 8 + first + second] = kind
    return sealed(bytes(body))


@pytest.mark.parametrize("kind", [7, 239, 240, 251, 252, 253, 254, 255])
def test_a_table_that_is_not_there_and_kinds_that_do_not_fit(kind: int) -> None:
    """What earlier blocks wrote before the bad one was met is taken back."""
    buffer = base_bits().data.copy()
    with pytest.raises(FormatError):
        Patch.open(rekinded(kind)).apply_into("w", buffer)
    assert buffer.tobytes() == base_bits().data.tobytes()


@pytest.mark.parametrize("block", [0, -1, 1, 1 << 20, (1 << 20) + 1, 2**63])
def test_blocks_of_another_size(block: int) -> None:
    buffer = base_bits().data.copy()
    with pytest.raises(FormatError):
        Patch.open(change_row(4, block)).apply_into("w", buffer)
    assert buffer.tobytes() == base_bits().data.tobytes()


def test_codes_in_words_that_are_floats() -> None:
    with pytest.raises(FormatError):
        Patch.open(change_row(3, "codes"))


def test_rows_that_are_not_whole_blocks() -> None:
    patch = Patch.open(valid())
    for start, stop in ((0, 129), (1, 128), (-128, 0), (128, 128), (0, 301), (256, 10**9)):
        with pytest.raises(FormatError):
            patch.change_rows("w", np.zeros(256, np.uint8), start, stop)
    with pytest.raises(FormatError):
        patch.change_rows("w", np.zeros(255, np.uint8), 0, 128)


def test_more_changes_than_elements() -> None:
    with pytest.raises(FormatError):
        Patch.open(change_row(5, 301))


@pytest.mark.parametrize("size", [0, 10**6, 2**63])
def test_a_wrong_blob_size(size: int) -> None:
    with pytest.raises(FormatError):
        Patch.open(change_row(6, size))


def test_two_tensors_of_one_name() -> None:
    def change(header: list) -> None:
        header[2].append(header[2][0])

    with pytest.raises(FormatError):
        Patch.open(reheadered(change))


def test_a_tensor_removed_and_written() -> None:
    def change(header: list) -> None:
        header[0].append("w")

    with pytest.raises(FormatError):
        Patch.open(reheadered(change))


def test_case_101_a_million_empty_tensors() -> None:
    """Case 101."""

    def change(header: list) -> None:
        header[2] = [[f"{i:07}", "U8", [0], "full", 0, 0, 0] for i in range(600_000)]

    with pytest.raises(FormatError):
        Patch.open(reheadered(change))


@pytest.mark.parametrize(
    "table",
    [
        b"",
        b"\x00\x00",
        b"\x05\x04" + bytes(3),
        b"\x00\x00" + b"\x1f\x00\x00",
        bytes(8),
        bytes((0, 32)) + bytes(99),
    ],
)
def test_malformed_tables(table: bytes) -> None:
    def change(header: list) -> None:
        header[1] = [table]

    with pytest.raises(FormatError):
        Patch.open(reheadered(change))


def test_planes_that_claim_a_wrong_size() -> None:
    data = change_row(3, "planes")
    buffer = base_bits().data.copy()
    before = buffer.copy()
    with pytest.raises(FormatError):
        Patch.open(data).apply_into("w", buffer)
    assert (buffer == before).all()


@pytest.mark.parametrize("block", [1, 1 << 20])
def test_a_whole_tensor_of_a_terabyte_in_a_few_bytes(block: int) -> None:
    def claim(header: list) -> None:
        row = header[2][0]
        row[2], row[3], row[4] = [1 << 39], "full", block

    patch = Patch.open(reheadered(claim))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="table of blocks"):
            patch.full("w")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_whole_tensor_larger_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(1).integers(0, 256, 4096, dtype=np.uint8)
    patch = Patch.open(encode({}, {"w": noise}))

    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "empty", refuse)
    with pytest.raises(LimitError, match="4096 bytes"):
        patch.full("w")


@pytest.mark.parametrize("blob", [b"", bytes(2), bytes(1000), b"\0\1" + bytes(8), b"\1" + bytes(9)])
def test_a_terabyte_of_changes_in_a_few_bytes(blob: bytes) -> None:
    """Where deltas are joined without their base, nothing but the bytes says how many there are."""
    with pytest.raises(FormatError):
        decode_sparse(blob, 1 << 40, 1 << 40, 1)
