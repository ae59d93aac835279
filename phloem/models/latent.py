"""What latent attention computes of a token before it attends: a query a head, and one row to keep.

Letters: N tokens, H heads, D a query's head dim (nope + rope), C the latent, R the rotary part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phloem.config.mla import MLAConfig
from phloem.kernels import Ops
from phloem.layers import LayerWeights

__all__ = ["latent_qkv"]


def latent_qkv(
    normed: Tensor, layer: LayerWeights, cos: Tensor, sin: Tensor, *, ops: Ops, mla: MLAConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """q (N, H, D); the row of each token (N, 1, C + R), latent normed and rotary key rotated; and
    what values are made of: a view of the row, (N, 1, C).

    `normed` (N, hidden); `cos` and `sin` (N, R / 2).
    """
    assert layer.k_norm is not None, "the latent of K and V has a norm"
    first = ops.linear(normed, layer.qkv.weight, layer.qkv.bias)
    count, q_width = first.shape[0], first.shape[1] - mla.row_dim
    q = first[:, :q_width]
    if layer.q_up is not None:
        assert layer.q_norm is not None, "so has that of q"
        q = ops.linear(ops.rms_norm(q, layer.q_norm, mla.norm_eps), layer.q_up.weight, None)
    q = q.view(count, -1, mla.nope_dim + mla.rope_dim)
    turning = q[..., mla.nope_dim :]
    turning.copy_(ops.rope(turning, cos, sin))
    latent, rotary = torch.split(first[:, None, q_width:], [mla.kv_rank, mla.rope_dim], dim=-1)
    row = first.new_empty((count, 1, mla.row_dim))
    row[..., : mla.kv_rank] = ops.rms_norm(latent, layer.k_norm, mla.norm_eps)
    row[..., mla.kv_rank :] = ops.rope(rotary, cos, sin)
    return q, row, row[..., : mla.kv_rank]
