"""What a model's layers ask of attention."""

from __future__ import annotations

from typing import Generic, Protocol, Self, TypeVar

from torch import Tensor

from phloem.attention.batch import RaggedBatch
from phloem.kernels import KVBuffer

__all__ = ["AttentionBackend"]

MetaT = TypeVar("MetaT")


class AttentionBackend(Protocol, Generic[MetaT]):
    """Attention over the pages of one component: `plan` once per step, `run` once per layer.

    `layer` counts within the component. Where ranks share requests, all of them write before any
    of them attends.
    """

    @property
    def window(self) -> int | None:
        """How many tokens a query sees, its own included; None: all before it."""
        ...

    def plan(self, batch: RaggedBatch) -> MetaT:
        """Index tensors of one step; nothing in them depends on the layer."""
        ...

    def plan_write(self, batch: RaggedBatch) -> MetaT:
        """A plan for `write` alone: pages that hold none of the tokens may be anything."""
        ...

    def over(self, buffer: KVBuffer, layer: int) -> Self:
        """The attention of one layer over other pages, whose only layer it is."""
        ...

    def write(self, layer: int, k: Tensor, v: Tensor, meta: MetaT) -> None:
        """Write k and v (N, K, D) to their pages."""
        ...

    def attend(self, layer: int, q: Tensor, meta: MetaT, *, sinks: Tensor | None = None) -> Tensor:
        """Attention of q (N, H, D) over the pages: (N, H * D).

        `sinks` (H,): each head's score of no token.
        """
        ...

    def partial(self, layer: int, q: Tensor, meta: MetaT) -> tuple[Tensor, Tensor]:
        """The same without sinks, for a merge with others: (N, H, D), and the natural log-sum-exp
        of the scores (N, H), fp32."""
        ...

    # Queries that another rank computes. By default it does so as this one would.

    def ask(self, layer: int, q: Tensor) -> Tensor:  # noqa: ARG002
        """What another rank needs of queries q (n, H, D), which may have other heads' weights."""
        return q

    def partial_asked(self, layer: int, asked: Tensor, meta: MetaT) -> tuple[Tensor, Tensor]:
        """`partial` of what another rank's `ask` gave."""
        return self.partial(layer, asked, meta)

    def answered(self, layer: int, part: Tensor) -> Tensor:  # noqa: ARG002
        """What another rank's `partial_asked` gave, as `partial` gives it."""
        return part

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
        """Write, then attend."""
        self.write(layer, k, v, meta)
        return self.attend(layer, q, meta, sinks=sinks)
