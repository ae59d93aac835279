"""What decoders on native kernels have in common: their ends, the MLP, and where ranks of a row
meet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phloem.config.model import Activation, ModelConfig, RopeConfig
from phloem.kernels.native import NativeKernels
from phloem.kernels.native_abi import Gate
from phloem.kernels.native_types import PackedWeight
from phloem.layers import RopeTable
from phloem.models.decoder import MLP_CHUNK_TOKENS
from phloem.models.forward import Attention, LayerCalls, pass_layers
from phloem.models.packing import PackedDecoder, PackedLayer
from phloem.models.row import Row

__all__ = ["GATES", "NativeBase", "RopeAngles"]

# Tokens times bytes of weights of a pass over which nobody minds if no heartbeat and no abort comes
# in between: some tenths of a second.
_SHORT_PASS_BYTES = 1 << 34

GATES = {Activation.SILU: Gate.SILU, Activation.GELU_TANH: Gate.GELU_TANH}


class RopeAngles:
    """cos and sin of every position (positions, rotary / 2), fp32 and contiguous."""

    def __init__(self, rope: RopeConfig, rotary_dim: int, num_positions: int) -> None:
        cpu = torch.device("cpu")
        table = RopeTable(rope, head_dim=rotary_dim, num_positions=num_positions, device=cpu)
        self.cos, self.sin = table.cos.contiguous(), table.sin.contiguous()


class NativeBase(ABC):
    """Owns `weights`, which `kernels` packed; `weight_bytes` of them.

    `config` and `weights` may be a shard of a model, of which the ranks of `row` are the whole.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: PackedDecoder,
        *,
        kernels: NativeKernels,
        rope: RopeAngles,
        row: Row,
    ) -> None:
        self.config = config
        self._kernels, self._weights, self._rope, self._row = kernels, weights, rope, row
        self.weight_bytes = weights.num_bytes

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.dtype

    @property
    def num_positions(self) -> int:
        return int(self._rope.cos.shape[0])

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,  # noqa: ARG002 - the plan has them
        *,
        attention: Attention,
        meta: Any,
        on_layer: Callable[[], None],
        on_written: Callable[[int], None] | None = None,
        at_once: bool = False,
    ) -> Tensor:
        """As `Forward.forward`."""
        is_short = len(tokens) * self.weight_bytes <= _SHORT_PASS_BYTES
        calls = LayerCalls(on_layer=on_layer, on_written=on_written, at_once=at_once and is_short)
        if not len(tokens):
            return pass_layers(self, attention, meta, calls, dtype=torch.float32)
        hidden = self._embed(tokens)
        self._layers(hidden, attention, meta, calls)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Forward.logits`."""
        normed = self._kernels.rms_norm(hidden.float(), self._weights.norm, self.config.norm_eps)
        logits = self._kernels.linear(normed, self._weights.head)
        if self._weights.head.n < self.config.vocab_size:
            logits = self._row.join(logits)
        cap = self.config.final_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def best(self, logits: Tensor) -> list[int]:
        """As `Forward.best`."""
        best: list[int] = self._kernels.argmax(logits).tolist()
        return best

    @abstractmethod
    def _layers(self, hidden: Tensor, attention: Attention, meta: Any, calls: LayerCalls) -> None:
        """All layers, on hidden (N, hidden) in place; N is not 0."""

    def _embed(self, tokens: Tensor) -> Tensor:
        """Hidden states (N, hidden) of tokens (N,), in the model's dtype."""
        weights, scale = self._weights, self.config.embedding_scale
        hidden = self._kernels.embedding(tokens, weights.embedding, weights.dtype)
        if scale != 1.0:
            # The scale is rounded to the model's dtype, as in training.
            hidden.mul_(torch.tensor(scale, dtype=hidden.dtype))
        return hidden

    def _mlp(self, hidden: Tensor, layer: PackedLayer) -> None:
        """Add the MLP's output to hidden, in place."""
        kernels, config = self._kernels, self.config
        for part in torch.split(hidden, MLP_CHUNK_TOKENS):
            normed = kernels.rms_norm(part.float(), layer.mlp_norm, config.norm_eps)
            inner = kernels.linear(normed, layer.gate_up, gate=GATES[config.activation])
            self._add(part, inner, layer.down, layer.post_mlp_norm)

    def _add(self, hidden: Tensor, x: Tensor, weight: PackedWeight, norm: Tensor | None) -> None:
        """hidden += x (N, k), fp32, times weight, of which each rank of the row has a summand."""
        if self._row.is_whole and norm is None:
            self._kernels.linear(x, weight, residual=hidden, out=hidden)
            return
        out = self._row.add_up(self._kernels.linear(x, replace(weight, bias=None)))
        if weight.bias is not None:
            out += weight.bias
        if norm is not None:
            out = self._kernels.rms_norm(out, norm, self.config.norm_eps)
        hidden.add_(out)
