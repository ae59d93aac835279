"""A row of ranks that each compute a shard of the model: what they give is joined here."""

from __future__ import annotations

import torch
from torch import Tensor

from phloem.core.group import Group, Reduce

__all__ = ["ALONE", "Row"]


class Row:
    """One rank's end. `group`: the ranks of the row; None: one rank computes everything.

    All ranks of a row call the same in the same order, with tensors of the same shape.
    """

    def __init__(self, group: Group[Tensor] | None = None) -> None:
        self._group = group

    @property
    def is_whole(self) -> bool:
        """Whether nobody else computes a part."""
        return self._group is None

    def add_up(self, summand: Tensor) -> Tensor:
        """The sum of all ranks' summands, in place, to the same bits on each of them."""
        if self._group is not None:
            self._group.all_reduce(summand, Reduce.SUM)
        return summand

    def join(self, part: Tensor) -> Tensor:
        """The columns of all ranks (R, n) side by side, on the first one; (0, n) elsewhere."""
        group = self._group
        if group is None:
            return part
        none, part = part.new_empty((0, part.shape[1])), part.contiguous()
        outs = [none] * group.size
        if group.rank == 0:
            outs = [torch.empty_like(part) for _ in range(group.size)]
        parts = [part if rank == 0 else none for rank in range(group.size)]
        group.all_to_all(outs, parts)
        return torch.cat(outs, dim=1)


ALONE = Row()
