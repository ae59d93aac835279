"""Native CPU kernels on tensors: packed weights, paged attention, one call per decoder layer.

Results equal `ReferenceOps` within the rounding of the output's dtype. A row's result never
depends on the rows beside it, to the last bit. Not thread-safe: one call at a time per object.
"""

from __future__ import annotations

import ctypes as c
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phloem.core.errors import ConfigError
from phloem.kernels import native_abi as abi
from phloem.kernels.buffer import KVBuffer
from phloem.kernels.native_abi import CpuIsa, Dtype, WeightFormat

__all__ = [
    "NativeBatch",
    "NativeKernels",
    "PackedWeight",
    "kv_layer",
    "native_available",
    "usable_cpus",
]

_DTYPES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16}
_ALIGNMENT = 64


def native_available() -> bool:
    """Whether the library can be loaded here."""
    try:
        abi.library()
    except ConfigError:
        return False
    return True


def usable_cpus() -> int:
    """CPUs that affinity and the cgroup's quota leave to this process, at least 1."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cpus
    return cpus if quota == "max" else max(1, min(cpus, int(quota) // int(period)))


def _dtype(tensor: Tensor) -> int:
    if tensor.dtype not in _DTYPES:
        raise TypeError(f"native kernels take fp32 and bf16, not {tensor.dtype}")
    return int(_DTYPES[tensor.dtype])


def _rows(tensor: Tensor, name: str) -> Tensor:
    """`tensor` itself if its last dimension is dense and it is on the CPU."""
    if tensor.device.type != "cpu" or tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be a CPU tensor with a dense last dimension")
    return tensor


def _ptr(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _aligned_bytes(count: int) -> Tensor:
    """Uninitialised bytes that begin on a cache line."""
    raw = torch.empty(count + _ALIGNMENT, dtype=torch.uint8)
    return raw[-raw.data_ptr() % _ALIGNMENT :][:count]


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight (n, k) in the form that `gemm` reads. Owns `data`, `scales` and `bias` (fp32)."""

    data: Tensor
    n: int
    k: int
    format: WeightFormat
    scales: Tensor | None = None
    bias: Tensor | None = None
    gate_up: bool = False  # columns are gate and up in turn, 16 each

    @property
    def num_bytes(self) -> int:
        extra = [t for t in (self.scales, self.bias) if t is not None]
        return self.data.numel() + sum(4 * t.numel() for t in extra)

    def struct(self) -> abi.Weight:
        """Borrows this object's tensors."""
        return abi.Weight(
            data=self.data.data_ptr(),
            scales=_ptr(self.scales),
            bias=_ptr(self.bias),
            n=self.n,
            k=self.k,
            format=int(self.format),
        )


