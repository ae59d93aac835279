"""Replicas of hot pages: which copy of a page each rank reads, and how a rank comes by its own.

    page tables, and who computes what     name the page itself
    what rank r reads                      r's replica, where a plan has said that it is ready

Every rank knows of all of them from the plans, since where pages or queries travel each one plans
for all: what a rank has a replica of travels to it no more, and is asked of no other.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phloem.attention.remote_pages import RankPool
from phloem.core.group import Group
from phloem.core.plan import ReplicaPlan, StepPlan
from phloem.core.refs import PageRefs, flat_slots
from phloem.core.remote import Remote

__all__ = ["NearestPages"]

_Ints = npt.NDArray[np.int64]


def _nothing() -> None:
    """No copy is on its way."""


class NearestPages:
    """Of one component. `pool`: this rank's pages; the others' too, where steps read in place."""

    def __init__(self, pool: RankPool, num_ranks: int, group: Group[Tensor] | None) -> None:
        self._pool, self._num_ranks, self._group = pool, num_ranks, group
        # (ranks, pages): what each rank reads in a page's stead. Made when it is first needed.
        self._nearest: npt.NDArray[np.int32] | None = None

    def read_by(self, rank: int, pages: _Ints) -> _Ints:
        """Global numbers of what `rank` reads of these pages."""
        if self._nearest is None:
            return pages
        nearest: _Ints = self._nearest[rank, pages].astype(np.int64)
        return nearest

    def apply(self, changes: ReplicaPlan | None) -> None:
        """Take over what a plan says of replicas that there are."""
        if changes is None or not (len(changes.ready) or len(changes.gone)):
            return
        if self._nearest is None:
            pages = np.arange(self._num_ranks * self._pool.pages_per_rank, dtype=np.int32)
            self._nearest = np.tile(pages, (self._num_ranks, 1))
        gone, gone_at = self._flat(changes.gone), self._flat(changes.gone_at)
        self._nearest[self._pool.owners(gone_at), gone] = gone
        ready, ready_at = self._flat(changes.ready), self._flat(changes.ready_at)
        self._nearest[self._pool.owners(ready_at), ready] = ready_at

    def begin(self, plan: StepPlan) -> Callable[[], None]:
        """Copy the pages that this step makes replicas of; done when what is returned has been
        called. All ranks have finished the step before, so nobody reads what is written here.

        Whole pages, over memory that is mapped or, where pages travel, over the group: then every
        rank must call it.
        """
        changes = plan.replicas
        if changes is None or not len(changes.made):
            return _nothing
        pages, copies = self._flat(changes.made), self._flat(changes.made_at)
        if plan.remote.cached is Remote.DIRECT:  # all pools are mapped
            mine = self._pool.is_own(copies)
            self._copy(pages[mine], copies[mine])
            return _nothing
        return self._exchange(pages, copies)

    def _copy(self, pages: _Ints, copies: _Ints) -> None:
        data, pool = self._pool.buffer.data, self._pool
        pairs = zip(pool.slots(copies).tolist(), pool.slots(pages).tolist(), strict=True)
        for to, source in pairs:
            data[to].copy_(data[source])

    def _exchange(self, pages: _Ints, copies: _Ints) -> Callable[[], None]:
        group, pool, data = self._group, self._pool, self._pool.buffer.data
        assert group is not None, "pages cannot travel: this rank is in no group"
        senders, receivers = pool.owners(pages), pool.owners(copies)
        parts, outs, places = [], [], []
        for rank in range(self._num_ranks):
            sent = pages[(senders == pool.rank) & (receivers == rank)]
            parts.append(data.index_select(0, self._slots(sent)))
            kept = copies[(senders == rank) & (receivers == pool.rank)]
            outs.append(data.new_empty((len(kept), *data.shape[1:])))
            places.append(self._slots(kept))
        flight = group.begin_all_to_all(outs, parts)

        def finish() -> None:
            flight.finish()
            for place, out in zip(places, outs, strict=True):
                data.index_copy_(0, place, out)

        return finish

    def _slots(self, pages: _Ints) -> Tensor:
        return torch.from_numpy(self._pool.slots(pages)).to(self._pool.buffer.data.device)

    def _flat(self, refs: PageRefs) -> _Ints:
        return flat_slots(refs, self._pool.pages_per_rank)
