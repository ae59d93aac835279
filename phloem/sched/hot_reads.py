"""Tells the cache which pages of others each rank reads, so that hot ones may get replicas.

A chunk counts when it is planned. A row that decodes counts when it begins a page, for all the
tokens that it is to compute there: what is read changes little meanwhile, and looking at all pages
of all rows in every step would cost more than a step's plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from phloem.core.plan import ReplicaPlan, RowPlan
from phloem.core.refs import owner_of, owners_of
from phloem.sched.running import RunningSet

if TYPE_CHECKING:
    from phloem.cache import PrefixCache

__all__ = ["HotReads"]


class HotReads:
    """Asks for what a step's plan says of replicas; nothing where the cache keeps none."""

    def __init__(self, cache: PrefixCache, running: RunningSet) -> None:
        self._cache, self._running = cache, running
        self._page_size = cache.page_size
        # By serial of a row that decodes: the page that it is in, reads that a step is served.
        self._decoding: dict[int, tuple[int, int]] = {}

    def plan(self, step: int, rows: Iterable[RowPlan]) -> ReplicaPlan | None:
        """What the plan of `step` over `rows` says of replicas; after all else was decided."""
        ledger = self._cache.leader.replicas
        if ledger is None:
            return None
        before, self._decoding = self._decoding, {}
        for row in rows:
            page = row.start // self._page_size
            if row.count > 1:
                ledger.served_pages += self._read(row, page, times=1)
                continue
            known = before.get(row.serial)
            if known is None or known[0] != page:
                left = self._page_size - row.start % self._page_size
                known = page, self._read(row, page, times=left)
            self._decoding[row.serial] = known
            ledger.served_pages += known[1]
        return ledger.plan(step)

    def finished(self, step: int) -> None:
        """All ranks have finished `step`."""
        ledger = self._cache.leader.replicas
        if ledger is not None:
            ledger.finished(step)

    def _read(self, row: RowPlan, page: int, *, times: int) -> int:
        ledger, request = self._cache.leader.replicas, self._running.get(row.serial)
        if ledger is None or request is None or request.reservation is None:
            return 0
        table, in_tree = request.reservation.refs, request.reservation.num_shared_pages
        if not in_tree:
            return 0
        owners: Sequence[int] = (owner_of(int(table[page])),)
        if row.count > 1:
            end = -(-(row.start + row.count) // self._page_size)
            owners = np.unique(owners_of(table[page:end])).tolist()
        return ledger.read(owners, table[:in_tree], times)
