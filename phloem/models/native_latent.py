"""The decoder with latent attention on native CPU kernels, over packed weights.

A dozen calls a layer: what they move outweighs what they cost. Between the steps of a layer
activations are fp32; the residual keeps the model's dtype.

Letters: N tokens, H heads, D a query's head dim (nope + rope), C the latent, R the rotary part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phloem.attention.native_mla import LatentPlan
from phloem.config.mla import MLAConfig
from phloem.config.model import ModelConfig
from phloem.kernels import KVBuffer
from phloem.kernels.native import kv_layer
from phloem.kernels.native_latent import LatentForm, NativeLatentKernels
from phloem.kernels.native_types import PackedWeight
from phloem.models.forward import Attention, LayerCalls, pass_layers
from phloem.models.native_decoder import GATES
from phloem.models.native_ends import NativeEnds, RopeAngles
from phloem.models.packing import PackedDecoder, PackedLayer
from phloem.models.row import ALONE, Row

__all__ = ["NativeLatentDecoder"]

# The MLP's intermediate is the widest activation; a longer batch passes through it in parts.
MLP_CHUNK_TOKENS = 2048


class NativeLatentDecoder:
    """As `NativeDecoder`, for models with `mla`; attention must be `NativeLatentAttention`."""

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
        self.config = config
        self._mla: MLAConfig = config.mla
        self._kernels, self._weights, self._row = kernels, weights, row
        self._ends = NativeEnds(config, weights, kernels=kernels, row=row)
        self._buffer = buffer  # kv_layer only borrows it
        self._rope = RopeAngles(config.rope, self._mla.rope_dim, num_positions)
        self._forms = [self._form(layer) for layer in weights.layers]
        self._pages = [
            kv_layer(buffer, i, rope_dim=self._mla.rope_dim) for i in range(config.num_layers)
        ]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.dtype

    @property
    def num_positions(self) -> int:
        return int(self._rope.cos.shape[0])

    @property
    def weight_bytes(self) -> int:
        """Bytes of what this decoder holds."""
        return self._weights.num_bytes

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,  # noqa: ARG002 - the plan has them
        *,
        attention: Attention,
        meta: Any,
        on_layer: Callable[[], None],
        on_written: Callable[[int], None] | None = None,
    ) -> Tensor:
        """As `Forward.forward`."""
        calls = LayerCalls(on_layer=on_layer, on_written=on_written)
        if not len(tokens):
            return pass_layers(self, attention, meta, calls, dtype=torch.float32)
        hidden = self._ends.embed(tokens)
        (plan,) = attention.writes(meta)
        for number, layer in enumerate(self._weights.layers):
            q = self._write(number, hidden, layer, plan)
            calls.written(number)
            mixed = attention.attend(number, q, meta)
            self._add(hidden, mixed, layer.out)
            self._mlp(hidden, layer)
            calls.on_layer()
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Forward.logits`."""
        return self._ends.logits(hidden)

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

    def _mlp(self, hidden: Tensor, layer: PackedLayer) -> None:
        """Add the MLP's output to hidden, in place."""
        kernels, gate = self._kernels, GATES[self.config.activation]
        for part in torch.split(hidden, MLP_CHUNK_TOKENS):
            normed = kernels.rms_norm(part.float(), layer.mlp_norm, self.config.norm_eps)
            inner = kernels.linear(normed, layer.gate_up, gate=gate)
            self._add(part, inner, layer.down)

    def _add(self, hidden: Tensor, x: Tensor, weight: PackedWeight) -> None:
        """hidden += x times weight, of which each rank of the row has a summand; in place."""
        if self._row.is_whole:
            self._kernels.linear(x, weight, residual=hidden, out=hidden)
        else:
            self._ends.add_summed(hidden, x, weight, None)
