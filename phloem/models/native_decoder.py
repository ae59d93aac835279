"""The decoder on native CPU kernels: one call per layer, weights packed once.

The same interface as `Decoder`; attention must be `NativeAttention` (its plan is what layers read).
Between the steps of a layer activations are fp32; the residual keeps the model's dtype.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phloem.config.model import ModelConfig
from phloem.kernels import KVBuffer
from phloem.kernels.native import NativeBatch, NativeKernels, PackedWeight, kv_layer
from phloem.kernels.native_abi import Layer, WeightFormat
from phloem.layers import DecoderWeights, LayerWeights, RopeTable

__all__ = ["NativeDecoder"]


class NativeDecoder:
    """Packs `weights` (whose layers may be dropped afterwards) for `kernels`.

    `format`: how weight matrices are held; None keeps the model's dtype, INT8 quantises them.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        *,
        kernels: NativeKernels,
        buffer: KVBuffer,
        num_positions: int,
        format: WeightFormat | None = None,
    ) -> None:
        self.config = config
        self._kernels, self._format = kernels, format
        self._embedding = weights.embedding
        self._norm = weights.norm.float()
        rope = RopeTable(
            config.rope,
            head_dim=config.head_dim,
            num_positions=num_positions,
            device=torch.device("cpu"),
        )
        self._cos, self._sin = rope.cos.contiguous(), rope.sin.contiguous()
        self._kept: list[Tensor | PackedWeight | None] = []
        self._layers = tuple(self._pack(layer) for layer in weights.layers)
        self._buffer = buffer  # kv_layer only borrows it
        self._kv = tuple(kv_layer(buffer, i) for i in range(len(self._layers)))
        self._head = kernels.pack(weights.head, format=format)

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of what this decoder holds."""
        kept = [k for k in self._kept if k is not None] + [self._head, self._embedding, self._norm]
        return sum(k.num_bytes if isinstance(k, PackedWeight) else k.nbytes for k in kept)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,  # noqa: ARG002 - the plan has them
        *,
        attention: object,  # noqa: ARG002 - a layer attends by itself
        meta: Sequence[NativeBatch],
        on_layer: Callable[[], None],
    ) -> Tensor:
        """Hidden states after the last layer, before the final norm: (N, hidden)."""
        hidden = self._kernels.embedding(tokens, self._embedding)
        for layer, kv in zip(self._layers, self._kv, strict=True):
            self._kernels.layer_forward(layer, kv, meta[0], hidden)
            on_layer()
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and output head of hidden states (R, hidden): (R, vocab), fp32."""
        normed = self._kernels.rms_norm(hidden.float(), self._norm, self.config.norm_eps)
        return self._kernels.linear(normed, self._head)

    def _keep(self, tensor: Tensor | None) -> ctypes.c_void_p | int | None:
        """The address of an fp32 copy that lives as long as this decoder."""
        if tensor is None:
            return None
        copy = tensor.float().contiguous()
        self._kept.append(copy)
        return copy.data_ptr()

    def _keep_packed(self, packed: PackedWeight) -> PackedWeight:
        self._kept.append(packed)
        return packed

    def _pack(self, weights: LayerWeights) -> Layer:
        config, kernels, form = self.config, self._kernels, self._format
        gate, up = weights.gate_up.weight.chunk(2)
        qkv, out, down = (
            self._keep_packed(kernels.pack(linear.weight, linear.bias, format=form))
            for linear in (weights.qkv, weights.out, weights.down)
        )
        gate_up = self._keep_packed(kernels.pack_gate_up(gate, up, format=form))
        return Layer(
            attn_norm=self._keep(weights.attn_norm),
            mlp_norm=self._keep(weights.mlp_norm),
            q_norm=self._keep(weights.q_norm),
            k_norm=self._keep(weights.k_norm),
            cos=self._cos.data_ptr(),
            sin=self._sin.data_ptr(),
            qkv=qkv.struct(),
            o=out.struct(),
            gate_up=gate_up.struct(),
            down=down.struct(),
            max_position=self._cos.shape[0],
            hidden=config.hidden_size,
            num_heads=config.num_heads,
            rotary_dim=2 * self._cos.shape[1],
            window=0,
            norm_eps=config.norm_eps,
            scale=config.head_dim**-0.5,
        )
