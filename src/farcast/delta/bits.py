"""Tensors as bits: dtype name, shape, and raw bytes in C order, little endian. Pure.

Refuses dtypes it cannot name and never converts a value: what goes in is what comes out,
NaN payloads, negative zeros and packed codes included. torch is touched only when the caller
hands a torch tensor.

Bits lie in host memory (`TensorBits`) or where a device has them (`farcast.delta.placed`);
`AnyBits` is what both can be asked for.
"""

import abc
import functools
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from farcast.errors import FormatError, LimitError

Bytes = npt.NDArray[np.uint8]
Words: TypeAlias = npt.NDArray[np.unsignedinteger]

MAX_DIMENSIONS = 16
MAX_TENSOR_BYTES = 1 << 42
"""4 TiB: beyond any single tensor, and far below where 64-bit arithmetic overflows."""

BITS_PER_ELEMENT: dict[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
    "C128": 128,
}
"""Names as safetensors writes them (C128 added). F4 packs two elements a byte."""

_NUMPY: dict[str, str] = {
    "BOOL": "|b1",
    "U8": "|u1",
    "I8": "|i1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
    "C64": "<c8",
    "C128": "<c16",
}
_NAME_OF_NUMPY = {np.dtype(code).newbyteorder("<"): name for name, code in _NUMPY.items()}

_TORCH: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "complex128": "C128",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}
_TORCH_OF_NAME = {name: torch_name for torch_name, name in _TORCH.items()}


_PARALLEL_FROM = 1 << 23
"""Bytes from which BLAKE3 spreads over cores; the digest is the same either way."""


class AnyBits(abc.ABC):
    """One tensor as bits, wherever they lie. `data` is a row of bytes: of numpy in host memory,
    of torch on a device."""

    dtype: str
    shape: tuple[int, ...]
    data: Any

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.dtype, self.shape)

    @abc.abstractmethod
    def part(self, span: slice) -> Bytes:
        """Some of the bytes, in host memory. Not to be written into."""

    @abc.abstractmethod
    def sample(self, step: int) -> Words:
        """Every `step`-th word, in host memory."""

    @abc.abstractmethod
    def digest(self, *, threads: int = 1) -> str:
        """BLAKE3 of the bytes as 64 hex digits."""

    @abc.abstractmethod
    def copied(self, spare: "AnyBits | None" = None) -> Self:
        """A copy that may be written into, in the memory of `spare` if that lies alike."""

    @abc.abstractmethod
    def place(self, bits: "AnyBits") -> Self:
        """The bits of `bits` where these lie; not a copy if they are there already."""

    @abc.abstractmethod
    def lies_with(self, other: "AnyBits") -> bool:
        """Whether both lie in the host's memory, or in that of one device."""


@dataclass(frozen=True, eq=False)
class TensorBits(AnyBits):
    """One tensor as bits. `data` is uint8, 1-D, C-contiguous, `nbytes_of(dtype, shape)` long."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes

    def __post_init__(self) -> None:
        expected = nbytes_of(self.dtype, self.shape)
        data = self.data
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
            raise FormatError("Tensor bits must be a contiguous one-dimensional uint8 array.")
        if data.size != expected:
            raise FormatError(
                f"A {self.dtype} tensor of shape {list(self.shape)} has {expected} bytes, "
                f"but {data.size} were given."
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorBits):
            return NotImplemented
        return (
            self.dtype == other.dtype
            and self.shape == other.shape
            and np.array_equal(self.data, other.data)
        )

    __hash__ = None  # type: ignore[assignment]

    def part(self, span: slice) -> Bytes:
        return self.data[span]

    def sample(self, step: int) -> Words:
        return as_words(self.data, word_bytes(self.dtype))[::step]

    def digest(self, *, threads: int = 1) -> str:
        many = threads if self.data.size >= _PARALLEL_FROM else 1
        return blake3(self.data.data, max_threads=many).hexdigest()

    def copied(self, spare: AnyBits | None = None) -> "TensorBits":
        if not isinstance(spare, TensorBits) or not spare._has_room_for(self.data.size):
            return TensorBits(self.dtype, self.shape, np.array(self.data))
        np.copyto(spare.data, self.data)
        return TensorBits(self.dtype, self.shape, spare.data)

    def place(self, bits: AnyBits) -> "TensorBits":
        return to_bits(bits)

    def lies_with(self, other: AnyBits) -> bool:
        return isinstance(other, TensorBits)

    def _has_room_for(self, nbytes: int) -> bool:
        return self.data.size == nbytes and self.data.flags.writeable


@functools.lru_cache(4096)
def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Raw bytes of a tensor. Raises `FormatError` for an unknown dtype or an impossible shape,
    `LimitError` beyond `MAX_TENSOR_BYTES`; allocates nothing."""
    width = BITS_PER_ELEMENT.get(dtype)
    if width is None:
        raise FormatError(f"The dtype {dtype[:32]!r} is not one farcast knows.")
    if len(shape) > MAX_DIMENSIONS or any(size < 0 for size in shape):
        raise FormatError(f"The shape {list(shape)[:20]} is not a shape of at most 16 dimensions.")
    bits = math.prod(shape) * width
    if bits > 8 * MAX_TENSOR_BYTES:
        raise LimitError(f"A {dtype} tensor of shape {list(shape)} is over the limit of 4 TiB.")
    if bits % 8:
        raise FormatError(f"A {dtype} tensor of shape {list(shape)} does not fill whole bytes.")
    return bits // 8


