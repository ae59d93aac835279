"""The decoder skeleton that all families share.

Letters: N tokens of the flat batch, H heads, K KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phloem.attention import LayeredAttention
from phloem.config.model import ModelConfig
from phloem.kernels import Ops
from phloem.layers import DecoderWeights, LayerWeights, RopeTable

__all__ = ["MLP_CHUNK_TOKENS", "Decoder"]

# The MLP's intermediate is the widest activation; a longer batch passes through it in parts.
MLP_CHUNK_TOKENS = 1024


class Decoder:
    """Embedding, layers and output head over `weights`. Holds no state between calls."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, *, ops: Ops, num_positions: int
    ) -> None:
        self.config = config
        self.weights = weights
        self._ops = ops
        self._rope = RopeTable(
            config.rope,
            head_dim=config.head_dim,
            num_positions=num_positions,
            device=weights.embedding.device,
        )

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        *,
        attention: LayeredAttention,
        meta: Any,
        on_layer: Callable[[], None],
    ) -> Tensor:
        """Hidden states after the last layer, before the final norm: (N, hidden).

        `tokens` and `positions` are (N,) int64. K and V go to pages through `attention`, which
        has planned this batch as `meta`. `on_layer` is called after each layer.
        """
        x = self.weights.embedding.index_select(0, tokens)
        cos, sin = self._rope.at(positions)
        for number, layer in enumerate(self.weights.layers):
            q, k, v = self._qkv(x, layer, cos, sin)
            mixed = attention.run(number, q, k, v, meta)
            x.add_(self._ops.linear(mixed, layer.out.weight, layer.out.bias))
            self._mlp(x, layer)
            on_layer()
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and output head of hidden states (R, hidden): (R, vocab), fp32."""
        normed = self._ops.rms_norm(hidden, self.weights.norm, self.config.norm_eps)
        return self._ops.linear(normed, self.weights.head, None).float()

    def _qkv(
        self, x: Tensor, layer: LayerWeights, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        config, ops = self.config, self._ops
        normed = ops.rms_norm(x, layer.attn_norm, config.norm_eps)
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = ops.linear(normed, layer.qkv.weight, layer.qkv.bias)
        qkv = qkv.view(x.shape[0], heads + 2 * kv_heads, config.head_dim)
        v = qkv[:, heads + kv_heads :]
        if layer.q_norm is None or layer.k_norm is None:
            qk = ops.rope(qkv[:, : heads + kv_heads], cos, sin)
            return qk[:, :heads], qk[:, heads:], v
        q = ops.rms_norm(qkv[:, :heads], layer.q_norm, config.norm_eps)
        k = ops.rms_norm(qkv[:, heads : heads + kv_heads], layer.k_norm, config.norm_eps)
        return ops.rope(q, cos, sin), ops.rope(k, cos, sin), v

    def _mlp(self, x: Tensor, layer: LayerWeights) -> None:
        """Add the MLP's output to x, in place."""
        for part in torch.split(x, MLP_CHUNK_TOKENS):
            normed = self._ops.rms_norm(part, layer.mlp_norm, self.config.norm_eps)
            gate_up = self._ops.linear(normed, layer.gate_up.weight, layer.gate_up.bias)
            inner = self._ops.silu_mul(gate_up)
            part.add_(self._ops.linear(inner, layer.down.weight, layer.down.bias))
