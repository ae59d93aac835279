"""Pages that travel: the copies of remote pages that one layer reads, fetched from their owners.

All ranks know from the step plan what each of them needs, so nobody asks: each sends what it owns
of it. What was cached before the step can travel while the layer before computes; what the step
itself writes, after its write. A page travels once per layer to a rank, whatever rows read it.

    staging     | cached, of rank 0 | of rank 1 | ... | written now, of rank 0 | ... | zero page |
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phloem.core.group import Group, Pending
from phloem.kernels import KVBuffer

__all__ = ["HALVES", "Moves", "PageExchange", "PagePlan", "RankPool", "staged_pages"]

_Ints = npt.NDArray[np.int64]

HALVES = 2  # of the staging buffer: one is read while the other one is filled


def staged_pages(num_pages: int) -> int:
    """Pages of a half of the staging buffer that is made for so many: room to grow, and zeros."""
    return num_pages * 5 // 4 + 1


@dataclass(frozen=True, slots=True, eq=False)
class RankPool:
    """The pages of `rank`, of one component: global numbers rank * pages_per_rank ... lie in
    `buffer` from `first_slot` on. `mapped`: those of all other ranks lie there too, where their
    numbers put them."""

    buffer: KVBuffer
    rank: int
    pages_per_rank: int
    first_slot: int = 0
    mapped: bool = False

    def owners(self, pages: _Ints) -> _Ints:
        """The rank that owns each page."""
        return pages // self.pages_per_rank

    def is_own(self, pages: _Ints) -> npt.NDArray[np.bool_]:
        own: npt.NDArray[np.bool_] = self.owners(pages) == self.rank
        return own

    def slots(self, pages: _Ints) -> _Ints:
        """Where pages of this rank, or mapped ones of another, lie in its buffer."""
        return pages - (self.rank * self.pages_per_rank - self.first_slot)


@dataclass(frozen=True, slots=True)
class Moves:
    """`sends[r]`: slots of this rank's pages that rank r gets; what comes from rank r lies in the
    staging buffer from `bounds[r]` to `bounds[r + 1]`."""

    sends: tuple[Tensor, ...]
    bounds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PagePlan:
    """What travels in each layer of a step. `pages` are sorted, staged at `places`."""

    cached: Moves
    written: Moves
    pages: _Ints
    places: _Ints

    def holds(self, pages: _Ints) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = np.isin(pages, self.pages)
        return found

    def staged(self, pages: _Ints) -> _Ints:
        """Where pages lie in the staging buffer; those that are not there: at 0."""
        if not len(self.pages):
            return np.zeros(len(pages), dtype=np.int64)
        at = np.minimum(np.searchsorted(self.pages, pages), len(self.pages) - 1)
        return np.where(self.pages[at] == pages, self.places[at], 0)


class PageExchange:
    """One component's staging buffers, and what fills them."""

    def __init__(self, pool: RankPool, group: Group[Tensor]) -> None:
        self._pool, self._group = pool, group
        self._halves = [self._room(1) for _ in range(HALVES)]

    def plan(self, wanted: Sequence[_Ints], written: _Ints) -> PagePlan:
        """`wanted[r]`: the pages that rank r needs, sorted; `written`: those that this step writes.

        No exchange may be in flight: the staging buffers may grow.
        """
        cached = [np.setdiff1d(pages, written, assume_unique=True) for pages in wanted]
        fresh = [np.intersect1d(pages, written, assume_unique=True) for pages in wanted]
        mine = np.concatenate([cached[self._pool.rank], fresh[self._pool.rank]])
        if len(mine) >= self._halves[0].data.shape[0]:
            self._halves.clear()  # before there are new ones: memory for both is in no bound
            self._halves += [self._room(staged_pages(len(mine))) for _ in range(HALVES)]
        order = np.argsort(mine)
        return PagePlan(
            cached=self._moves(cached, 0),
            written=self._moves(fresh, len(cached[self._pool.rank])),
            pages=mine[order],
            places=order,
        )

    def begin(self, layer: int, half: int, moves: Moves) -> Pending:
        """Send and receive one layer of the pages that `moves` names; into one half."""
        pages = self._pool.buffer.layer(layer)
        parts = [pages.index_select(0, slots) for slots in moves.sends]
        into = self._halves[half].layer(0)
        outs = [into[low:high] for low, high in itertools.pairwise(moves.bounds)]
        return self._group.begin_all_to_all(outs, parts)

    def staging(self, half: int) -> KVBuffer:
        """Pages of one layer; the same in both halves but for what they hold."""
        return self._halves[half]

    def _moves(self, wanted: Sequence[_Ints], start: int) -> Moves:
        pool, ranks = self._pool, range(len(wanted))
        sends = [pool.slots(pages[pool.is_own(pages)]) for pages in wanted]
        owners = pool.owners(wanted[pool.rank])
        counts = [int((owners == rank).sum()) for rank in ranks]
        device = pool.buffer.data.device
        return Moves(
            sends=tuple(torch.from_numpy(slots).to(device) for slots in sends),
            bounds=tuple(int(x) for x in start + np.cumsum([0, *counts])),
        )

    def _room(self, num_pages: int) -> KVBuffer:
        """A half of so many pages, that of zeros among them."""
        buffer = self._pool.buffer
        shape = (num_pages, buffer.num_head_groups, 1, *buffer.data.shape[3:])
        return KVBuffer(buffer.data.new_zeros(shape), buffer.codec)