def word_bytes(dtype: str) -> int:
    """Bytes of one word of the delta: an element, half of a C128, or two packed F4 codes."""
    return min(8, max(1, BITS_PER_ELEMENT[dtype] // 8))


def words_of(bits: TensorBits) -> Words:
    """The bits as unsigned little-endian words, a view: one an element, two for C128, one for
    each two packed F4 codes."""
    return as_words(bits.data, word_bytes(bits.dtype))


def as_words(data: Bytes, width: int) -> Words:
    """Raw bytes as unsigned little-endian words of `width` bytes, a view."""
    words: Words = data.view(f"<u{width}")
    return words


def to_bits(tensor: Any) -> TensorBits:
    """A numpy array or torch tensor as bits: a view where the memory already lies right.

    Any layout and byte order is accepted. A torch tensor on a device is copied to the host
    synchronously.
    """
    if isinstance(tensor, TensorBits):
        return tensor
    if isinstance(tensor, AnyBits):
        return TensorBits(tensor.dtype, tensor.shape, tensor.part(slice(0, tensor.nbytes)))
    if type(tensor).__module__.split(".")[0] == "torch" or _is_torch(tensor):
        return _torch_to_bits(tensor)
    array = np.asarray(tensor)
    little = array.dtype.newbyteorder("<")
    name = _NAME_OF_NUMPY.get(little)
    if name is None:
        raise FormatError(f"The dtype {array.dtype} has no served form; convert the tensor first.")
    shape = array.shape
    if array.dtype != little:
        array = array.astype(little)
    flat = np.ascontiguousarray(array).reshape(-1)
    return TensorBits(name, shape, flat.view(np.uint8))


def held_bits(tensor: Any) -> AnyBits:
    """A tensor as bits where it lies: `to_bits` for what lies in host memory, a view of the
    device's memory for what `on_device` says lies there."""
    if isinstance(tensor, AnyBits):
        return tensor
    if not on_device(tensor):
        return to_bits(tensor)
    from farcast.delta.placed import DeviceBits

    return DeviceBits.of(tensor)


def device_bits(tensor: Any) -> AnyBits | None:
    """The bits of a tensor that lies on a device; None for any other."""
    return held_bits(tensor) if on_device(tensor) else None


def on_device(tensor: Any) -> bool:
    """Whether this is a torch tensor that is compared, applied and hashed where it lies: one of
    CUDA (or ROCm, which torch calls so too). Tensors of other devices come through the host."""
    device = getattr(tensor, "device", None)
    return getattr(device, "type", None) == "cuda" and _is_torch(tensor)


def _is_torch(tensor: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def _torch_to_bits(tensor: Any) -> TensorBits:
    import torch

    name, shape = torch_kind(tensor)
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    if flat.numel() == 0:
        return TensorBits(name, shape, np.empty(0, np.uint8))
    return TensorBits(name, shape, flat.view(torch.uint8).numpy())


def torch_kind(tensor: Any) -> tuple[str, tuple[int, ...]]:
    """The dtype's name and the served shape of a torch tensor."""
    name = _TORCH.get(str(tensor.dtype).removeprefix("torch."))
    if name is None or str(tensor.layout) != "torch.strided" or tensor.is_nested:
        raise FormatError(f"A torch tensor of {tensor.dtype}, {tensor.layout} has no served form.")
    if tensor.is_meta:
        raise FormatError("A tensor on the device meta has no bits; materialise the model first.")
    shape = tuple(tensor.shape)
    if name == "F4":  # torch counts packed pairs; served shapes count elements
        shape = (*shape[:-1], shape[-1] * 2) if shape else shape
    return name, shape


def from_bits(bits: AnyBits, like: Any = None) -> Any:
    """The tensor behind bits: a torch tensor if `like` is one, else a numpy array.

    dtypes numpy cannot name (BF16, fp8, fp4) come as unsigned words of the same size. The memory
    is shared with `bits`.
    """
    if not isinstance(bits, TensorBits):
        return as_torch(bits.dtype, bits.shape, bits.data)
    if like is not None and _is_torch(like):
        return _bits_to_torch(bits)
    if bits.dtype in _NUMPY:
        return bits.data.view(_NUMPY[bits.dtype]).reshape(bits.shape)
    if bits.dtype == "F4":
        return bits.data
    return bits.data.view(f"<u{word_bytes(bits.dtype)}").reshape(bits.shape)


def _bits_to_torch(bits: TensorBits) -> Any:
    import torch

    data = bits.data if bits.data.flags.writeable else bits.data.copy()
    return as_torch(bits.dtype, bits.shape, torch.from_numpy(data))


def as_torch(dtype: str, shape: tuple[int, ...], data: Any) -> Any:
    """A torch tensor in the memory of `data`, a row of bytes."""
    import torch

    kind = getattr(torch, _TORCH_OF_NAME[dtype])
    if dtype == "F4":
        shape = (*shape[:-1], shape[-1] // 2)
    if data.numel() == 0:
        return torch.empty(shape, dtype=kind, device=data.device)
    return data.view(kind).reshape(shape)


def all_bits(tensors: Mapping[str, Any]) -> dict[str, TensorBits]:
    """`to_bits` over a mapping of names to tensors."""
    return {name: to_bits(tensor) for name, tensor in tensors.items()}


def all_held(tensors: Mapping[str, Any]) -> dict[str, AnyBits]:
    """`held_bits` over a mapping of names to tensors."""
    return {name: held_bits(tensor) for name, tensor in tensors.items()}
