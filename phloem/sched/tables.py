"""Rows and page tables as the worker sees them: only changes are sent, with the next plan."""

from __future__ import annotations

from phloem.core.plan import PageTableUpdate, RowInit
from phloem.core.refs import PageRefs

__all__ = ["RowTables"]


class RowTables:
    """Gives out rows and collects what the next plan must tell the worker about them."""

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows - 1, -1, -1))  # the lowest free row is given first
        self._admitted: dict[int, RowInit] = {}
        self._updates: list[PageTableUpdate] = []
        self._released: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take_row(self) -> int:
        """A free row; there must be one."""
        return self._free.pop()

    def start(self, init: RowInit, refs: PageRefs) -> None:
        """The row has a new tenant with this page table."""
        self._admitted[init.row] = init
        self.update(init.row, 0, refs)

    def update(self, row: int, first_page: int, refs: PageRefs, *, component: int = 0) -> None:
        """Pages from `first_page` on are now `refs`, which nobody writes to any more."""
        self._updates.append(
            PageTableUpdate(row=row, first_page=first_page, refs=refs, component=component)
        )

    def release(self, row: int) -> None:
        """The tenant has left. What no plan has told of it yet is never told."""
        self._free.append(row)
        if self._admitted.pop(row, None) is None:
            self._released.append(row)
        self._updates = [update for update in self._updates if update.row != row]

    def take_changes(
        self,
    ) -> tuple[tuple[RowInit, ...], tuple[PageTableUpdate, ...], tuple[int, ...]]:
        """(admitted, table_updates, released) since the last call."""
        changes = tuple(self._admitted.values()), tuple(self._updates), tuple(self._released)
        self._admitted, self._updates, self._released = {}, [], []
        return changes
