"""The decoder with latent attention on native CPU kernels, over packed weights.

A dozen calls a layer: what they move outweighs what they cost. Between the steps of a layer
activations are fp32; the residual keeps the model's dtype.

Letters: N tokens, H heads, D a query's head dim (nope + rope), C the latent, R the rotary part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phloem.attention.native_mla import LatentPlan
from phloem.config.model import ModelConfig
from phloem.kernels import KVBuffer
from phloem.kernels.native import kv_layer
from phloem.kernels.native_latent import LatentForm, NativeLatentKernels
from phloem.models.forward import Attention, LayerCalls
from phloem.models.native_base import NativeBase, RopeAngles
from phloem.models.packing import PackedDecoder, PackedLayer
from phloem.models.row import ALONE, Row

__all__ = ["NativeLatentDecoder"]


class NativeLatentDecoder(NativeBase):
    """As `NativeBase`, for models with `mla`; attention must be `NativeLatentAttention`."""

    _kernels: NativeLatentKernels

    def __init__(
        self,
        config: ModelConfig,
        weights: PackedDecoder,
        *,
        kernels: NativeLatentKernels,
        buffer: KVBuffer,
        num_positions: int,
        row: Row = ALONE,
    ) -> None:
        assert config.mla is not None, "a model of latents"
        rope = RopeAngles(config.rope, config.mla.rope_dim, num_positions)
        super().__init__(config, weights, kernels=kernels, rope=rope, row=row)
        self._mla, self._buffer = config.mla, buffer  # kv_layer only borrows it
        self._forms = [self._form(layer) for layer in weights.layers]
        self._pages = [
            kv_layer(buffer, i, rope_dim=self._mla.rope_dim) for i in range(config.num_layers)
        ]

    def _layers(self, hidden: Tensor, attention: Attention, meta: Any, calls: LayerCalls) -> None:
        (plan,) = attention.writes(meta)
        for number, layer in enumerate(self._weights.layers):
            q = self._write(number, hidden, layer, plan)
            calls.written(number)
            mixed = attention.attend(number, q, meta)
            self._add(hidden, mixed, layer.out, layer.post_attn_norm)
            self._mlp(hidden, layer)
            calls.on_layer()

    def _form(self, layer: PackedLayer) -> LatentForm:
        assert layer.k_norm is not None, "the latent of K and V has a norm"
        angles = self._rope
        return LatentForm(
            norm=layer.k_norm, norm_eps=self._mla.norm_eps, cos=angles.cos, sin=angles.sin
        )

    def _write(self, number: int, hidden: Tensor, layer: PackedLayer, plan: LatentPlan) -> Tensor:
        """Each token's row to its page; queries (N, H, D), rotated."""
        kernels, config = self._kernels, self.config
        normed = kernels.rms_norm(hidden.float(), layer.attn_norm, config.norm_eps)
        first = kernels.linear(normed, layer.qkv)
        width = first.shape[1] - self._mla.row_dim
        q, rows = torch.split(first, [width, self._mla.row_dim], dim=1)
        if layer.q_up is not None:
            assert layer.q_norm is not None, "the latent of q has a norm"
            q = kernels.rms_norm(q, layer.q_norm, self._mla.norm_eps)
            q = kernels.linear(q, layer.q_up)
        by_head = q.view(q.shape[0], config.num_heads, config.head_dim)
        kernels.latent_write(
            by_head, rows, self._forms[number], self._pages[number], plan.whole, kept=plan.kept
        )
        return by_head
