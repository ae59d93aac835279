"""What a worker asks of a model, whoever computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from phloem.config.model import ModelConfig

__all__ = ["Forward", "pass_layers"]


class Forward(Protocol):
    """Embedding, layers and output head. Holds no state of requests between calls."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

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
        """Hidden states after the last layer, before the final norm: (N, hidden).

        `tokens` and `positions` are (N,) int64; N may be 0. `on_layer` is called after each layer;
        `on_written` with the number of each layer when the K and V of all N tokens are in their
        pages and nothing has been read yet: where ranks share requests, they meet there.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and output head of hidden states (R, hidden): (R, vocab), fp32."""
        ...


def pass_layers(
    model: Forward, on_layer: Callable[[], None], on_written: Callable[[int], None] | None
) -> Tensor:
    """The forward pass of a rank that has no token in a step: others may wait for it all the same.

    Returns no hidden states, (0, hidden).
    """
    for number in range(model.config.num_layers):
        if on_written is not None:
            on_written(number)
        on_layer()
    return torch.empty((0, model.config.hidden_size), dtype=model.dtype, device=model.device)
