"""The decoder on native CPU kernels: one call per layer, over packed weights.

The same interface as `Decoder`; attention must be `NativeAttention` (its plan is what layers read).
Between the steps of a layer activations are fp32; the residual keeps the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from phloem.config.model import ModelConfig
from phloem.kernels import KVBuffer
from phloem.kernels.native import NativeBatch, NativeKernels, kv_layer
from phloem.kernels.native_abi import Layer
from phloem.kernels.native_types import address
from phloem.layers import RopeTable
from phloem.models.packing import PackedDecoder, PackedLayer

__all__ = ["NativeDecoder"]


class NativeDecoder:
    """Owns `weights`, which `kernels` packed."""

    def __init__(
        self,
        config: ModelConfig,
        weights: PackedDecoder,
        *,
        kernels: NativeKernels,
        buffer: KVBuffer,
        num_positions: int,
    ) -> None:
        self.config = config
        self._kernels, self._weights = kernels, weights
        rope = RopeTable(
            config.rope,
            head_dim=config.head_dim,
            num_positions=num_positions,
            device=torch.device("cpu"),
        )
        self._cos, self._sin = rope.cos.contiguous(), rope.sin.contiguous()
        self._layers = tuple(self._struct(layer) for layer in weights.layers)
        self._buffer = buffer  # kv_layer only borrows it
        self._kv = tuple(kv_layer(buffer, i) for i in range(len(self._layers)))

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of what this decoder holds."""
        return self._weights.num_bytes

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
        hidden = self._kernels.embedding(tokens, self._weights.embedding, self.dtype)
        for layer, kv in zip(self._layers, self._kv, strict=True):
            self._kernels.layer_forward(layer, kv, meta[0], hidden)
            on_layer()
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and output head of hidden states (R, hidden): (R, vocab), fp32."""
        normed = self._kernels.rms_norm(hidden.float(), self._weights.norm, self.config.norm_eps)
        return self._kernels.linear(normed, self._weights.head)

    def _struct(self, weights: PackedLayer) -> Layer:
        config = self.config
        return Layer(
            attn_norm=address(weights.attn_norm),
            mlp_norm=address(weights.mlp_norm),
            q_norm=address(weights.q_norm),
            k_norm=address(weights.k_norm),
            cos=self._cos.data_ptr(),
            sin=self._sin.data_ptr(),
            qkv=weights.qkv.struct(),
            o=weights.out.struct(),
            gate_up=weights.gate_up.struct(),
            down=weights.down.struct(),
            max_position=self._cos.shape[0],
            hidden=config.hidden_size,
            num_heads=config.num_heads,
            rotary_dim=2 * self._cos.shape[1],
            window=0,
            norm_eps=config.norm_eps,
            scale=config.head_dim**-0.5,
        )
