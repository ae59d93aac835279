"""How rows of K and V lie in a page when they are not numbers of the model's dtype.

A row (one token, one head, K or V; with MLA the latent and the rotary key) is written and read on
its own: nothing in it depends on other rows, so chunking and the split of heads change no bit.

    int8, fp8    | D codes | scale (bf16) |                        of each part of the row
    fp4          | D / 2 bytes, two codes each | D / 16 scales |   a scale for 16 numbers

A bf16 scale is rounded up, so the largest number of a row stays within the codes. The scales of fp4
are e5m3: fp16 without its sign and its last seven bits. All ones is NaN in each kind of scale, so a
poisoned page reads as NaN; all zeros reads as zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from phloem.kv.spec import FP4_BLOCK, KVDtype, KVSpec

__all__ = ["CastCodec", "PackedCodec", "RowCodec", "make_codec", "torch_dtype"]

_INT8_MAX, _FP8_MAX, _FP4_MAX = 127.0, 448.0, 6.0
_E5M3_MAX, _E5M3_LAST = 61440.0, 0xF7
# Scales that are tried beside that of the largest number: a block may fit a larger one better, or
# one at which its largest number is cut. Of normal numbers the error is 0.082, without them 0.095.
_FP4_STEPS = (-1, 1, 2, 3, 4, 5)
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_Encode: TypeAlias = Callable[[Tensor], Tensor]
_Decode: TypeAlias = Callable[[Tensor, int, torch.dtype], Tensor]

_STORED = {KVDtype.FP32: torch.float32, KVDtype.BF16: torch.bfloat16}


def torch_dtype(dtype: KVDtype) -> torch.dtype:
    """The dtype of a pool's tensor: bytes, where rows are codes with scales."""
    return _STORED.get(dtype, torch.uint8)


class RowCodec(Protocol):
    """Rows (..., head_dim) to and from what a page holds, (..., items)."""

    @property
    def dtype(self) -> torch.dtype:
        """What rows are decoded to, and computed in."""
        ...

    @property
    def head_dim(self) -> int: ...

    def encode(self, rows: Tensor) -> Tensor:
        """Rows of any float dtype, as a page's tensor holds them."""
        ...

    def decode(self, stored: Tensor) -> Tensor:
        """A fresh tensor of `dtype`."""
        ...


@dataclass(frozen=True, slots=True)
class CastCodec:
    """Rows are numbers of another float dtype."""

    stored: torch.dtype
    dtype: torch.dtype
    head_dim: int

    def encode(self, rows: Tensor) -> Tensor:
        return rows.to(self.stored)

    def decode(self, stored: Tensor) -> Tensor:
        return stored.to(self.dtype)


@dataclass(frozen=True, slots=True)
class PackedCodec:
    """Rows are bytes: the codes and scales of each part, one part behind the other."""

    kind: KVDtype
    parts: tuple[int, ...]
    dtype: torch.dtype

    @property
    def head_dim(self) -> int:
        return sum(self.parts)

    def encode(self, rows: Tensor) -> Tensor:
        encode, _ = _KINDS[self.kind]
        pieces = torch.split(rows.float(), list(self.parts), dim=-1)
        return torch.cat([encode(piece) for piece in pieces], dim=-1)

    def decode(self, stored: Tensor) -> Tensor:
        _, decode = _KINDS[self.kind]
        pieces = torch.split(stored, [self.kind.part_bytes(w) for w in self.parts], dim=-1)
        decoded = [decode(p, w, self.dtype) for p, w in zip(pieces, self.parts, strict=True)]
        return decoded[0] if len(decoded) == 1 else torch.cat(decoded, dim=-1)


def make_codec(spec: KVSpec, dtype: torch.dtype) -> RowCodec | None:
    """None where a page holds rows as they are computed, in `dtype`."""
    if spec.dtype.is_packed:
        return PackedCodec(spec.dtype, spec.parts, dtype)
    stored = torch_dtype(spec.dtype)
    return None if stored is dtype else CastCodec(stored, dtype, spec.head_dim)


def _scales(piece: Tensor, largest: float) -> Tensor:
    """Of rows (..., D) fp32: (..., 1) bf16, none smaller than the largest number over `largest`."""
    exact = piece.abs().amax(dim=-1, keepdim=True) / largest
    bits = (exact.view(torch.int32) + 0xFFFF) >> 16  # positive floats grow with their bits
    return bits.to(torch.int16).view(torch.bfloat16)


