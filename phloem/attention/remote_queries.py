"""Queries that travel: each rank attends over its own pages for all who have something there.

A query goes to every rank that owns a page before it, in the model's dtype; what comes back is a
partial result and its log-sum-exp, side by side in fp32. Who owns nothing that a query sees is not
asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phloem.attention.backend import AttentionBackend
from phloem.attention.batch import RaggedBatch
from phloem.attention.held import held_part, join_held
from phloem.attention.own_part import OwnPart
from phloem.attention.remote_pages import RankPool
from phloem.core.group import Group, Pending
from phloem.kernels import merge_partials

__all__ = ["QueryExchange", "QueryPlan", "add_part"]


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

    `own`: over this rank's pages.
    """

    asks: tuple[Tensor, ...]
    bounds: tuple[int, ...]
    served: Any
    own: OwnPart


class _Asked:
    """Queries on their way, as `dtype`. `received` (n, H, D): the others', once it is finished."""

    def __init__(
        self, group: Group[Tensor], q: Tensor, plan: QueryPlan, dtype: torch.dtype
    ) -> None:
        # Native layers have them in fp32: twice the bytes, and more than a bf16 model promises.
        parts = [q.index_select(0, index).to(dtype) for index in plan.asks]
        self.received = parts[0].new_empty((plan.bounds[-1], *q.shape[1:]))
        self._flight = group.begin_all_to_all(_cut(self.received, plan.bounds), parts)

    def finish(self, timeout_s: float | None = None) -> None:
        self._flight.finish(timeout_s)


class QueryExchange:
    """One component's layers, which have no window."""

    def __init__(
        self, backend: AttentionBackend[Any], pool: RankPool, group: Group[Tensor]
    ) -> None:
        self._backend, self._pool, self._group = backend, pool, group

    def plan(self, shares: Sequence[RaggedBatch]) -> QueryPlan:
        pool, mine = self._pool, shares[self._pool.rank]
        device = pool.buffer.data.device
        served, asks, bounds = [], [], [0]
        for rank, share in enumerate(shares):
            here = held_part(share if rank != pool.rank else _NOBODY, pool.is_own, pool.slots)
            served.append(here.batch)
            bounds.append(bounds[-1] + len(here.index))
            there = held_part(
                mine if rank != pool.rank else _NOBODY,
                lambda pages, rank=rank: pool.owners(pages) == rank,  # type: ignore[misc]
                lambda pages: pages,
            )
            asks.append(torch.from_numpy(there.index).to(device))
        own = held_part(mine, pool.is_own, pool.slots)
        return QueryPlan(
            asks=tuple(asks),
            bounds=tuple(bounds),
            served=self._backend.plan(join_held(served, mine.page_size)),
            own=OwnPart.of(self._backend, own, mine.num_tokens, device),
        )

    def fetch(self, layer: int, half: int, plan: QueryPlan) -> None:
        """Nothing travels before the queries are known."""

    def begin(self, layer: int, half: int, q: Tensor, plan: QueryPlan) -> Pending:  # noqa: ARG002
        return _Asked(self._group, self._backend.ask(layer, q), plan, self._pool.buffer.dtype)

    def finish(
        self,
        layer: int,
        half: int,  # noqa: ARG002
        q: Tensor,
        plan: QueryPlan,
        flights: Sequence[Pending],
    ) -> tuple[Tensor, Tensor]:
        out, lse = plan.own.partial(self._backend, layer, q)  # while the others' queries arrive
        (asked,) = flights
        assert isinstance(asked, _Asked), "what `begin` returned"
        asked.finish()
        received = asked.received.to(q.dtype)
        part, part_lse = self._backend.partial_asked(layer, received, plan.served)
        answer = torch.cat((part.float(), part_lse[..., None]), dim=-1)  # (n, H, width + 1)
        shape = answer.shape[1:]
        answers = [answer.new_empty((len(index), *shape)) for index in plan.asks]
        self._group.begin_all_to_all(answers, _cut(answer, plan.bounds)).finish()
        for index, theirs in zip(plan.asks, answers, strict=True):
            add_part(
                out, lse, index, self._backend.answered(layer, theirs[..., :-1]), theirs[..., -1]
            )
        return out, lse


_NOBODY = RaggedBatch((), 1)


def _cut(tensor: Tensor, bounds: Sequence[int]) -> list[Tensor]:
    return [tensor[low:high] for low, high in itertools.pairwise(bounds)]
