"""Where a decoder on native kernels begins, where it ends, and where ranks of a row meet."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from phloem.config.model import ModelConfig, RopeConfig
from phloem.kernels.native import NativeKernels
from phloem.kernels.native_types import PackedWeight
from phloem.layers import RopeTable
from phloem.models.packing import PackedDecoder
from phloem.models.row import ALONE, Row

__all__ = ["NativeEnds", "RopeAngles"]


class RopeAngles:
    """cos and sin of every position (positions, rotary / 2), fp32 and contiguous."""

    def __init__(self, rope: RopeConfig, rotary_dim: int, num_positions: int) -> None:
        cpu = torch.device("cpu")
        table = RopeTable(rope, head_dim=rotary_dim, num_positions=num_positions, device=cpu)
        self.cos, self.sin = table.cos.contiguous(), table.sin.contiguous()


class NativeEnds:
    """Borrows what it is made of."""

    def __init__(
        self,
        config: ModelConfig,
        weights: PackedDecoder,
        *,
        kernels: NativeKernels,
        row: Row = ALONE,
    ) -> None:
        self._config, self._weights, self._kernels, self._row = config, weights, kernels, row

    def embed(self, tokens: Tensor) -> Tensor:
        """Hidden states (N, hidden) of tokens (N,), in the model's dtype."""
        weights, scale = self._weights, self._config.embedding_scale
        hidden = self._kernels.embedding(tokens, weights.embedding, weights.dtype)
        if scale != 1.0:
            # The scale is rounded to the model's dtype, as in training.
            hidden.mul_(torch.tensor(scale, dtype=hidden.dtype))
        return hidden

    def add_summed(
        self, hidden: Tensor, x: Tensor, weight: PackedWeight, norm: Tensor | None
    ) -> None:
        """hidden += what the row's ranks get of x (N, k), fp32, in place."""
        out = self._row.add_up(self._kernels.linear(x, replace(weight, bias=None)))
        if weight.bias is not None:
            out += weight.bias
        if norm is not None:
            out = self._kernels.rms_norm(out, norm, self._config.norm_eps)
        hidden.add_(out)

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Forward.logits`."""
        normed = self._kernels.rms_norm(hidden.float(), self._weights.norm, self._config.norm_eps)
        logits = self._kernels.linear(normed, self._weights.head)
        if self._weights.head.n < self._config.vocab_size:
            logits = self._row.join(logits)
        cap = self._config.final_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
