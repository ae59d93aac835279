"""Packing: a weight matrix in the form that the native kernels multiply with."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from phloem.kernels import native_abi as abi
from phloem.kernels.native_abi import WeightFormat
from phloem.kernels.native_types import (
    PackedHeads,
    PackedUp,
    PackedWeight,
    address,
    aligned_bytes,
    dtype_number,
    rows_of,
)
from phloem.kernels.quantised import BlockMatrix

__all__ = ["pack", "pack_blocks", "pack_gate_up", "pack_gate_up_blocks", "pack_up"]


def pack(
    weight: Tensor, bias: Tensor | None = None, *, format: WeightFormat | None = None
) -> PackedWeight:
    """Pack weight (n, k); by default in its own dtype. Q8_0 quantises it, 32 weights to a scale."""
    weight = rows_of(weight, "weight")
    n, k = weight.shape
    kind = WeightFormat(dtype_number(weight)) if format is None else format
    data = _storage(kind, n, k)
    abi.check(
        abi.library().phloem_pack_weight(
            int(kind),
            address(weight),
            dtype_number(weight),
            n,
            k,
            weight.stride(0),
            address(data),
        )
    )
    return PackedWeight(data, n, k, kind, _fp32(bias))


def _pack_heads(weight: Tensor) -> PackedHeads:
    """Pack weight (heads, n, k), any strides, head by head in its own dtype."""
    heads, n, k = weight.shape
    kind = WeightFormat(dtype_number(weight))
    size = abi.check(abi.library().phloem_packed_bytes(int(kind), n, k))
    data = aligned_bytes(heads * size).view(heads, size)
    for one, out in zip(weight, data, strict=True):
        rows = one.contiguous()
        abi.check(
            abi.library().phloem_pack_weight(
                int(kind), address(rows), dtype_number(rows), n, k, k, address(out)
            )
        )
    return PackedHeads(data, n, k, kind)


def pack_up(weight: Tensor, nope_dim: int) -> PackedUp:
    """Pack weight (heads, nope + E, C), which makes keys and values of latents."""
    keys, values = weight[:, :nope_dim], weight[:, nope_dim:]
    return PackedUp(
        absorb=_pack_heads(keys.transpose(1, 2)), keys=_pack_heads(keys), values=_pack_heads(values)
    )


def pack_gate_up(gate: Tensor, up: Tensor, *, format: WeightFormat | None = None) -> PackedWeight:
    """Pack gate and up (n, k) each, n a multiple of 16, for `linear` with silu(gate) * up."""
    gate, up = rows_of(gate, "gate"), rows_of(up, "up")
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.stride() != up.stride():
        raise ValueError("gate and up must be alike")
    n, k = gate.shape
    kind = WeightFormat(dtype_number(gate)) if format is None else format
    data = _storage(kind, 2 * n, k)
    abi.check(
        abi.library().phloem_pack_gate_up(
            int(kind),
            address(gate),
            address(up),
            dtype_number(gate),
            n,
            k,
            gate.stride(0),
            address(data),
        )
    )
    return PackedWeight(data, 2 * n, k, kind, gate_up=True)


def pack_blocks(matrix: BlockMatrix, bias: Tensor | None = None) -> PackedWeight:
    """A weight of GGUF blocks: every bit is kept, in another order."""
    n, k = matrix.shape
    data = _storage(matrix.format, n, k)
    abi.check(
        abi.library().phloem_pack_blocks(
            int(matrix.format), address(matrix.raw), n, k, address(data)
        )
    )
    return PackedWeight(data, n, k, matrix.format, _fp32(bias))


def pack_gate_up_blocks(gate: BlockMatrix, up: BlockMatrix) -> PackedWeight:
    """As `pack_gate_up`, of blocks of one format."""
    return replace(pack_blocks(BlockMatrix.alternate(gate, up)), gate_up=True)


def _storage(kind: WeightFormat, n: int, k: int) -> Tensor:
    return aligned_bytes(abi.check(abi.library().phloem_packed_bytes(int(kind), n, k)))


def _fp32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float().contiguous()
