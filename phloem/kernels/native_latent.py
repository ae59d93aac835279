"""Native kernels of latent attention: products head by head, and the write of a token's row."""

from __future__ import annotations

import ctypes as c
from dataclasses import dataclass

import torch
from torch import Tensor

from phloem.kernels import native_abi as abi
from phloem.kernels.native import NativeKernels
from phloem.kernels.native_types import NativeBatch, PackedHeads, address

__all__ = ["LatentForm", "NativeLatentKernels"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentForm:
    """How a layer's rows come about: the latent's norm (fp32), and cos and sin of every position
    (positions, R / 2), fp32 and contiguous."""

    norm: Tensor
    norm_eps: float
    cos: Tensor
    sin: Tensor


class NativeLatentKernels(NativeKernels):
    """Letters: N tokens, H heads, C the latent, R the rotary part. All activations are fp32."""

    def heads_linear(self, x: Tensor, weight: PackedHeads, out: Tensor) -> None:
        """Each head its own matrix: x (N, H, k), or (N, k) for all heads, into out (N, H, n).

        Both may be views of wider rows whose last dimension is dense.
        """
        shared = x.ndim == 2
        args = abi.HeadsArgs(
            x=address(_fp32(x, "x", weight.k)),
            y=address(_fp32(out, "out", weight.n)),
            w=c.pointer(weight.struct()),
            w_head_bytes=weight.data.stride(0),
            m=x.shape[0],
            x_stride=x.stride(0),
            x_head=0 if shared else x.stride(1),
            y_stride=out.stride(0),
            y_head=out.stride(1),
            num_heads=weight.num_heads,
        )
        if out.shape[:2] != (x.shape[0], weight.num_heads) or not (
            shared or x.shape[1] == weight.num_heads
        ):
            raise ValueError(f"{tuple(x.shape)} and {tuple(out.shape)} do not fit the heads")
        abi.check(self._lib.phloem_heads_gemm(self._ctx, c.byref(args)))

    def latent_write(
        self,
        q: Tensor,
        rows: Tensor,
        form: LatentForm,
        kv: abi.KvLayer,
        batch: NativeBatch,
        *,
        kept: Tensor | None = None,
    ) -> None:
        """Rotate the end of q (N, H, D) in place; write rows (N, C + R), their latent normalised
        and their end rotated, to their pages.

        `kept` (N,) uint8: 0 where another rank writes the row; None: all are written.
        """
        args = abi.LatentArgs(
            q=address(_fp32(q, "q", q.shape[2])),
            rows=address(_fp32(rows, "rows", kv.head_dim)),
            cos=address(form.cos),
            sin=address(form.sin),
            norm=address(form.norm),
            q_stride=q.stride(0),
            rows_stride=rows.stride(0),
            max_position=form.cos.shape[0],
            kept=address(kept),
            num_heads=q.shape[1],
            q_dim=q.shape[2],
            rotary_dim=2 * form.cos.shape[1],
            norm_eps=form.norm_eps,
        )
        abi.check(
            self._lib.phloem_latent_write(
                self._ctx, c.byref(args), c.byref(kv), c.byref(batch.struct)
            )
        )


def _fp32(tensor: Tensor, name: str, width: int) -> Tensor:
    """`tensor` itself, if the kernels can read it."""
    if not tensor.is_cpu or tensor.dtype is not torch.float32 or tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be fp32 on the CPU with a dense last dimension")
    if tensor.shape[-1] != width:
        raise ValueError(f"{name} must have {width} numbers in a row, has {tensor.shape[-1]}")
    return tensor
