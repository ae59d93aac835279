"""Native CPU kernels on tensors: products, paged attention, one call per decoder layer or for many.

Results equal `ReferenceOps` within the rounding of the output's dtype. A row's result never
depends on the rows beside it, to the last bit. Not thread-safe: one call at a time per object.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phloem.core.errors import ConfigError
from phloem.kernels import native_abi as abi
from phloem.kernels.native_abi import CpuIsa, Gate, native_available, usable_cpus
from phloem.kernels.native_proof import trusted_isas
from phloem.kernels.native_types import (
    NativeBatch,
    PackedWeight,
    address,
    batch_pointers,
    dtype_number,
    kv_layer,
    rows_of,
)
from phloem.kernels.table import Scoring

__all__ = [
    "NativeBatch",
    "NativeKernels",
    "PackedWeight",
    "kv_layer",
    "native_available",
    "usable_cpus",
]


class NativeKernels:
    """A context of the library: its threads and its workspace. Close it, or let it be collected.

    `threads` None: what affinity and cgroup allow. `isa`, else PHLOEM_CPU_ISA: `auto` takes the
    best one that has run on a real machine or passes its self-test on this one. Raises ConfigError
    where the library or the instruction set asked for is missing.
    """

    def __init__(self, *, threads: int | None = None, isa: CpuIsa | None = None) -> None:
        self._lib = abi.library()
        wanted = abi.chosen_isa() if isa is None else isa
        self._ctx: int | None = None
        for candidate in trusted_isas() if wanted is CpuIsa.AUTO else (wanted,):
            self._ctx = self._lib.phloem_ctx_create(
                abi.ISA_NUMBERS[candidate], usable_cpus() if threads is None else threads
            )
            if self._ctx:
                return
        raise ConfigError(f"{abi.ISA_ENV}={wanted.value}: {abi.last_error()}")

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

    def linear(
        self,
        x: Tensor,
        weight: PackedWeight,
        *,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        gate: Gate = Gate.SILU,
    ) -> Tensor:
        """x (m, k) W^T [+ bias] [+ residual], or act(gate) * up: (m, n) in x's dtype, or `out`.

        `gate`: what a weight of gate and up does to its gate.
        """
        x = rows_of(x, "x")
        width = weight.n // 2 if weight.gate_up else weight.n
        if x.ndim != 2 or x.shape[1] != weight.k:
            raise ValueError(f"x {tuple(x.shape)} does not fit a weight of {weight.k} inputs")
        result = x.new_empty((x.shape[0], width)) if out is None else rows_of(out, "out")
        for name, other in (("out", result), ("residual", residual)):
            if other is not None and other.shape != (x.shape[0], width):
                raise ValueError(f"{name} must be {(x.shape[0], width)}, is {tuple(other.shape)}")
        args = abi.GemmArgs(
            x=address(x),
            y=address(result),
            residual=address(residual),
            w=c.pointer(weight.struct()),
            m=x.shape[0],
            x_stride=x.stride(0),
            y_stride=result.stride(0),
            residual_stride=0 if residual is None else rows_of(residual, "residual").stride(0),
            x_dtype=dtype_number(x),
            y_dtype=dtype_number(result),
            residual_dtype=0 if residual is None else dtype_number(residual),
            gate=int(gate if weight.gate_up else Gate.NONE),
        )
        abi.check(self._lib.phloem_gemm(self._ctx, c.byref(args)))
        return result

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None
    ) -> Tensor:
        """Norm of x (..., d); with `residual`: residual += x in place, and the norm of that."""
        x, w = x.contiguous(), weight.float()
        if residual is not None and (residual.shape != x.shape or not residual.is_contiguous()):
            raise ValueError("residual must be contiguous and of x's shape")
        out, d = torch.empty_like(x), x.shape[-1]
        abi.check(
            self._lib.phloem_rmsnorm(
                self._ctx,
                address(x),
                address(residual),
                address(w),
                address(out),
                dtype_number(x),
                x.numel() // d,
                d,
                eps,
            )
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(first half) * second half of the last dimension of (m, 2 d)."""
        m, d = gate_up.shape[0], gate_up.shape[1] // 2
        rows = rows_of(gate_up, "gate_up")
        out = rows.new_empty((m, d))
        abi.check(
            self._lib.phloem_silu_mul(
                self._ctx,
                address(rows),
                address(rows[:, d:]),
                address(out),
                dtype_number(rows),
                m,
                d,
                rows.stride(0),
            )
        )
        return out

    def embedding(self, ids: Tensor, table: PackedWeight, dtype: torch.dtype) -> Tensor:
        """Rows `ids` (m,) of table (vocab, d). Raises ValueError for an id outside the table."""
        ids32 = np.ascontiguousarray(ids.numpy(), dtype=np.int32)
        out = torch.empty((len(ids), table.k), dtype=dtype)
        abi.check(
            self._lib.phloem_embedding(
                self._ctx,
                ids32.ctypes.data,
                c.byref(table.struct()),
                address(out),
                dtype_number(out),
                len(ids32),
            )
        )
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
        k, v = (rows_of(t, "k, v") for t in kv_new)
        args = abi.RopeArgs(q=address(q), k=address(k), v=address(v), norm_eps=eps)
        args.k_stride, args.v_stride, args.dtype = k.stride(0), v.stride(0), dtype_number(k)
        if q is not None:
            args.q_stride, args.num_heads = q.stride(0), q.shape[1]
        if angles is not None:
            args.cos, args.sin = (address(t) for t in angles)
            args.max_position, args.rotary_dim = angles[0].shape[0], 2 * angles[0].shape[1]
        if norms is not None:
            args.q_norm, args.k_norm = (address(t) for t in norms)
        abi.check(
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
        scoring: Scoring | None = None,
    ) -> Tensor:
        """Attention of q (N, H, D) over the pages: (N, H, D) in q's dtype; of latents, whose
        values are shorter, (N, H, value_dim).

        `window` 0: all earlier positions. `sinks` (H,) fp32. `lse` (N, H) fp32 receives the
        natural log-sum-exp. `scoring` None: products over the root of D.
        """
        scoring = scoring or Scoring(q.shape[2] ** -0.5)
        q = rows_of(q, "q")
        out = torch.empty((*q.shape[:2], kv.value_dim or kv.head_dim), dtype=q.dtype)
        args = abi.AttentionArgs(
            q=address(q),
            out=address(out),
            lse=address(lse),
            sinks=address(sinks),
            q_stride=q.stride(0),
            out_stride=out.stride(0),
            q_dtype=dtype_number(q),
            out_dtype=dtype_number(out),
            num_heads=q.shape[1],
            window=window,
            scale=scoring.scale,
            softcap=scoring.softcap or 0.0,
        )
        abi.check(
            self._lib.phloem_attention(self._ctx, c.byref(args), c.byref(kv), c.byref(batch.struct))
        )
        return out

    def check_batch(
        self, kv: abi.KvLayer, batch: NativeBatch, num_positions: int, *, window: int = 0
    ) -> None:
        """Raise ValueError if the batch reaches outside the pool: once per step and window."""
        abi.check(
            self._lib.phloem_check_batch(c.byref(kv), c.byref(batch.struct), window, num_positions)
        )

    def layer_forward(
        self, layer: abi.Layer, kv: abi.KvLayer, batch: NativeBatch, hidden: Tensor
    ) -> None:
        """One decoder layer over `hidden` (N, hidden), contiguous, in place."""
        abi.check(
            self._lib.phloem_layer_forward(
                self._ctx,
                c.byref(layer),
                c.byref(kv),
                c.byref(batch.struct),
                address(hidden),
                dtype_number(hidden),
            )
        )

    def layers_forward(
        self, steps: c.Array[abi.LayerStep], batches: Sequence[NativeBatch | None], hidden: Tensor
    ) -> None:
        """`layer_forward` of several layers in one call; each reads its component's batch.

        None for a component without layers.
        """
        abi.check(
            self._lib.phloem_layers_forward(
                self._ctx,
                steps,
                len(steps),
                batch_pointers(batches),
                len(batches),
                address(hidden),
                dtype_number(hidden),
            )
        )

    def layer_project(
        self, layer: abi.Layer, kv: abi.KvLayer, batch: NativeBatch, hidden: Tensor, qkv: Tensor
    ) -> None:
        """The first part of `layer_forward`: up to the write of K and V.

        q goes to the front of qkv (N, q + 2 kv) fp32, contiguous, for `layer_finish`.
        """
        self._half_layer(self._lib.phloem_layer_project, layer, kv, batch, (hidden, qkv))

    def layer_finish(
        self, layer: abi.Layer, kv: abi.KvLayer, batch: NativeBatch, hidden: Tensor, qkv: Tensor
    ) -> None:
        """The rest of it, from attention on; overwrites `qkv`."""
        self._half_layer(self._lib.phloem_layer_finish, layer, kv, batch, (hidden, qkv))

    def layer_output(
        self, layer: abi.Layer, kv: abi.KvLayer, batch: NativeBatch, hidden: Tensor, qkv: Tensor
    ) -> None:
        """`layer_finish` after attention, whose result (N, q) is at the front of `qkv`."""
        self._half_layer(self._lib.phloem_layer_output, layer, kv, batch, (hidden, qkv))

    def _half_layer(
        self,
        half: Callable[..., int],
        layer: abi.Layer,
        kv: abi.KvLayer,
        batch: NativeBatch,
        tensors: tuple[Tensor, Tensor],
    ) -> None:
        hidden, qkv = tensors
        width = (layer.num_heads + 2 * kv.num_kv_heads) * kv.head_dim
        wanted = (batch.num_tokens, width)
        if qkv.shape != wanted or qkv.dtype is not torch.float32 or not qkv.is_contiguous():
            raise ValueError(f"qkv must be {wanted}, fp32 and contiguous, is {tuple(qkv.shape)}")
        abi.check(
            half(
                self._ctx,
                c.byref(layer),
                c.byref(kv),
                c.byref(batch.struct),
                address(hidden),
                dtype_number(hidden),
                address(qkv),
            )
        )

    def argmax(self, logits: Tensor) -> Tensor:
        """First index of each row's greatest (m, n) -> (m,) int64; -1 if one is not finite."""
        rows, out = rows_of(logits, "logits"), torch.empty(logits.shape[0], dtype=torch.int64)
        abi.check(
            self._lib.phloem_argmax(
                self._ctx,
                address(rows),
                dtype_number(rows),
                rows.shape[0],
                rows.shape[1],
                rows.stride(0),
                address(out),
            )
        )
        return out

    def top_k(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor, float]:
        """The k greatest of logits (n,), descending, lower index first; and the log-sum-exp."""
        values, indices, lse = torch.empty(k), torch.empty(k, dtype=torch.int64), c.c_float()
        abi.check(
            self._lib.phloem_top_k(
                self._ctx,
                address(rows_of(logits, "logits")),
                dtype_number(logits),
                len(logits),
                k,
                address(values),
                address(indices),
                c.addressof(lse),
            )
        )
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
        abi.check(
            self._lib.phloem_copy_pages(
                self._ctx,
                address(target),
                address(source),
                into.ctypes.data,
                outof.ctypes.data,
                len(into),
                target[0].nbytes,
            )
        )
