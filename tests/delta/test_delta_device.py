"""The codec on a device finds, locates, adds and hashes what the host's code does, bit for bit.

The torch passes run here on CPU tensors, Triton's kernels in their interpreter and through their
compiler; where there is a CUDA device, everything runs there too.
"""

import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.overrides import TorchFunctionMode  # noqa: E402

from farcast.delta import device, passes, to_bits, words_of  # noqa: E402
from farcast.delta.conditioned import FIELDS, PLAIN, field_of  # noqa: E402
from farcast.errors import FormatError  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F64": torch.float64,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I64": torch.int64,
    "C64": torch.complex64,
    "C128": torch.complex128,
    "F4": torch.float4_e2m1fn_x2,
}
PLACES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    ),
]
BORDERS = (127, 128, 255, 256, 299, 300, 383, 384, 599, 600)
Words = npt.NDArray[np.unsignedinteger]


@pytest.fixture(autouse=True, scope="module")
def small_pieces() -> Iterator[None]:
    """Pieces of a few blocks and changes, so that every seam is crossed."""
    with pytest.MonkeyPatch.context() as change:
        for module, name, size in (
            (device, "PIECE_WORDS", 1 << 12),
            (device, "PIECE_EVENTS", 100),
            (passes, "GATHERED", 1 << 13),
            (passes, "COUNTED", 1000),
            (passes, "CHUNKS_AT_ONCE", 32),
        ):
            change.setattr(module, name, size)
        if INTERPRETED:
            change.setattr(passes, "passes_of", lambda t: passes._triton(t.device))
        yield


def classes_of(words: Words, shift: int, mask: int, first: int, last: int) -> npt.NDArray[np.int64]:
    codes = (words.astype(np.uint64) >> np.uint64(shift)) & np.uint64(mask)
    return np.clip(codes.astype(np.int64) - first, 0, last - first)


def reference(old: Words, new: Words, block_words: int, *scheme: int) -> list[device.Found]:
    """What `find_on_device` says, word by word."""
    found = []
    for lo in range(0, old.size, block_words):
        a, b = old[lo : lo + block_words], new[lo : lo + block_words]
        classes = classes_of(a, *scheme)
        ranks = np.empty(a.size, np.uint32)
        for k in np.unique(classes):
            own = classes == k
            ranks[own] = np.arange(own.sum())
        at = np.flatnonzero(a != b)
        deltas = (b - a)[at].astype(np.uint64)
        found.append(device.Found(classes[at].astype(np.uint8), ranks[at], deltas, at.size))
    return found


def by_class(found: device.Found, start: int) -> tuple[npt.NDArray[np.int64], device.Found]:
    """Bounds that begin at `start`, and the changes ordered by class as a block holds them."""
    order = np.argsort(found.classes, kind="stable")
    numbers = np.bincount(found.classes, minlength=256)
    bounds = start + np.concatenate([[0], np.cumsum(numbers)])
    return bounds.astype(np.int64), device.Found(
        *(column[order] for column in found[:3]), order.size
    )


def tensor_of(words: Words, place: str) -> "torch.Tensor":
    signed = words if words.itemsize == 1 else words.view(f"<i{words.itemsize}")
    return torch.from_numpy(signed.copy()).to(place)


