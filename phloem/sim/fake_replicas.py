"""Replicas of pages as all ranks of a `FakeWorker` see them: whoever reads one must find its page.

A replica is whole only at the end of the step that makes it, and holds poison until then; a plan
that has it read earlier, or after its page or its slot has got another content, shows.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from phloem.core.plan import ReplicaPlan
from phloem.core.refs import PageRefs, flat_slots

__all__ = ["FakeReplicas"]

_Ints = npt.NDArray[np.int64]


class FakeReplicas:
    """Over the cells (pages, page_size) of all owners, `num_pages` each, which it does not own."""

    def __init__(self, cells: _Ints, num_pages: int, poison: int) -> None:
        self._cells, self._num_pages, self._poison = cells, num_pages, poison
        self._read: dict[tuple[int, int], int] = {}  # (rank, page) -> what is read in its stead
        self._made = self._cells[:0]  # what the pages that the step copies hold before it
        self.num_reads = 0  # of a replica, by a rank for a row in a step

    @property
    def any(self) -> bool:
        """Whether anybody reads a replica."""
        return bool(self._read)

    def begin(self, changes: ReplicaPlan | None) -> None:
        """What is read in a step, before it."""
        if changes is None:
            return
        for page, copy in self._pairs(changes.gone, changes.gone_at):
            assert self._read.pop((self._rank(copy), page)) == copy, f"{copy} was not read"
        for page, copy in self._pairs(changes.ready, changes.ready_at):
            key = self._rank(copy), page
            assert key not in self._read, f"rank {key[0]} reads another replica of page {page}"
            self._read[key] = copy
        self._made = self._cells[self._flat(changes.made)]
        self._cells[self._flat(changes.made_at)] = self._poison

    def end(self, changes: ReplicaPlan | None) -> None:
        """What a step has made, of pages that are whole all the while: it may copy at any time."""
        if changes is not None:
            pages = self._cells[self._flat(changes.made)]
            assert np.array_equal(pages, self._made), "a page changes while it is copied"
            self._cells[self._flat(changes.made_at)] = pages

    def fault(self, ranks: Iterable[int], pages: Iterable[int]) -> str | None:
        """What is wrong with what these ranks read of these pages."""
        for rank in ranks:
            for page in pages:
                copy = self._read.get((rank, page))
                if copy is None:
                    continue
                self.num_reads += 1
                if not np.array_equal(self._cells[copy], self._cells[page]):
                    return f"rank {rank} reads replica {copy}, which is not page {page}"
        return None

    def _pairs(self, refs: PageRefs, at: PageRefs) -> Iterable[tuple[int, int]]:
        return zip(self._flat(refs).tolist(), self._flat(at).tolist(), strict=True)

    def _flat(self, refs: PageRefs) -> _Ints:
        return flat_slots(refs, self._num_pages)

    def _rank(self, page: int) -> int:
        return page // self._num_pages