def _units(piece: Tensor, scales: Tensor) -> Tensor:
    """Rows in units of their scales; rows of zeros stay zeros."""
    scale = scales.float()
    return piece / torch.where(scale > 0, scale, 1.0)


def _encode_int8(piece: Tensor) -> Tensor:
    scales = _scales(piece, _INT8_MAX)
    codes = _units(piece, scales).round().clamp(-_INT8_MAX, _INT8_MAX).to(torch.int8)
    return torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), dim=-1)


def _encode_fp8(piece: Tensor) -> Tensor:
    scales = _scales(piece, _FP8_MAX)
    codes = _units(piece, scales).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    return torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), dim=-1)


def _decode_scaled(codes: torch.dtype) -> _Decode:
    def decode(piece: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        numbers = piece[..., :width].view(codes).to(dtype)
        # Codes and scales have few enough bits: one rounding, whatever the dtype.
        return numbers.mul_(piece[..., width:].view(torch.bfloat16).to(dtype))

    return decode


def _encode_fp4(piece: Tensor) -> Tensor:
    """Of each block the scale that leaves the least squared error, of a few near the largest."""
    blocks = piece.reshape(*piece.shape[:-1], -1, FP4_BLOCK)
    sizes = blocks.abs()
    half = (sizes.amax(dim=-1) / _FP4_MAX).clamp(max=_E5M3_MAX).to(torch.float16)
    first = (half.view(torch.int16) + 64) >> 7  # the sign is never set
    scales = first.to(torch.uint8)
    least = _fp4_error(sizes, scales)
    for step in _FP4_STEPS:
        tried = (first + step).clamp(0, _E5M3_LAST).to(torch.uint8)
        error = _fp4_error(sizes, tried)
        scales = torch.where(error < least, tried, scales)
        least = torch.minimum(error, least)
    held = _nearest_fp4(sizes, _fp4_scales(scales, torch.float32)[..., None])
    codes = torch.where(held <= 2, 2 * held, torch.where(held <= 4, held + 2, 7.0))
    codes = (codes + 8 * (blocks < 0)).flatten(-2).to(torch.uint8)
    return torch.cat((codes[..., 0::2] | codes[..., 1::2] << 4, scales), dim=-1)


def _nearest_fp4(sizes: Tensor, scale: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 to `sizes` in units of `scale`."""
    units = sizes / torch.where(scale > 0, scale, torch.inf)
    step = torch.where(units < 2, 0.5, torch.where(units < 4, 1.0, 2.0))
    return (units / step).add_(0.5).floor_().mul_(step).clamp_(max=_FP4_MAX)


def _fp4_error(sizes: Tensor, scales: Tensor) -> Tensor:
    """The squared error of each block (..., 16) at its scale."""
    scale = _fp4_scales(scales, torch.float32)[..., None]
    error = _nearest_fp4(sizes, scale).mul_(scale).sub_(sizes).square_()
    while error.shape[-1] > 1:  # in this order, whatever lies beside it
        middle = error.shape[-1] // 2
        error = error[..., :middle] + error[..., middle:]
    return error[..., 0]


def _fp4_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (scales.to(torch.int16) << 7).view(torch.float16).to(dtype)


@functools.cache
def _fp4_pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The two numbers of each byte, as one integer of their size: (256,)."""
    values = torch.tensor((*_FP4_VALUES, *(-v for v in _FP4_VALUES)), dtype=dtype)
    pairs = torch.cartesian_prod(values, values).flip(-1).contiguous()  # the lower half is first
    return pairs.view(torch.int64 if dtype.itemsize == 4 else torch.int32)[:, 0].to(device)


def _decode_fp4(piece: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    codes, scales = piece[..., : width // 2], piece[..., width // 2 :]
    pairs = _fp4_pairs(dtype, piece.device).index_select(0, codes.reshape(-1).int())
    numbers = pairs.view(dtype).view(*scales.shape, FP4_BLOCK)
    return numbers.mul_(_fp4_scales(scales, dtype)[..., None]).flatten(-2)


_KINDS: dict[KVDtype, tuple[_Encode, _Decode]] = {
    KVDtype.INT8: (_encode_int8, _decode_scaled(torch.int8)),
    KVDtype.FP8: (_encode_fp8, _decode_scaled(torch.float8_e4m3fn)),
    KVDtype.FP4: (_encode_fp4, _decode_fp4),
}