def check(old: Words, new: Words, block_words: int, scheme: tuple[int, ...], place: str) -> None:
    """Find against the reference, then all the way back from base to target."""
    fields = dict(zip(("shift", "mask", "first", "last"), scheme, strict=True))
    base, target = tensor_of(old, place), tensor_of(new, place)
    kept = base.clone()
    found = device.find_on_device(base, target, **fields, block_words=block_words)
    expected = reference(old, new, block_words, *scheme)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for column, wanted in zip(one[:3], other[:3], strict=True):
            assert column.dtype == wanted.dtype
            assert np.array_equal(column, wanted)
        assert one[3:] == other[3:]

    bounds, parts, places, done = [], [], [], 0
    for block, changes in enumerate(found):
        own, part = by_class(changes, done)
        bounds.append(own)
        parts.append(part)
        done = int(own[-1])
        ranks = np.concatenate([p.ranks for p in parts])
        lo, hi = block * block_words, min(old.size, (block + 1) * block_words)
        places.append(
            device.locate_on_device(base, lo=lo, hi=hi, **fields, bounds=own, ranks=ranks)
        )
        assert places[-1] is not None
    if not found:
        return
    assert torch.equal(base, kept)
    together = device.locate_blocks_on_device(
        base, block_words=block_words, **fields, bounds=np.array(bounds), ranks=ranks
    )
    assert together is not None
    assert torch.equal(together, torch.cat(places))
    steps = device.steps_on_device(np.concatenate([part.deltas for part in parts]), base)
    device.add_on_device(base, together, steps)
    assert torch.equal(base, target)
    device.add_on_device(base, together, steps, back=True)
    assert torch.equal(base, kept)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Words, Words, int, tuple[int, ...]]:
    """Two series of words, blocks of any size, and a field with any part of its classes."""
    width, field = draw(
        st.sampled_from(
            [(2, FIELDS["BF16"]), (2, FIELDS["F16"]), (4, FIELDS["F32"]), (1, FIELDS["F8_E4M3"]),
             (1, FIELDS["F8_E5M2"]), (1, PLAIN), (2, PLAIN), (4, PLAIN), (8, PLAIN), (8, (56, 255))]
        )
    )  # fmt: skip
    size = draw(st.sampled_from([0, 1, 100, 255, 256, 257, 600, 1500] + [6000] * (not INTERPRETED)))
    block_words = draw(st.sampled_from([128, 256, 300, 1 << 10, 1 << 12, 1 << 20]))
    first = draw(st.integers(0, field[1]))
    last = draw(st.integers(first, min(field[1], first + 20)))
    chance = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if draw(st.booleans()):  # like weights: classes that halve, and some that hold a word or none
        middle = 1 << (8 * width - 1)
        old = (chance.standard_normal(size) * middle / 8).astype(np.int64).astype(f"<i{width}")
        old = old.view(f"<u{width}")
    else:
        old = np.frombuffer(chance.bytes(size * width), f"<u{width}")
    share = draw(st.sampled_from([0, 0.002, 0.05, 0.5, 1]))
    step = np.frombuffer(chance.bytes(size * width), f"<u{width}")
    new = old + np.where(chance.random(size) < share, step, 0).astype(old.dtype)
    return old, new, block_words, (*field, first, last)


