"""Queries that travel: each rank attends over its own pages for all who have something there.

A query goes to every rank that owns a page before it, in the model's dtype; what comes back is a
partial result and its log-sum-exp, side by side in fp32. Who owns nothing that a query sees is not
asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phloem.attention.backend import AttentionBackend
from phloem.attention.batch import RaggedBatch
from phloem.attention.held import held_part, join_held
from phloem.attention.remote_pages import RankPool
from phloem.core.group import Group
from phloem.kernels import merge_partials

__all__ = ["QueryExchange", "QueryPlan", "add_part"]

_Ints = npt.NDArray[np.int64]
IsAsked: TypeAlias = Callable[[_Ints], npt.NDArray[np.bool_]]


def add_part(out: Tensor, lse: Tensor, index: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention over further keys of the tokens `index` (n,) into out (N, H, D), lse (N, H),
    in place."""
    if not len(index):
        return
    have, have_lse = out.index_select(0, index), lse.index_select(0, index)
    both, both_lse = merge_partials(have, have_lse, part.to(out.dtype), part_lse)
    out.index_copy_(0, index, both)
    lse.index_copy_(0, index, both_lse)


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """`asks[r]`: this rank's tokens whose queries rank r gets; `bounds`: those of rank r are
    bounds[r] ... bounds[r + 1] - 1 of what this rank computes for others, by the plan `served`.
    """

    asks: tuple[Tensor, ...]
    bounds: tuple[int, ...]
    served: Any


class _Asked:
    """Queries on their way, as `dtype`. `received` (n, H, D): the others', once it is finished."""

    def __init__(
        self, group: Group[Tensor], q: Tensor, plan: QueryPlan, dtype: torch.dtype
    ) -> None:
        # Native layers have them in fp32: twice the bytes, and more than a bf16 model promises.
        parts = [q.index_select(0, index).to(dtype) for index in plan.asks]
        self.received = parts[0].new_empty((plan.bounds[-1], *q.shape[1:]))
        self._flight = group.begin_all_to_all(_cut(self.received, plan.bounds), parts)

    def finish(self) -> Tensor:
        self._flight.finish()
        return self.received


class _Answers:
    """Partial results on their way back. `parts[r]` (n, H, D + 1): rank r's, with their LSE last,
    once the flight is finished."""

    def __init__(self, group: Group[Tensor], answer: Tensor, plan: QueryPlan) -> None:
        shape = answer.shape[1:]
        self._asks = plan.asks
        self._parts = [answer.new_empty((len(index), *shape)) for index in plan.asks]
        self._flight = group.begin_all_to_all(self._parts, _cut(answer, plan.bounds))

    def finish(self) -> list[tuple[Tensor, Tensor]]:
        """Of each rank, the tokens that had asked it and what it says."""
        self._flight.finish()
        return list(zip(self._asks, self._parts, strict=True))


class QueryExchange:
    """One component's layers, which have no window."""

    def __init__(
        self, backend: AttentionBackend[Any], pool: RankPool, group: Group[Tensor]
    ) -> None:
        self._backend, self._pool, self._group = backend, pool, group

    def plan(self, shares: Sequence[RaggedBatch], is_asked: IsAsked) -> QueryPlan:
        """`is_asked` (n,) of global page numbers: those that are attended to at their owners."""
        pool, mine = self._pool, shares[self._pool.rank]
        device = pool.buffer.data.device

        def is_served(pages: _Ints) -> npt.NDArray[np.bool_]:
            return pool.is_own(pages) & is_asked(pages)

        served, asks, bounds = [], [], [0]
        for rank, share in enumerate(shares):
            here = held_part(share if rank != pool.rank else _NOBODY, is_served, pool.slots)
            served.append(here.batch)
            bounds.append(bounds[-1] + len(here.index))
            there = held_part(
                mine if rank != pool.rank else _NOBODY,
                lambda pages, rank=rank: (pool.owners(pages) == rank) & is_asked(pages),  # type: ignore[misc]
                lambda pages: pages,
            )
            asks.append(torch.from_numpy(there.index).to(device))
        return QueryPlan(
            asks=tuple(asks),
            bounds=tuple(bounds),
            served=self._backend.plan(join_held(served, mine.page_size)),
        )

    def begin(self, layer: int, q: Tensor, plan: QueryPlan) -> _Asked:
        """Send queries q (N, H, D), of all tokens of this rank, to those that are asked."""
        return _Asked(self._group, self._backend.ask(layer, q), plan, self._pool.buffer.dtype)

    def answer(self, layer: int, plan: QueryPlan, asked: _Asked, dtype: torch.dtype) -> _Answers:
        """Wait for the others' queries, compute them as `dtype`, and send the results back."""
        received = asked.finish().to(dtype)
        part, lse = self._backend.partial_asked(layer, received, plan.served)
        answer = torch.cat((part.float(), lse[..., None]), dim=-1)  # (n, H, width + 1)
        return _Answers(self._group, answer, plan)

    def merge_into(self, out: Tensor, lse: Tensor, layer: int, answers: _Answers) -> None:
        """Wait for the results, and add them to what their queries have found elsewhere."""
        for index, theirs in answers.finish():
            part = self._backend.answered(layer, theirs[..., :-1])
            add_part(out, lse, index, part, theirs[..., -1])


_NOBODY = RaggedBatch((), 1)


def _cut(tensor: Tensor, bounds: Sequence[int]) -> list[Tensor]:
    return [tensor[low:high] for low, high in itertools.pairwise(bounds)]
