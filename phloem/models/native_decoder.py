"""The decoder on native CPU kernels: one call per layer, over packed weights.

The same interface as `Decoder`; attention must be `NativeAttention` (its plan is what layers read).
Between the steps of a layer activations are fp32; the residual keeps the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phloem.config.model import Activation, LayerSpec, ModelConfig
from phloem.kernels import KVBuffer
from phloem.kernels.native import NativeKernels, kv_layer
from phloem.kernels.native_abi import Gate, KvLayer, Layer
from phloem.kernels.native_types import address
from phloem.models.decoder import MLP_CHUNK_TOKENS
from phloem.models.forward import Attention, LayerCalls, pass_layers
from phloem.models.native_ends import NativeEnds, RopeAngles
from phloem.models.packing import PackedDecoder, PackedLayer
from phloem.models.row import ALONE, Row

__all__ = ["GATES", "NativeDecoder"]

GATES = {Activation.SILU: Gate.SILU, Activation.GELU_TANH: Gate.GELU_TANH}


class NativeDecoder:
    """Owns `weights`, which `kernels` packed. `buffers`: pages, one buffer per component.

    `config` and `weights` may be a shard of a model, of which the ranks of `row` are the whole.
    """

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
        self.config = config
        self._kernels, self._weights, self._row = kernels, weights, row
        self._ends = NativeEnds(config, weights, kernels=kernels, row=row)
        self._rope = RopeAngles(config.rope, config.head_dim, num_positions)
        own = config.window_rope
        self._window_rope = self._rope
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
        """As `Forward.forward`; a layer attends by itself, unless that needs other ranks."""
        calls = LayerCalls(on_layer=on_layer, on_written=on_written)
        if not len(tokens):
            return pass_layers(self, attention, meta, calls, dtype=torch.float32)
        hidden = self._ends.embed(tokens)
        if not self._row.is_whole:
            return self._in_parts(hidden, attention, meta, calls)
        if on_written is not None or attention.exchanges:
            return self._in_halves(hidden, attention, meta, calls)
        for layer, kv, component in self._steps:
            self._kernels.layer_forward(layer, kv, meta[component], hidden)
            on_layer()
        return hidden

    def _in_halves(
        self, hidden: Tensor, attention: Attention, meta: Any, calls: LayerCalls
    ) -> Tensor:
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
        return hidden

    def _in_parts(
        self, hidden: Tensor, attention: Attention, meta: Any, calls: LayerCalls
    ) -> Tensor:
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
            self._ends.add_summed(hidden, mixed, own.out, own.post_attn_norm)
            for part in torch.split(hidden, MLP_CHUNK_TOKENS):
                normed = kernels.rms_norm(part.float(), own.mlp_norm, config.norm_eps)
                act = kernels.linear(normed, own.gate_up, gate=GATES[config.activation])
                self._ends.add_summed(part, act, own.down, own.post_mlp_norm)
            calls.on_layer()
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Forward.logits`."""
        return self._ends.logits(hidden)

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
