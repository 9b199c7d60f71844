"""4-bit codes to the words a checkpoint has, and back. Needs torch. Pure.

compressed-tensors' layouts. int4: eight codes in an int32, the first in its lowest bits, each
code plus 8. e2m1: two codes in a uint8, the first in the low half.
"""

import torch

_INT4_ZERO = 8
_PER_WORD = 8


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """int8 codes [R, C] from -8 to 7 as int32 words [R, ceil(C / 8)]; what is left is zero bits."""
    rows, columns = codes.shape
    words = -(-columns // _PER_WORD)
    raw = torch.zeros(rows, words * _PER_WORD, dtype=torch.uint8, device=codes.device)
    raw[:, :columns] = (codes + _INT4_ZERO).view(torch.uint8)
    return pack_e2m1(raw).view(torch.int32)


def unpack_int4(words: torch.Tensor, columns: int) -> torch.Tensor:
    """int32 words [R, W] as int8 codes [R, columns]."""
    raw = unpack_e2m1(words.contiguous().view(torch.uint8))
    return raw[:, :columns].view(torch.int8) - _INT4_ZERO


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [R, C] from 0 to 15, C even, as bytes [R, C / 2]."""
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).contiguous()


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [R, B] as uint8 codes [R, 2 B]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
