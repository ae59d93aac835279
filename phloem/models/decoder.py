"""The decoder skeleton that all families share.

Letters: N tokens of the flat batch, H heads, K KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phloem.config.model import Activation, ModelConfig, RopeConfig
from phloem.kernels import Ops
from phloem.kernels.best import best_tokens
from phloem.layers import DecoderWeights, LayerWeights, Linear, RopeTable
from phloem.models.forward import Attention, LayerCalls, pass_layers
from phloem.models.latent import latent_qkv
from phloem.models.row import ALONE, Row

__all__ = ["MLP_CHUNK_TOKENS", "Decoder"]

# The MLP's intermediate is the widest activation; a longer batch passes through it in parts.
MLP_CHUNK_TOKENS = 1024


class Decoder:
    """Embedding, layers and output head over `weights`. Holds no state between calls.

    `config` and `weights` may be a shard of a model, of which the ranks of `row` are the whole.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        *,
        ops: Ops,
        num_positions: int,
        row: Row = ALONE,
    ) -> None:
        self.config = config
        self.weights = weights
        self._row = row
        self._ops = ops
        self._rope = self._rope_table(config.rope, num_positions)
        own = config.window_rope
        self._window_rope = self._rope if own is None else self._rope_table(own, num_positions)
        self._gate_up = {
            Activation.SILU: ops.silu_mul,
            Activation.GELU_TANH: ops.gelu_tanh_mul,
        }[config.activation]

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    @property
    def num_positions(self) -> int:
        return int(self._rope.cos.shape[0])

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        *,
        attention: Attention,
        meta: Any,
        on_layer: Callable[[], None],
        on_written: Callable[[int], None] | None = None,
        at_once: bool = False,  # noqa: ARG002 - a layer is many calls anyway
    ) -> Tensor:
        """As `Forward.forward`: K and V go to pages through `attention`, which has planned this
        batch as `meta`.
        """
        if not len(tokens):
            calls = LayerCalls(on_layer=on_layer, on_written=on_written)
            return pass_layers(self, attention, meta, calls, dtype=self.dtype)
        x = self._embed(tokens)
        angles = self._rope.at(positions)
        own_rope = self._window_rope is not self._rope
        window_angles = self._window_rope.at(positions) if own_rope else angles
        layers = zip(self.config.layers, self.weights.layers, strict=True)
        for number, (spec, layer) in enumerate(layers):
            q, k, v = self._qkv(x, layer, *(angles if spec.window is None else window_angles))
            mixed = attention.run(number, q, k, v, meta, sinks=layer.sinks, on_written=on_written)
            mixed = self._summed(mixed, layer.out)
            x.add_(self._normed(mixed, layer.post_attn_norm))
            self._mlp(x, layer)
            on_layer()
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Forward.logits`."""
        normed = self._ops.rms_norm(hidden, self.weights.norm, self.config.norm_eps)
        logits = self._ops.linear(normed, self.weights.head, None).float()
        if len(self.weights.head) < self.config.vocab_size:
            logits = self._row.join(logits)
        cap = self.config.final_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def best(self, logits: Tensor) -> list[int]:
        """As `Forward.best`."""
        return best_tokens(logits)

    def _rope_table(self, rope: RopeConfig, num_positions: int) -> RopeTable:
        return RopeTable(
            rope,
            head_dim=self.config.rope_dim,
            num_positions=num_positions,
            device=self.weights.embedding.device,
        )

    def _embed(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding; their scale is rounded to the model's dtype, as in training."""
        x = self.weights.embedding.index_select(0, tokens)
        if self.config.embedding_scale == 1.0:
            return x
        return x.mul_(torch.tensor(self.config.embedding_scale, dtype=x.dtype, device=x.device))

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._ops.rms_norm(x, weight, self.config.norm_eps)

    def _qkv(
        self, x: Tensor, layer: LayerWeights, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        config, ops = self.config, self._ops
        normed = ops.rms_norm(x, layer.attn_norm, config.norm_eps)
        if config.mla is not None:
            return latent_qkv(normed, layer, cos, sin, ops=ops, mla=config.mla)
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

    def _summed(self, x: Tensor, linear: Linear) -> Tensor:
        """A product of which each rank of the row has a summand; the bias is added once."""
        if self._row.is_whole:
            return self._ops.linear(x, linear.weight, linear.bias)
        out = self._row.add_up(self._ops.linear(x, linear.weight, None))
        return out if linear.bias is None else out.add_(linear.bias)

    def _mlp(self, x: Tensor, layer: LayerWeights) -> None:
        """Add the MLP's output to x, in place."""
        for part in torch.split(x, MLP_CHUNK_TOKENS):
            normed = self._ops.rms_norm(part, layer.mlp_norm, self.config.norm_eps)
            gate_up = self._ops.linear(normed, layer.gate_up.weight, layer.gate_up.bias)
            out = self._summed(self._gate_up(gate_up), layer.down)
            part.add_(self._normed(out, layer.post_mlp_norm))
