"""What a model's layers ask of attention."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from torch import Tensor

from phloem.attention.batch import RaggedBatch

__all__ = ["AttentionBackend"]

MetaT = TypeVar("MetaT")


class AttentionBackend(Protocol, Generic[MetaT]):
    """Attention over the pages of one component: `plan` once per step, `run` once per layer."""

    def plan(self, batch: RaggedBatch) -> MetaT:
        """Index tensors of one step; nothing in them depends on the layer."""
        ...

    def run(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        meta: MetaT,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q (N, H, D), k and v (N, K, D): write k and v to their pages, attend: (N, H * D).

        `layer` counts within the component. `sinks` (H,): each head's score of no token.
        """
        ...