@pytest.mark.parametrize("place", PLACES)
@settings(
    max_examples=15 if INTERPRETED else 150,
    deadline=None,
    derandomize=INTERPRETED,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(case=cases())
def test_changes_are_found_and_applied(
    place: str, case: tuple[Words, Words, int, tuple[int, ...]]
) -> None:
    check(*case, place)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("at", [128, 299, 1199] if INTERPRETED else [0, *BORDERS, 1199])
def test_a_single_change_of_a_rare_class_at_every_border(at: int, place: str) -> None:
    old = np.full(1200, 0x3C00, "<u2")
    old[[17, 301, 302, at]] = 0x4100
    new = old.copy()
    new[at] = 0xFFFF
    for block_words in (128, 300, 1 << 20):
        check(old, new, block_words, (7, 255, 110, 130), place)


def test_words_are_unsigned() -> None:
    """A sign bit is no part of a class where the field ends below it, and is where it holds it."""
    for width, scheme in ((1, (3, 15, 0, 15)), (2, (7, 255, 100, 140)), (4, (23, 255, 100, 140))):
        words = np.arange(
            0, 1 << (8 * width), max(1, (1 << (8 * width)) // 512), dtype=f"<u{width}"
        )
        check(words, words[::-1].copy(), 256, scheme, "cpu")
    words = np.arange(0, 1 << 16, 128, dtype="<u2")
    check(words, ~words, 256, (8, 255, 100, 255), "cpu")


@pytest.mark.parametrize("place", PLACES)
def test_another_base_has_too_few_words_of_a_class(place: str) -> None:
    old = np.zeros(700, "<u2")
    old[[5, 400, 650]] = 0x4100
    fields = {"shift": 7, "mask": 255, "first": 120, "last": 130}
    base = tensor_of(old, place)
    kept = base.clone()

    def locate(numbers: dict[int, list[int]], **changed: int) -> "torch.Tensor | None":
        bounds, ranks = np.zeros(257, np.int64), []
        for k in range(256):
            ranks += numbers.get(k, [])
            bounds[k + 1] = len(ranks)
        return device.locate_on_device(
            base, lo=0, hi=600, **{**fields, **changed},
            bounds=bounds, ranks=np.array(ranks, np.uint32),
        )  # fmt: skip

    found = locate({0: [0, 5, 597], 10: [0, 1]})
    assert found is not None
    assert found.tolist() == [0, 6, 599, 5, 400]
    assert locate({10: [2]}) is None  # the third such word stands after the block
    assert locate({0: [598]}) is None
    assert locate({3: [0]}) is None  # a class without a word
    assert locate({11: [0]}) is None  # a class that the table does not have
    assert locate({0: [0xFFFFFFFF]}) is None
    assert locate({0: [599]}, last=120).tolist() == [599]
    assert locate({0: [600]}, last=120) is None
    assert locate({}).numel() == 0
    assert torch.equal(base, kept)


@pytest.mark.parametrize("name", DTYPES)
def test_words_are_a_view_of_the_tensor(name: str) -> None:
    data = torch.arange(96, dtype=torch.uint8)
    tensor = data.view(DTYPES[name]).reshape(2, -1)
    words = device.words_on_device(tensor)
    bits = to_bits(tensor)
    assert words.numpy().tobytes() == words_of(bits).tobytes()
    assert words.element_size() == words_of(bits).itemsize
    step = device.steps_on_device(np.array([2**64 - 1], np.uint64), words)
    device.add_on_device(words, torch.tensor([1]), step)
    assert data[words.element_size()] == (words.element_size() - 1) % 256
    assert device.words_on_device(tensor[:0]).numel() == 0
    assert device.words_on_device(tensor[0, 0]).numel() == (2 if name == "C128" else 1)
    assert field_of(name) == FIELDS.get(name, PLAIN)


def test_what_has_no_words_is_refused() -> None:
    tensor = torch.zeros(4, 6)
    with pytest.raises(FormatError, match="contiguous"):
        device.words_on_device(tensor.t())
    with pytest.raises(FormatError, match="conjugation"):
        device.words_on_device(torch.zeros(3, dtype=torch.complex64).conj())
    words = device.words_on_device(tensor)
    scheme = {"shift": 7, "mask": 255, "first": 0, "last": 9, "block_words": 128}
    with pytest.raises(FormatError, match="contiguous row"):
        device.find_on_device(words[::2], words[::2], **scheme)
    with pytest.raises(FormatError, match="differ"):
        device.find_on_device(words, words[1:], **scheme)


def test_live_parameters_are_written_in_any_mode() -> None:
    parameter = torch.nn.Parameter(torch.zeros(300))
    with torch.inference_mode():
        made = torch.zeros(300)
    modes = (torch.inference_mode(), torch.no_grad(), torch.enable_grad())
    for count, mode in enumerate(modes, 1):
        with mode:
            for tensor in (parameter, made):
                words = device.words_on_device(tensor)
                bounds = np.full(257, 2, np.int64)
                bounds[0] = 0
                places = device.locate_on_device(
                    words, lo=0, hi=300, shift=0, mask=0, first=0, last=0,
                    bounds=bounds, ranks=np.array([0, 299], np.uint32),
                )  # fmt: skip
                steps = device.steps_on_device(np.array([1, 1], np.uint64), words)
                device.add_on_device(words, places, steps)
                assert words.sum() == 2 * count
    assert parameter.requires_grad
    assert (parameter * 2).sum().backward() is None


class Downloads(TorchFunctionMode):
    """Counts the elements that go to the host."""

    elements = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if getattr(func, "__name__", "") in {"cpu", "tolist", "item", "__bool__"}:
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


def test_only_changes_and_digests_go_to_the_host() -> None:
    chance = np.random.default_rng(3)
    old = chance.integers(0, 1 << 16, 100_000, dtype=np.uint16)
    new = old.copy()
    new[chance.choice(old.size, 20, replace=False)] += 1
    base, target = tensor_of(old, "cpu"), tensor_of(new, "cpu")
    fields = {"shift": 7, "mask": 255, "first": 60, "last": 79, "block_words": 1 << 14}
    with Downloads() as finding:
        found = device.find_on_device(base, target, **fields)
    assert finding.elements == 3 * 20 + 2 * len(found)  # and where each block's changes end
    blocks = [by_class(changes, 0) for changes in found]
    starts = np.cumsum([0, *(bounds[-1] for bounds, _ in blocks[:-1])])
    bounds = np.stack([own + start for (own, _), start in zip(blocks, starts, strict=True)])
    with Downloads() as applying:
        places = device.locate_blocks_on_device(
            base, **fields, bounds=bounds, ranks=np.concatenate([part.ranks for _, part in blocks])
        )
        deltas = np.concatenate([part.deltas for _, part in blocks])
        device.add_on_device(base, places, device.steps_on_device(deltas, base))
    assert applying.elements <= len(found)
    with Downloads() as hashing:
        digest = device.digest_on_device(base)
    assert hashing.elements == 8
    assert digest == blake3(new.data.cast("B")).hexdigest()


@needs_triton
def test_where_triton_starts_no_kernel_torch_does_the_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from farcast.delta import triton_kernels

    def refuse(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(triton_kernels, "parent_values", refuse)
    passes._triton.cache_clear()
    with pytest.warns(RuntimeWarning, match="C compiler"):
        assert passes._triton(torch.device("cpu")) is None
    passes._triton.cache_clear()


SIZES = [0, 1, 3, 63, 64, 65, 127, 1023, 1024, 1025, 2047, 2048, 2049, 3072, 3073, 5 * 1024 + 17]
SIZES += [n * 1024 + more for n in (7, 8, 9, 16, 31, 33, 100) for more in (-1, 0, 1)]
if INTERPRETED:  # seconds for each block there
    SIZES = [0, 64, 65, 2 * 1024 + 70]


@pytest.mark.parametrize("place", PLACES)
def test_digests_are_blake3(place: str) -> None:
    data = np.random.default_rng(7).integers(0, 256, max(SIZES), dtype=np.uint8)
    tensor = torch.from_numpy(data).to(place)
    for size in SIZES:
        assert device.digest_on_device(tensor[:size]) == blake3(data[:size].data).hexdigest(), size


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.skipif(INTERPRETED, reason="covers no kernel that the sizes do not")
def test_digests_of_large_tensors(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "CHUNKS_AT_ONCE", 2500)
    data = np.random.default_rng(8).integers(0, 256, (5 << 20) + 12345, dtype=np.uint8)
    tensor = torch.from_numpy(data).to(place)
    for size in (1 << 20, (1 << 21) - 1, 3 << 20, data.size):
        assert device.digest_on_device(tensor[:size]) == blake3(data[:size].data).hexdigest(), size


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.skipif(INTERPRETED, reason="covers no kernel that the sizes do not")
def test_digests_are_of_the_bits_in_c_order(place: str) -> None:
    data = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 6144, dtype=np.uint8))
    for dtype in (torch.bfloat16, torch.complex64, torch.int64, torch.bool):
        tensor = (data % 2 if dtype == torch.bool else data).view(dtype).reshape(8, -1).to(place)
        for some in (tensor, tensor.t(), tensor[1:, :], tensor.reshape(-1)[1:], tensor[0, 0]):
            expected = blake3(to_bits(some).data.data).hexdigest()
            assert device.digest_on_device(some) == expected
    some = data.view(torch.complex64).to(place).conj()
    assert device.digest_on_device(some) == blake3(to_bits(some).data.data).hexdigest()


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is what runs there")
@pytest.mark.timeout(300)
def test_triton_kernels_agree_in_their_interpreter() -> None:
    """The interpreter is switched on before Triton is imported, so it takes its own process."""
    names = "found_and_applied or rare_class_at_every_border or another_base or are_blake3"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__, "-k", names],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "passed" in result.stdout


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_triton_kernels_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's compiler needs no device: every kernel becomes code for one, for every word."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from farcast.delta import triton_kernels as kernels

    pointers = {"counts": "*i32", "places": "*i64", "starts": "*i64", "ranks": "*i32"}
    pointers |= {"classes": "*u8", "within": "*i32", "values": "*i32", "parents": "*i32"}
    constants = {"SIZE": passes.TILE, "GROUP": 8, "LANE": kernels.LANES}
    for kernel in (
        kernels.count_kernel,
        kernels.rank_kernel,
        kernels.select_kernel,
        kernels.chunk_kernel,
        kernels.parent_kernel,
    ):
        names = list(inspect.signature(kernel.fn).parameters)
        widths = ("*u8", "*i16", "*i32", "*i64") if "SIZE" in names else ("*i32",)
        for words in widths:
            signature = {
                name: "constexpr"
                if name in constants
                else {**pointers, "words": words}.get(name, "i32")
                for name in names
            }
            chosen = {name: constants[name] for name in names if name in constants}
            source = ASTSource(fn=kernel, signature=signature, constexprs=chosen)
            assert compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
