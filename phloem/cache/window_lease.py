"""A running request's window pages: only those that it still reads or that others may want.

    page    0 ....... low ............ committed ............ end
    table   | let go  |  the tree's, locked  |  its own        |  not there yet
                         (or its own, where the tree has one)

What is committed joins the tree at once, so that others can branch off near where a request is; it
is locked until the request has moved a window past it. Then it is of use through the tails that
were marked: at the ends of prompt and sequence, where others may branch off, every so many tokens.

A restart lower down computes window state from nothing: what lies before `right_from` is wrong,
serves this request alone and never joins the tree.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from phloem.cache.components import ABSENT
from phloem.cache.node import REF_DTYPE, Node
from phloem.cache.window_eviction import Tail
from phloem.cache.window_ledger import WindowLedger
from phloem.cache.window_match import runs_of
from phloem.core.refs import PageRefs, owners_of

__all__ = ["LeaseStart", "WindowLease"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseStart:
    """How a request begins, in pages.

    It computes from `start` on; nothing is missing up to `committed`; it reads window state from
    `low` on, and that is right from `right_from` on. `ends`: lengths whose tails are wanted.
    """

    start: int
    committed: int
    low: int
    right_from: int
    ends: frozenset[int]


class WindowLease:
    """The window side of a reservation. The arrays that it returns are never written to later."""

    __slots__ = (
        "_ends",
        "_last",
        "_ledger",
        "_load_slots",
        "_loaded",
        "_low",
        "_own",
        "_right_from",
        "_shares",
        "_table",
        "committed",
        "end",
        "start",
        "window_from",
    )

    def __init__(
        self,
        ledger: WindowLedger,
        begin: LeaseStart,
        held: Sequence[int],
        load_slots: Sequence[int] = (),
        *,
        table: PageRefs,
        shares: bool,
    ) -> None:
        """`held`: the tree's pages from `begin.low` on, which this locks.

        Where it says ABSENT, a page of its own is taken, to be filled from the next of the host's
        `load_slots`, on the owner of the page of the full component, which `table` tells.
        """
        self._ledger = ledger
        self._ends = set(begin.ends)
        self._low = begin.low
        self._right_from = begin.right_from
        self.committed = begin.committed
        self.start = begin.start * ledger.page_size
        self.window_from = begin.low * ledger.page_size if begin.right_from else 0
        self._shares = shares
        # Positions: the first one to compute, and the first one that window layers may read.
        self.end = begin.low + len(held)
        self._table = np.full(self.end, ABSENT, REF_DTYPE)
        self._table[begin.low :] = held
        self._own = np.zeros(self.end, np.bool_)
        self._load_slots = array("q", load_slots).tobytes()
        self._loaded = b""
        self._last: Tail | None = None  # the last end that was wanted of this path
        if ABSENT not in held:
            self._last = ledger.tails.want(tuple(held), is_end=True)
        ledger.lock([page for page in held if page != ABSENT])
        if load_slots:
            ledger.hold(self._load_slots)
            self._own[begin.low :] = self._table[begin.low :] == ABSENT
            packed = ledger.allocate(table[: self.end][self._own])
            self._table[self._own] = np.frombuffer(packed, REF_DTYPE)
            self._loaded = packed

    @property
    def refs(self) -> PageRefs:
        """A ref per page up to `end`, ABSENT where there is none (any more); a copy."""
        return self._table[: self.end].copy()

    @property
    def low(self) -> int:
        """The first page that is still held."""
        return self._low

    def own_pages(self) -> list[int]:
        """Refs of those that are not in the tree."""
        own: list[int] = self._table[: self.end][self._own[: self.end]].tolist()
        return own

    def shared_pages(self) -> list[int]:
        """Refs of those that are in the tree, and locked."""
        held = self._table[self._low : self.end]
        shared: list[int] = held[~self._own[self._low : self.end]].tolist()
        return shared

    @property
    def loads(self) -> tuple[bytes, bytes]:
        """Packed refs of the pages that are loaded, and the host slots they are loaded from."""
        return self._loaded, self._load_slots

    def end_load(self) -> None:
        """The load has ended, well or not: let its host slots go."""
        slots, self._load_slots = self._load_slots, b""
        self._loaded = b""
        self._ledger.release(slots)

    def fitting(self, beside: PageRefs) -> int:
        """How many of these of the full component, the next ones, a page could be had for."""
        return self._ledger.fitting(beside)

    def extend(self, beside: PageRefs) -> PageRefs:
        """Take pages of its own beside these of the full component, the next ones.

        Raises NoRoom, and nothing has changed.
        """
        end_page = self.end + len(beside)
        new = np.frombuffer(self._ledger.allocate(beside), REF_DTYPE)
        if end_page > len(self._table):
            self._make_room(end_page + (end_page >> 3) + 8)
        self._table[self.end : end_page] = new
        self._own[self.end : end_page] = True
        self.end = end_page
        return new

    def advance(self, position: int) -> None:
        """The next token to compute is `position`: let go of what neither it nor a tail needs."""
        if self._load_slots:
            return  # the load still writes to what it holds
        config = self._ledger.config
        low = (position - config.tokens + 1) // self._ledger.page_size
        if self._shares:
            low = min(low, self.committed - self._ledger.tail_pages)
        low = min(low, self.end)
        if low > self._low:
            self._let_go(low)

    def commit(self, node: Node, node_end: int, num_pages: int) -> None:
        """The first `num_pages` pages are computed; they lie on the path down to `node`.

        `node_end`: how many pages that path has.
        """
        before, self.committed = self.committed, max(self.committed, num_pages)
        if not self._shares:
            return
        assert num_pages <= self.end, f"{num_pages} pages committed, {self.end} of window state"
        self._join_tree(node, node_end, num_pages)
        self._mark(node, node_end, before, num_pages)

    def close(self, node: Node, node_end: int) -> None:
        """Keep the tail of what is committed, and let go of everything else."""
        if self._shares and self.committed:
            # Where the tree had a page of its own, which has been evicted since.
            self._join_tree(node, node_end, self.committed)
            self._want(node, node_end, (self.committed,), is_end=True)
        self._let_go(self.end)

    def stop_sharing(self) -> None:
        """From now on nothing joins the tree."""
        self._shares = False

    def _join_tree(self, node: Node, node_end: int, num_pages: int) -> None:
        """Own pages before `num_pages` that the tree has no window state of join it."""
        first = max(self._low, self._right_from)
        if not self._own[first:num_pages].any():
            return
        for part, start, stop in _parts(node, node_end, first, num_pages):
            self._attach(part, start, stop, max(first, start), min(num_pages, stop))

    def _attach(self, node: Node, start: int, stop: int, first: int, last: int) -> None:
        """Give own pages `first` ... `last` - 1 to the node, which has pages `start` ... `stop`."""
        places = np.frombuffer(node.extra[0].refs, REF_DTYPE)
        assert len(places) == stop - start, f"{node} has another number of pages"
        missing = self._own[first:last] & (places[first - start : last - start] == ABSENT)
        if self._ledger.num_owners > 1:
            # Another request has committed the page first, on another rank: this one's state of it
            # serves this request alone.
            full = np.frombuffer(node.refs, REF_DTYPE)[first - start : last - start]
            missing &= owners_of(full) == owners_of(self._table[first:last])
        for begin, end in runs_of(missing):
            begin, end = begin + first, end + first
            self._ledger.attach(node, begin - start, self._table[begin:end].tobytes())
            self._own[begin:end] = False

    def _mark(self, node: Node, node_end: int, before: int, num_pages: int) -> None:
        """Say which tails are wanted of the pages that are new."""
        every = self._ledger.config.checkpoint
        if every:
            marks = range((before // every + 1) * every, num_pages + 1, every)
            self._want(node, node_end, marks, is_end=False)
        ends = sorted(end for end in self._ends if end <= num_pages)
        self._ends.difference_update(ends)
        self._want(node, node_end, ends, is_end=True)

    def _want(self, node: Node, node_end: int, ends: Iterable[int], *, is_end: bool) -> None:
        tail = self._ledger.tail_pages
        for end in ends if tail else ():
            first = max(0, end - tail)
            parts = list(_parts(node, node_end, first, end))
            packed = b"".join(
                part.extra[0].refs[8 * (max(first, start) - start) : 8 * (min(end, stop) - start)]
                for part, start, stop in reversed(parts)
            )
            pages = tuple(array("q", packed))
            if ABSENT not in pages:
                before = self._last if is_end else None
                wanted = self._ledger.tails.want(pages, is_end=is_end, before=before)
                self._last = wanted if is_end else self._last

    def _let_go(self, low: int) -> None:
        table, own = self._table[self._low : low], self._own[self._low : low]
        self._ledger.free(table[own].tobytes())
        self._ledger.unlock(table[~own].tolist())
        table[:] = ABSENT
        own[:] = False
        self._low = low

    def _make_room(self, capacity: int) -> None:
        table = np.full(capacity, ABSENT, REF_DTYPE)
        table[: self.end] = self._table[: self.end]
        own = np.zeros(capacity, np.bool_)
        own[: self.end] = self._own[: self.end]
        self._table, self._own = table, own


def _parts(node: Node, node_end: int, first: int, last: int) -> Iterator[tuple[Node, int, int]]:
    """Nodes from `node` upwards that have any of pages `first` ... `last` - 1, and their ranges."""
    step, stop = node, node_end
    while stop > first and first < last:
        start = stop - step.num_pages
        if start < last:
            yield step, start, stop
        assert step.parent is not None, f"there are not so many pages above {node}"
        step, stop = step.parent, start
