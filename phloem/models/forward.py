"""What a worker asks of a model, whoever computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from phloem.config.model import ModelConfig

__all__ = ["Forward"]


class Forward(Protocol):
    """Embedding, layers and output head. Holds no state of requests between calls."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device: ...

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        *,
        attention: Any,
        meta: Any,
        on_layer: Callable[[], None],
        on_written: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Hidden states after the last layer, before the final norm: (N, hidden)."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and output head of hidden states (R, hidden): (R, vocab), fp32."""
        ...
