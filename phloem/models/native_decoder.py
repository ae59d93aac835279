"""The decoder on native CPU kernels: one call per layer, or one for all, over packed weights.

The same interface as `Decoder`; attention must be `NativeAttention` (its plan is what layers read).
Between the steps of a layer activations are fp32; the residual keeps the model's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phloem.config.model import LayerSpec, ModelConfig
from phloem.kernels import KVBuffer
from phloem.kernels.native import NativeKernels, kv_layer
from phloem.kernels.native_abi import KvLayer, Layer
from phloem.kernels.native_types import address, chain
from phloem.models.forward import Attention, LayerCalls
from phloem.models.native_base import GATES, NativeBase, RopeAngles
from phloem.models.packing import PackedDecoder, PackedLayer
from phloem.models.row import ALONE, Row

__all__ = ["NativeDecoder"]


class NativeDecoder(NativeBase):
    """As `NativeBase`. `buffers`: pages, one buffer per component."""

    def __init__(
        self,
        config: ModelConfig,
        weights: PackedDecoder,
        *,
        kernels: NativeKernels,
        buffers: Sequence[KVBuffer],
        num_positions: int,
        row: Row = ALONE,
    ) -> None:
        rope = RopeAngles(config.rope, config.head_dim, num_positions)
        super().__init__(config, weights, kernels=kernels, rope=rope, row=row)
        own = config.window_rope
        self._window_rope = rope
        if own is not None:
            self._window_rope = RopeAngles(own, config.head_dim, num_positions)
        self._buffers = tuple(buffers)  # kv_layer only borrows them
        specs = zip(config.layers, weights.layers, strict=True)
        structs = [self._struct(spec, layer) for spec, layer in specs]
        places = sorted(
            (number, component, index)
            for component, numbers in enumerate(config.component_layers)
            for index, number in enumerate(numbers)
        )
        self._steps: tuple[tuple[Layer, KvLayer, int], ...] = tuple(
            (structs[number], kv_layer(self._buffers[component], index), component)
            for number, component, index in places
        )
        self._chain = chain(self._steps)

    def _layers(self, hidden: Tensor, attention: Attention, meta: Any, calls: LayerCalls) -> None:
        """A layer attends by itself, unless that needs other ranks."""
        if not self._row.is_whole:
            self._in_parts(hidden, attention, meta, calls)
        elif calls.on_written is not None or attention.exchanges:
            self._in_halves(hidden, attention, meta, calls)
        elif calls.at_once:
            self._kernels.layers_forward(self._chain, meta, hidden)
            calls.on_layer()
        else:
            for layer, kv, component in self._steps:
                self._kernels.layer_forward(layer, kv, meta[component], hidden)
                calls.on_layer()

    def _in_halves(
        self, hidden: Tensor, attention: Attention, meta: Any, calls: LayerCalls
    ) -> None:
        """The same bits by two calls a layer, since somebody wants to know what is between them."""
        config, kernels = self.config, self._kernels
        qkv = torch.empty((hidden.shape[0], config.q_size + 2 * config.kv_size))
        q = qkv[:, : config.q_size]
        by_head = q.view(q.shape[0], config.num_heads, config.head_dim)
        batches = attention.writes(meta)
        for number, (layer, kv, component) in enumerate(self._steps):
            batch = batches[component]
            kernels.layer_project(layer, kv, batch, hidden, qkv)
            calls.written(number)
            if attention.exchanges:
                sinks = self._weights.layers[number].sinks
                q.copy_(attention.attend(number, by_head, meta, sinks=sinks))
                kernels.layer_output(layer, kv, batch, hidden, qkv)
            else:
                kernels.layer_finish(layer, kv, batch, hidden, qkv)
            calls.on_layer()

    def _in_parts(self, hidden: Tensor, attention: Attention, meta: Any, calls: LayerCalls) -> None:
        """A layer as a rank of a row computes it: what o and down give is added up before it
        reaches the residual, which all ranks hold whole."""
        config, kernels, weights = self.config, self._kernels, self._weights
        qkv = torch.empty((hidden.shape[0], config.q_size + 2 * config.kv_size))
        q = qkv[:, : config.q_size].view(-1, config.num_heads, config.head_dim)
        batches = attention.writes(meta)
        for number, (layer, kv, component) in enumerate(self._steps):
            own = weights.layers[number]
            kernels.layer_project(layer, kv, batches[component], hidden, qkv)
            calls.written(number)
            mixed = attention.attend(number, q, meta, sinks=own.sinks)
            self._add(hidden, mixed, own.out, own.post_attn_norm)
            self._mlp(hidden, own)
            calls.on_layer()

    def _struct(self, spec: LayerSpec, weights: PackedLayer) -> Layer:
        config = self.config
        rope = self._rope if spec.window is None else self._window_rope
        return Layer(
            attn_norm=address(weights.attn_norm),
            mlp_norm=address(weights.mlp_norm),
            post_attn_norm=address(weights.post_attn_norm),
            post_mlp_norm=address(weights.post_mlp_norm),
            q_norm=address(weights.q_norm),
            k_norm=address(weights.k_norm),
            cos=address(rope.cos),
            sin=address(rope.sin),
            sinks=address(weights.sinks),
            qkv=weights.qkv.struct(),
            o=weights.out.struct(),
            gate_up=weights.gate_up.struct(),
            down=weights.down.struct(),
            max_position=rope.cos.shape[0],
            hidden=config.hidden_size,
            num_heads=config.num_heads,
            rotary_dim=2 * rope.cos.shape[1],
            window=spec.window or 0,
            norm_eps=config.norm_eps,
            scale=config.score_scale,
            softcap=config.attn_softcap or 0.0,
            gate=int(GATES[config.activation]),
        )
