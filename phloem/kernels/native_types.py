"""What the native kernels read beside plain tensors: packed weights, batches, layers of a pool."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phloem.kernels import native_abi as abi
from phloem.kernels.buffer import KVBuffer
from phloem.kernels.codec import PackedCodec
from phloem.kernels.native_abi import Dtype, WeightFormat
from phloem.kv.spec import KVDtype

__all__ = [
    "NativeBatch",
    "PackedHeads",
    "PackedUp",
    "PackedWeight",
    "address",
    "aligned_bytes",
    "batch_pointers",
    "chain",
    "dtype_number",
    "kv_layer",
    "rows_of",
]

_DTYPES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16}
_PACKED = {KVDtype.INT8: Dtype.INT8, KVDtype.FP8: Dtype.FP8, KVDtype.FP4: Dtype.FP4}
_ALIGNMENT = 64


def dtype_number(tensor: Tensor) -> int:
    """The library's number of a tensor's dtype. Raises TypeError for one that it lacks."""
    if tensor.dtype not in _DTYPES:
        raise TypeError(f"native kernels take fp32 and bf16, not {tensor.dtype}")
    return int(_DTYPES[tensor.dtype])


def rows_of(tensor: Tensor, name: str) -> Tensor:
    """`tensor` itself if its last dimension is dense and it is on the CPU."""
    if tensor.device.type != "cpu" or tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be a CPU tensor with a dense last dimension")
    return tensor


def address(tensor: Tensor | None) -> int | None:
    """Where the data begins; the caller keeps the tensor alive while this is in use."""
    return None if tensor is None else tensor.data_ptr()


def aligned_bytes(count: int) -> Tensor:
    """Uninitialised bytes that begin on a cache line."""
    raw = torch.empty(count + _ALIGNMENT, dtype=torch.uint8)
    return raw[-raw.data_ptr() % _ALIGNMENT :][:count]


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight (n, k) in the form that `gemm` reads. Owns `data` and `bias` (fp32)."""

    data: Tensor
    n: int
    k: int
    format: WeightFormat
    bias: Tensor | None = None
    gate_up: bool = False  # columns are gate and up in turn, 16 each

    @property
    def num_bytes(self) -> int:
        return self.data.numel() + (0 if self.bias is None else 4 * self.bias.numel())

    def columns(self, low: int, high: int) -> PackedWeight:
        """Whole panels of its columns, low ... high - 1, in the same memory."""
        if low % abi.PANEL or high % abi.PANEL:
            raise ValueError(f"columns {low} ... {high} are no whole panels of {abi.PANEL}")
        panel = len(self.data) // -(-self.n // abi.PANEL)
        data = self.data[low // abi.PANEL * panel : high // abi.PANEL * panel]
        bias = None if self.bias is None else self.bias[low:high]
        return replace(self, data=data, n=high - low, bias=bias)

    def struct(self) -> abi.Weight:
        """Borrows this object's tensors."""
        return abi.Weight(
            data=self.data.data_ptr(),
            bias=address(self.bias),
            n=self.n,
            k=self.k,
            format=int(self.format),
        )


@dataclass(frozen=True, slots=True, eq=False)
class PackedHeads:
    """A weight (n, k) of each head: `data` (heads, bytes of one packed weight)."""

    data: Tensor
    n: int
    k: int
    format: WeightFormat

    @property
    def num_heads(self) -> int:
        return int(self.data.shape[0])

    @property
    def num_bytes(self) -> int:
        return self.data.numel()

    def struct(self) -> abi.Weight:
        """The first head's. Borrows the tensor."""
        return abi.Weight(data=self.data.data_ptr(), n=self.n, k=self.k, format=int(self.format))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedUp:
    """What makes heads of a layer's latents: keys (nope, C), values (E, C), and keys transposed
    (C, nope), which bring a query into the space of latents."""

    absorb: PackedHeads
    keys: PackedHeads
    values: PackedHeads

    @property
    def num_bytes(self) -> int:
        return self.absorb.num_bytes + self.keys.num_bytes + self.values.num_bytes


class NativeBatch:
    """A ragged batch in the form that attention and layers read, built once per step.

    `row_start` (R + 1,), `positions` (N,) absolute, `tables` (R, pages): slots, unused ones 0.
    `bounds` (3, R): the first page in each row's table, the first position that it reads, and the
    first one whose K and V it writes; None: zeros.
    """

    def __init__(
        self,
        row_start: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        tables: npt.NDArray[np.int64],
        bounds: npt.NDArray[np.int32] | None = None,
    ) -> None:
        self.row_start = np.ascontiguousarray(row_start, dtype=np.int32)
        self.positions = np.ascontiguousarray(positions, dtype=np.int32)
        self.tables = np.ascontiguousarray(tables, dtype=np.int64)
        if len(self.row_start) != len(self.tables) + 1 or self.tables.ndim != 2:
            raise ValueError("row_start must have one entry more than tables has rows")
        if self.row_start[-1] != len(self.positions):
            raise ValueError("row_start must end at the number of positions")
        if bounds is None:
            bounds = np.zeros((3, len(self.tables)), dtype=np.int32)
        self.bounds = np.ascontiguousarray(bounds, dtype=np.int32)
        if self.bounds.shape != (3, len(self.tables)):
            raise ValueError(f"bounds must be (3, {len(self.tables)}), are {self.bounds.shape}")
        self.struct = abi.Batch(
            row_start=self.row_start.ctypes.data,
            positions=self.positions.ctypes.data,
            tables=self.tables.ctypes.data,
            base=self.bounds[0].ctypes.data,
            read_from=self.bounds[1].ctypes.data,
            write_from=self.bounds[2].ctypes.data,
            table_stride=self.tables.shape[1],
            num_rows=len(self.tables),
            num_tokens=len(self.positions),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


def batch_pointers(batches: Sequence[NativeBatch | None]) -> c.Array[Any]:
    """Where the batch of each component is; nowhere for None."""
    pointers = (c.POINTER(abi.Batch) * len(batches))()
    for i, batch in enumerate(batches):
        if batch is not None:
            pointers[i] = c.pointer(batch.struct)
    return pointers


def chain(steps: Sequence[tuple[abi.Layer, abi.KvLayer, int]]) -> c.Array[abi.LayerStep]:
    """Layers and their components for `layers_forward`. Refers to the structs of `steps`."""
    made = [
        abi.LayerStep(layer=c.pointer(layer), kv=c.pointer(kv), component=component)
        for layer, kv, component in steps
    ]
    return (abi.LayerStep * len(made))(*made)


def kv_layer(buffer: KVBuffer, layer: int, *, rope_dim: int = 0) -> abi.KvLayer:
    """One layer of a page pool as the kernels address it. Borrows the buffer.

    `rope_dim`: of latents, the numbers at a row's end that are no part of its value.
    """
    data = buffer.data
    page, group, _, kv, token, head, _ = data.stride()
    return abi.KvLayer(
        base=data[0, buffer.head_groups[0], layer].data_ptr(),
        page_stride=page,
        group_stride=group,
        kv_stride=kv if buffer.num_sides == 2 else 0,
        token_stride=token,
        head_stride=head,
        num_pages=data.shape[0],
        heads_per_group=buffer.heads_per_group,
        page_size=buffer.page_size,
        num_kv_heads=buffer.num_kv_heads,
        head_dim=buffer.head_dim,
        dtype=_rows_number(buffer),
        value_dim=buffer.head_dim - rope_dim,
        tail_dim=rope_dim,
    )


def _rows_number(buffer: KVBuffer) -> int:
    """The library's number of how the rows of a pool are stored."""
    codec = buffer.codec
    return int(_PACKED[codec.kind]) if isinstance(codec, PackedCodec) else dtype_number(buffer.data)
