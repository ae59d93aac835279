"""A running request's pages: locked on the cached side, owned on the computed side.

page   0 ........ num_shared .............. num_pages
       |-- in the tree --|-- this request's own --|
          locked             freed at close
                             committed pages move to the left side, where sharing is on

The first of its own pages may be filled by a load from the host: then close lets go of nothing
until `end_load`, because the load still writes to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from phloem.cache.node import REF_BYTES, REF_DTYPE, Node
from phloem.core.errors import NoRoom
from phloem.core.refs import NO_REFS, PageRefs, owner_of

if TYPE_CHECKING:
    from phloem.cache.leader import Leader
    from phloem.cache.window_lease import WindowLease

__all__ = ["PagesChanged", "Reservation"]


@dataclass(frozen=True, slots=True)
class PagesChanged:
    """From now on the table's pages from `first_page` on are `refs` (n,)."""

    first_page: int
    refs: PageRefs


class Reservation:
    """A handle on a page table; leaving its `with` block closes it.

    Arrays that `refs` has returned are never written to later: a change makes a new table.
    """

    __slots__ = (
        "_end",
        "_leader",
        "_load_slots",
        "_namespace",
        "_node",
        "_shares",
        "_table",
        "closed",
        "num_cached_pages",
        "num_committed_pages",
        "num_pages",
        "num_shared_pages",
        "start",
        "window",
    )

    def __init__(
        self,
        leader: Leader,
        namespace: bytes,
        node: Node,
        table: PageRefs,
        num_cached_pages: int,
        shares: bool,
        load_slots: bytes = b"",
        window: WindowLease | None = None,
    ) -> None:
        self._leader = leader
        self._namespace = namespace
        self._node = node  # the end of what is locked
        self._shares = shares
        self._load_slots = load_slots  # held on the host while pages are loaded from them
        self._table = table  # read-only if exactly num_pages long, else it has room at its end
        self.num_pages = len(table)
        self.num_cached_pages = num_cached_pages  # when it was reserved; never changes
        self.num_committed_pages = num_cached_pages
        self.num_shared_pages = num_cached_pages  # in the tree; later pages are this request's own
        # The first position to compute once what is loaded has arrived.
        self.start = (num_cached_pages + self.num_loading_pages) * leader.page_size
        self.window = window  # of models with windows
        if window is not None:
            self.start = window.start
            self.num_committed_pages = window.committed
        self.closed = False
        self._end = -1
        if len(leader.ends) > 1:
            self._enter()

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def refs(self) -> PageRefs:
        """The page table, int64 (num_pages,), read-only."""
        table = self._table
        if len(table) == self.num_pages:
            return table
        view = table[: self.num_pages]
        view.setflags(write=False)
        return view

    @property
    def node(self) -> Node:
        """The node that the lock ends at (the root: nothing is locked)."""
        return self._node

    @property
    def leader(self) -> Leader:
        """Whose commands this reservation issues."""
        return self._leader

    @property
    def write_from(self) -> int:
        """The first position whose full state is written: before it, it is others' and only read.

        Beyond `start` after a restart lower down alone.
        """
        return max(self.start, self.num_cached_pages * self._leader.page_size)

    @property
    def window_from(self) -> int:
        """The first position of which there is window state; beyond 0 after a restart alone."""
        return 0 if self.window is None else self.window.window_from

    @property
    def window_refs(self) -> PageRefs:
        """The window table, int64 (pages,) up to where it goes, ABSENT where nothing is held."""
        return NO_REFS if self.window is None else self.window.refs

    def window_extend(self, end_page: int) -> PagesChanged | None:
        """Window pages beside all pages before `end_page`, each on its owner; says which are new.

        Raises NoRoom, and nothing has changed.
        """
        assert not self.closed, "the reservation is closed"
        window = self.window
        if window is None or end_page <= window.end:
            return None
        assert end_page <= self.num_pages, "window state of pages that are not there"
        first = window.end
        return PagesChanged(first, window.extend(self._table[first:end_page]))

    def window_fitting(self, num_pages: int) -> int:
        """How many of the next `num_pages` pages, at most, window state could be had for now."""
        window = self.window
        if window is None:
            return 0
        return window.fitting(self._table[window.end : min(window.end + num_pages, self.num_pages)])

    def window_advance(self, position: int) -> None:
        """The next token to compute is `position`, and no step in flight reads below its window.

        Lets go of window pages that are not needed any more.
        """
        if self.window is not None:
            self.window.advance(position)

    @property
    def load_slots(self) -> bytes:
        """Host slots that the pages right after the cached ones are loaded from; b"": no load."""
        return self._load_slots

    @property
    def num_loading_pages(self) -> int:
        return len(self._load_slots) // REF_BYTES

    @property
    def window_loads(self) -> tuple[bytes, bytes]:
        """Packed refs of own window pages that a load fills, and the host slots it reads."""
        return (b"", b"") if self.window is None else self.window.loads

    @property
    def is_loading(self) -> bool:
        """A load fills pages of this reservation, until `end_load`."""
        return bool(self._load_slots or self.window_loads[1])

    def end_load(self) -> None:
        """The load has ended, well or not: let its host slots go."""
        slots, self._load_slots = self._load_slots, b""
        self._leader.host.release(slots)
        if self.window is not None:
            self.window.end_load()
        if self.closed:
            self._let_go()

    def extend(self, num_pages: int) -> None:
        """Add pages at the end, evicting others' if needed. Raises NoRoom, and nothing changed."""
        assert not self.closed, "the reservation is closed"
        if num_pages <= 0:
            return
        last = self._end if self._end >= 0 else None
        self._leave()
        try:
            packed = self._leader.allocate(num_pages, last)
        except NoRoom:
            self._enter()
            raise
        old, new = self.num_pages, self.num_pages + num_pages
        if new >= len(self._table):
            self._move_table(new + (new >> 3) + 8)
        self._table[old:new] = np.frombuffer(packed, REF_DTYPE)
        self.num_pages = new
        self._enter()

    def commit(self, tokens: bytes) -> PagesChanged | None:
        """The KV of all full pages of `tokens` is computed: let others find it.

        `tokens` are all tokens from the start of the prompt on. Pages that another request has
        committed first replace this request's own, which are freed; the answer then says which
        pages of the table changed.
        """
        assert not self.closed, "the reservation is closed"
        tree = self._leader.tree
        target = len(tokens) // tree.page_bytes
        assert target <= self.num_pages, f"{target} pages committed of {self.num_pages}"
        if target <= self.num_committed_pages:
            return None
        self.num_committed_pages = target
        if not self._shares:
            return None
        changed = self._share(tokens, target) if target > self.num_shared_pages else None
        if self.window is not None:
            self.window.commit(self._node, self.num_shared_pages, target)
        return changed

    def close(self) -> None:
        """Give up locks, and the pages that are not in the tree. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        if self._end >= 0:
            self._leave()
        if not self.is_loading:
            self._let_go()

    def _enter(self) -> None:
        """Count as one that computes on the rank that has its last page."""
        if len(self._leader.ends) > 1 and self.num_pages:
            self._end = owner_of(int(self._table[self.num_pages - 1]))
            self._leader.ends[self._end] += 1

    def _leave(self) -> None:
        if self._end >= 0:
            self._leader.ends[self._end] -= 1
            self._end = -1

    def _let_go(self) -> None:
        leader = self._leader
        if self.window is not None:
            self.window.close(self._node, self.num_shared_pages)
        if self.num_shared_pages < self.num_pages:
            leader.free(self._table[self.num_shared_pages : self.num_pages].tobytes())
        if self.num_shared_pages:
            leader.unlock(self._node)
        leader.reservations.discard(self)

    def stop_sharing(self) -> None:
        """From now on commit nothing to the tree (what it holds was flushed)."""
        self._shares = False
        if self.window is not None:
            self.window.stop_sharing()

    def _share(self, tokens: bytes, target: int) -> PagesChanged | None:
        leader = self._leader
        tree, page_bytes = leader.tree, leader.tree.page_bytes
        first, node = self.num_shared_pages, self._node
        offset, end = first * page_bytes, target * page_bytes
        assert tokens.startswith(node.key[-page_bytes:], max(0, offset - page_bytes)), (
            "tokens differ from those committed before"
        )
        canonical: list[bytes] = []
        while offset < end:
            child = tree.child_of(node, self._namespace, tokens, offset)
            if child is None:
                break
            pages = tree.common_pages(child.key, tokens, offset, end)
            if pages < child.num_pages:
                child = leader.split(child, pages)
            if not child.refs:
                break
            canonical.append(child.refs)
            offset += pages * page_bytes
            node = child
        changed = None
        if canonical:
            leader.lock(node, self._node)
            changed = self._repoint(first, b"".join(canonical))
        if offset < end and leader.tree.host_pages:
            node, offset = self._adopt(node, tokens, offset, end)
        if offset < end:
            refs = self._table[offset // page_bytes : target].tobytes()
            node = leader.grow(node, self._namespace, tokens[offset:end], refs)
        self._node = node
        self.num_shared_pages = target
        return changed

    def _adopt(self, node: Node, tokens: bytes, offset: int, end: int) -> tuple[Node, int]:
        """Give pages that are on the host alone this request's own as device pages."""
        leader = self._leader
        tree, page_bytes = leader.tree, leader.tree.page_bytes
        while offset < end:
            child = tree.child_of(node, self._namespace, tokens, offset)
            if child is None:
                break
            pages = tree.common_pages(child.key, tokens, offset, end)
            if pages < child.num_pages:
                child = leader.split(child, pages)
            first = offset // page_bytes
            leader.adopt(child, self._table[first : first + pages].tobytes())
            offset += pages * page_bytes
            node = child
        return node, offset

    def _repoint(self, first: int, packed: bytes) -> PagesChanged:
        stop = first + len(packed) // REF_BYTES
        refs = np.frombuffer(packed, REF_DTYPE)
        self._leader.free(self._table[first:stop].tobytes())
        self._move_table(self.num_pages + 8)  # who holds the old one keeps what it read
        self._table[first:stop] = refs
        if self._end >= 0:
            self._leave()
            self._enter()
        return PagesChanged(first, refs)

    def _move_table(self, capacity: int) -> None:
        table = np.empty(capacity, REF_DTYPE)
        table[: self.num_pages] = self._table[: self.num_pages]
        self._table = table
