"""Attention over what is here of the pages that a batch reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phloem.attention.backend import AttentionBackend
from phloem.attention.held import Held

__all__ = ["OwnPart"]


@dataclass(frozen=True, slots=True)
class OwnPart:
    """A plan of the tokens `index` (n,) of a batch; None: of all of them, since each lies in a page
    that is here."""

    plan: Any
    index: Tensor | None

    @classmethod
    def of(
        cls, backend: AttentionBackend[Any], held: Held, num_tokens: int, device: torch.device
    ) -> OwnPart:
        """What `backend` does of a batch of `num_tokens`."""
        every = len(held.index) == num_tokens
        index = None if every else torch.from_numpy(held.index).to(device)
        return cls(backend.plan(held.batch), index)

    def partial(
        self, backend: AttentionBackend[Any], layer: int, q: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `AttentionBackend.partial`; of a token that sees nothing here, nothing."""
        if self.index is None:
            return backend.partial(layer, q, self.plan)
        part, part_lse = backend.partial(layer, q.index_select(0, self.index), self.plan)
        out = part.new_zeros((len(q), *part.shape[1:]))
        lse = part_lse.new_full((len(q), part_lse.shape[1]), -torch.inf)
        return out.index_copy_(0, self.index, part), lse.index_copy_(0, self.index, part_lse)