class NativeBatch:
    """A ragged batch in the form that attention and layers read, built once per step.

    `row_start` (R + 1,), `positions` (N,) absolute, `tables` (R, pages): slots, unused ones 0.
    """

    def __init__(
        self,
        row_start: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        tables: npt.NDArray[np.int64],
    ) -> None:
        self.row_start = np.ascontiguousarray(row_start, dtype=np.int32)
        self.positions = np.ascontiguousarray(positions, dtype=np.int32)
        self.tables = np.ascontiguousarray(tables, dtype=np.int64)
        if len(self.row_start) != len(self.tables) + 1 or self.tables.ndim != 2:
            raise ValueError("row_start must have one entry more than tables has rows")
        if self.row_start[-1] != len(self.positions):
            raise ValueError("row_start must end at the number of positions")
        self.struct = abi.Batch(
            row_start=self.row_start.ctypes.data,
            positions=self.positions.ctypes.data,
            tables=self.tables.ctypes.data,
            table_stride=self.tables.shape[1],
            num_rows=len(self.tables),
            num_tokens=len(self.positions),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


class NativeKernels:
    """A context of the library: its threads and its workspace. Close it, or let it be collected.

    `threads` None: what affinity and cgroup allow. Raises ConfigError where the library or the
    instruction set asked for (`isa`, else PHLOEM_CPU_ISA) is missing.
    """

    def __init__(self, *, threads: int | None = None, isa: CpuIsa | None = None) -> None:
        self._lib = abi.library()
        wanted = abi.chosen_isa() if isa is None else isa
        number = self._lib.phloem_best_isa() if wanted is CpuIsa.AUTO else abi.ISA_NUMBERS[wanted]
        self._ctx: int | None = self._lib.phloem_ctx_create(
            number, usable_cpus() if threads is None else threads
        )
        if not self._ctx:
            raise ConfigError(f"{abi.ISA_ENV}={wanted.value}: {self._error()}")

    def close(self) -> None:
        """End the threads and free the workspace."""
        ctx, self._ctx = self._ctx, None
        if ctx:
            self._lib.phloem_ctx_destroy(ctx)

    def __del__(self) -> None:
        if "_ctx" in self.__dict__:
            self.close()

    @property
    def isa(self) -> CpuIsa:
        number = self._lib.phloem_ctx_isa(self._ctx)
        return next(isa for isa, known in abi.ISA_NUMBERS.items() if known == number)

    @property
    def num_threads(self) -> int:
        return int(self._lib.phloem_ctx_num_threads(self._ctx))

    @property
    def workspace_bytes(self) -> int:
        return int(self._lib.phloem_ctx_workspace_bytes(self._ctx))

    @property
    def workspace_grows(self) -> int:
        """How often the workspace grew: constant in steady state."""
        return int(self._lib.phloem_ctx_workspace_grows(self._ctx))

    # ---- weights ----

    def pack(
        self, weight: Tensor, bias: Tensor | None = None, *, format: WeightFormat | None = None
    ) -> PackedWeight:
        """Pack weight (n, k); by default in its own dtype. INT8: one scale per output column."""
        weight = _rows(weight, "weight")
        n, k = weight.shape
        kind = WeightFormat(_dtype(weight)) if format is None else format
        data, scales = self._packed_storage(kind, n, k)
        self._check(
            self._lib.phloem_pack_weight(
                int(kind), _ptr(weight), _dtype(weight), n, k, weight.stride(0), _ptr(data),
                _ptr(scales),
            )
        )  # fmt: skip
        return PackedWeight(data, n, k, kind, scales, _fp32(bias))

    def pack_gate_up(
        self, gate: Tensor, up: Tensor, *, format: WeightFormat | None = None
    ) -> PackedWeight:
        """Pack gate and up (n, k) each, n a multiple of 16, for `linear` with silu(gate) * up."""
        gate, up = _rows(gate, "gate"), _rows(up, "up")
        if gate.shape != up.shape or gate.dtype != up.dtype or gate.stride() != up.stride():
            raise ValueError("gate and up must be alike")
        n, k = gate.shape
        kind = WeightFormat(_dtype(gate)) if format is None else format
        data, scales = self._packed_storage(kind, 2 * n, k)
        self._check(
            self._lib.phloem_pack_gate_up(
                int(kind), _ptr(gate), _ptr(up), _dtype(gate), n, k, gate.stride(0), _ptr(data),
                _ptr(scales),
            )
        )  # fmt: skip
        return PackedWeight(data, 2 * n, k, kind, scales, gate_up=True)

    def blocks(
        self, raw: Tensor, n: int, k: int, format: WeightFormat, bias: Tensor | None = None
    ) -> PackedWeight:
        """A weight (n, k) whose GGUF blocks `raw` (uint8) are used in place."""
        want = self._lib.phloem_packed_bytes(int(format), n, k)
        if format < WeightFormat.Q4_0 or k % 32 or raw.numel() != want:
            raise ValueError(f"{raw.numel()} bytes are no {format.name} weight of shape ({n}, {k})")
        return PackedWeight(raw.contiguous(), n, k, format, None, _fp32(bias))

    # ---- operations ----

    def linear(
        self,
        x: Tensor,
        weight: PackedWeight,
        *,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """x (m, k) W^T [+ bias] [+ residual], or silu(gate) * up: (m, n) in x's dtype, or `out`."""
        x = _rows(x, "x")
        width = weight.n // 2 if weight.gate_up else weight.n
        if x.ndim != 2 or x.shape[1] != weight.k:
            raise ValueError(f"x {tuple(x.shape)} does not fit a weight of {weight.k} inputs")
        result = x.new_empty((x.shape[0], width)) if out is None else _rows(out, "out")
        for name, other in (("out", result), ("residual", residual)):
            if other is not None and other.shape != (x.shape[0], width):
                raise ValueError(f"{name} must be {(x.shape[0], width)}, is {tuple(other.shape)}")
        args = abi.GemmArgs(
            x=_ptr(x),
            y=_ptr(result),
            residual=_ptr(residual),
            w=c.pointer(weight.struct()),
            m=x.shape[0],
            x_stride=x.stride(0),
            y_stride=result.stride(0),
            residual_stride=0 if residual is None else _rows(residual, "residual").stride(0),
            x_dtype=_dtype(x),
            y_dtype=_dtype(result),
            residual_dtype=0 if residual is None else _dtype(residual),
            silu_mul=int(weight.gate_up),
        )
        self._check(self._lib.phloem_gemm(self._ctx, c.byref(args)))
        return result

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None
    ) -> Tensor:
        """Norm of x (..., d); with `residual`: residual += x in place, and the norm of that."""
        x, w = x.contiguous(), weight.float()
        if residual is not None and (residual.shape != x.shape or not residual.is_contiguous()):
            raise ValueError("residual must be contiguous and of x's shape")
        out, d = torch.empty_like(x), x.shape[-1]
        self._check(
            self._lib.phloem_rmsnorm(
                self._ctx, _ptr(x), _ptr(residual), _ptr(w), _ptr(out), _dtype(x),
                x.numel() // d, d, eps,
            )
        )  # fmt: skip
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(first half) * second half of the last dimension of (m, 2 d)."""
        m, d = gate_up.shape[0], gate_up.shape[1] // 2
        rows = _rows(gate_up, "gate_up")
        out = rows.new_empty((m, d))
        self._check(
            self._lib.phloem_silu_mul(
                self._ctx, _ptr(rows), _ptr(rows[:, d:]), _ptr(out), _dtype(rows), m, d,
                rows.stride(0),
            )
        )  # fmt: skip
        return out

    def embedding(self, ids: Tensor, table: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """Rows `ids` (m,) of table (vocab, d). Raises ValueError for an id outside the table."""
        ids32 = ids.to(torch.int32).contiguous()
        out = torch.empty((len(ids32), table.shape[1]), dtype=dtype or table.dtype)
        self._check(
            self._lib.phloem_embedding(
                self._ctx, _ptr(ids32), _ptr(table.contiguous()), _dtype(table), table.shape[0],
                _ptr(out), _dtype(out), len(ids32), table.shape[1],
            )
        )  # fmt: skip
        return out

    def rope_kv_write(
        self,
        q: Tensor | None,
        kv_new: tuple[Tensor, Tensor],
        kv: abi.KvLayer,
        batch: NativeBatch,
        *,
        angles: tuple[Tensor, Tensor] | None = None,
        norms: tuple[Tensor, Tensor] | None = None,
        eps: float = 0.0,
    ) -> None:
        """Rotate q (N, H, D) in place; write k and v (N, K, D), k rotated, to their pages.

        `angles`: cos and sin of every position, fp32 (positions, rotary / 2); None: no rotation.
        `norms`: fp32 weights of q's and k's per-head norm, which comes first.
        """
        k, v = (_rows(t, "k, v") for t in kv_new)
        args = abi.RopeArgs(
            q=_ptr(q),
            k=_ptr(k),
            v=_ptr(v),
            q_stride=0 if q is None else q.stride(0),
            k_stride=k.stride(0),
            v_stride=v.stride(0),
            dtype=_dtype(k),
            num_heads=0 if q is None else q.shape[1],
            norm_eps=eps,
        )
        if angles is not None:
            args.cos, args.sin = (_ptr(t) for t in angles)
            args.max_position, args.rotary_dim = angles[0].shape[0], 2 * angles[0].shape[1]
        if norms is not None:
            args.q_norm, args.k_norm = (_ptr(t) for t in norms)
        self._check(
            self._lib.phloem_rope_kv_write(
                self._ctx, c.byref(args), c.byref(kv), c.byref(batch.struct)
            )
        )

    def attention(
        self,
        q: Tensor,
        kv: abi.KvLayer,
        batch: NativeBatch,
        *,
        window: int = 0,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attention of q (N, H, D) over the pages: (N, H, D) in q's dtype.

        `window` 0: all earlier positions. `sinks` (H,) fp32. `lse` (N, H) fp32 receives the
        natural log-sum-exp.
        """
        q = _rows(q, "q")
        out = torch.empty(q.shape, dtype=q.dtype)
        args = abi.AttentionArgs(
            q=_ptr(q),
            out=_ptr(out),
            lse=_ptr(lse),
            sinks=_ptr(sinks),
            q_stride=q.stride(0),
            out_stride=out.stride(0),
            q_dtype=_dtype(q),
            out_dtype=_dtype(out),
            num_heads=q.shape[1],
            window=window,
            scale=q.shape[2] ** -0.5,
        )
        self._check(
            self._lib.phloem_attention(self._ctx, c.byref(args), c.byref(kv), c.byref(batch.struct))
        )
        return out

    def check_batch(self, kv: abi.KvLayer, batch: NativeBatch, num_positions: int) -> None:
        """Raise ValueError if the batch reaches outside the pool: once per step."""
        self._check(self._lib.phloem_check_batch(c.byref(kv), c.byref(batch.struct), num_positions))

    def layer_forward(
        self, layer: abi.Layer, kv: abi.KvLayer, batch: NativeBatch, hidden: Tensor
    ) -> None:
        """One decoder layer over `hidden` (N, hidden), contiguous, in place."""
        self._check(
            self._lib.phloem_layer_forward(
                self._ctx, c.byref(layer), c.byref(kv), c.byref(batch.struct), _ptr(hidden),
                _dtype(hidden),
            )
        )  # fmt: skip

    def argmax(self, logits: Tensor) -> Tensor:
        """First index of each row's greatest (m, n) -> (m,) int64; -1 for a row with a NaN."""
        rows = _rows(logits, "logits")
        out = torch.empty(rows.shape[0], dtype=torch.int64)
        self._check(
            self._lib.phloem_argmax(
                self._ctx, _ptr(rows), _dtype(rows), rows.shape[0], rows.shape[1], rows.stride(0),
                _ptr(out),
            )
        )  # fmt: skip
        return out

    def top_k(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor, float]:
        """The k greatest of logits (n,), descending, lower index first; and the log-sum-exp."""
        values = torch.empty(k, dtype=torch.float32)
        indices = torch.empty(k, dtype=torch.int64)
        lse = c.c_float()
        self._check(
            self._lib.phloem_top_k(
                self._ctx, _ptr(_rows(logits, "logits")), _dtype(logits), len(logits), k,
                _ptr(values), _ptr(indices), c.addressof(lse),
            )
        )  # fmt: skip
        return values, indices, lse.value

    def copy_pages(
        self,
        target: Tensor,
        target_slots: npt.NDArray[np.int64],
        source: Tensor,
        source_slots: npt.NDArray[np.int64],
    ) -> None:
        """Copy pages (first dimension) between two pools of one page size; slots are trusted."""
        into = np.ascontiguousarray(target_slots, dtype=np.int64)
        outof = np.ascontiguousarray(source_slots, dtype=np.int64)
        if into.shape != outof.shape or target[0].nbytes != source[0].nbytes:
            raise ValueError("copy_pages needs as many targets as sources, and equal pages")
        self._check(
            self._lib.phloem_copy_pages(
                self._ctx, _ptr(target), _ptr(source), into.ctypes.data, outof.ctypes.data,
                len(into), target[0].nbytes,
            )
        )  # fmt: skip

    def _packed_storage(self, kind: WeightFormat, n: int, k: int) -> tuple[Tensor, Tensor | None]:
        data = _aligned_bytes(self._check(self._lib.phloem_packed_bytes(int(kind), n, k)))
        return data, torch.empty(n) if kind is WeightFormat.INT8 else None

    def _check(self, code: int) -> int:
        if code >= 0:
            return code
        if code == -1:
            raise ValueError(self._error())
        raise MemoryError(self._error())

    def _error(self) -> str:
        text: bytes = self._lib.phloem_last_error()
        return text.decode()


def _fp32(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float().contiguous()


def kv_layer(buffer: KVBuffer, layer: int) -> abi.KvLayer:
    """One layer of a page pool as the kernels address it. Borrows the buffer."""
    data = buffer.data
    page, group, _, kv, token, head, _ = data.stride()
    return abi.KvLayer(
        base=data[0, 0, layer].data_ptr(),
        page_stride=page,
        group_stride=group,
        kv_stride=kv,
        token_stride=token,
        head_stride=head,
        num_pages=data.shape[0],
        heads_per_group=buffer.heads_per_group,
        page_size=buffer.page_size,
        num_kv_heads=buffer.num_kv_heads,
        head_dim=buffer.head_dim,
        dtype=_dtype(data),
    )
