"""What a worker asks of a model, whoever computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from phloem.config.model import ModelConfig

__all__ = ["Attention", "Forward", "LayerCalls", "pass_layers"]


class Attention(Protocol):
    """Attention of all layers of a model: `LayeredAttention`, or `RemoteAttention` over ranks whose
    pages lie elsewhere."""

    @property
    def exchanges(self) -> bool:
        """Whether `attend` needs other ranks, and so must be asked for every layer."""
        ...

    def writes(self, meta: Any) -> Sequence[Any]: ...

    def attend(
        self, layer: int, q: Tensor, meta: Any, *, sinks: Tensor | None = None
    ) -> Tensor: ...

    def run(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        meta: Any,
        *,
        sinks: Tensor | None = None,
        on_written: Callable[[int], None] | None = None,
    ) -> Tensor: ...

    def serve(self, layer: int, q: Tensor, meta: Any) -> None: ...


class Forward(Protocol):
    """Embedding, layers and output head. Holds no state of requests between calls."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def num_positions(self) -> int:
        """Positions from 0 on at which a token may stand."""
        ...

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        *,
        attention: Attention,
        meta: Any,
        on_layer: Callable[[], None],
        on_written: Callable[[int], None] | None = None,
        at_once: bool = False,
    ) -> Tensor:
        """Hidden states after the last layer, before the final norm: (N, hidden).

        `tokens` and `positions` are (N,) int64; N may be 0. `on_layer` is called after each layer;
        `on_written` with the number of each layer when the K and V of all N tokens are in their
        pages and nothing has been read yet: where ranks share requests, they meet there.
        `at_once`: nothing happens between layers that they depend on, so where a pass is short
        they may all be computed first, and `on_layer` be called once.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and output head of hidden states (R, hidden): (R, vocab), fp32.

        Where a row of ranks computes the model, all of its ranks call it, and the first one has the
        logits.
        """
        ...

    def best(self, logits: Tensor) -> list[int]:
        """The first of the greatest logits (R, vocab) of each row; -1 if one is not finite."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCalls:
    """Who is told of a pass over the layers, as `Forward.forward` says."""

    on_layer: Callable[[], None]
    on_written: Callable[[int], None] | None
    at_once: bool = False

    def written(self, layer: int) -> None:
        if self.on_written is not None:
            self.on_written(layer)


def pass_layers(
    model: Forward, attention: Attention, meta: Any, calls: LayerCalls, *, dtype: torch.dtype
) -> Tensor:
    """The forward pass of a rank that has no token in a step: others may need it all the same.

    `dtype`: of queries. Returns no hidden states, (0, hidden).
    """
    config = model.config
    no_queries = torch.empty(
        (0, config.num_heads, config.head_dim), dtype=dtype, device=model.device
    )
    for number in range(config.num_layers):
        calls.written(number)
        attention.serve(number, no_queries, meta)
        calls.on_layer()
    return torch.empty((0, config.hidden_size), dtype=model.dtype, device=model.device)
