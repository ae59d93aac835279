"""The leader's window side: allocates, evicts, and writes the commands of the window component."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import cast

import numpy as np

from phloem.cache.components import ABSENT
from phloem.cache.node import REF_BYTES, Node
from phloem.cache.placement import take_shares
from phloem.cache.state import CacheState
from phloem.cache.window import WindowConfig
from phloem.cache.window_eviction import Tails, path_end
from phloem.cache.window_state import alive
from phloem.core.errors import NoRoom
from phloem.core.refs import PageRefs, owners_of
from phloem.core.stats import WindowStats
from phloem.core.tokens import TOKEN_BYTES
from phloem.replica import CommandLog, window_commands

__all__ = ["WindowLedger"]


class WindowLedger:
    """Decides evictions of window state. One per leader whose model has windows."""

    __slots__ = (
        "_freed",
        "_log",
        "_record_freed",
        "config",
        "evicted_pages",
        "num_owners",
        "page_size",
        "state",
        "tail_pages",
        "tails",
    )

    def __init__(
        self,
        state: CacheState,
        log: CommandLog,
        config: WindowConfig,
        record_freed: bool,
    ) -> None:
        assert state.window is not None, "the state has no windows"
        self.state = state.window
        self.config = config
        self.page_size = state.tree.page_bytes // TOKEN_BYTES
        self.tail_pages = config.tail_pages(self.page_size)
        self.tails = Tails(self.state)
        self.evicted_pages = 0
        self.num_owners = len(self.state.allocators)
        self._log = log
        self._record_freed = record_freed
        self._freed: list[bytes] = []

    @property
    def total_pages(self) -> int:
        return sum(allocator.capacity for allocator in self.state.allocators)

    @property
    def free_pages(self) -> int:
        return self.state.free_pages

    @property
    def evictable_pages(self) -> int:
        """Pages in the tree that nobody locks: all of them can be had."""
        return len(self.state.home) - len(self.state.locks)

    @property
    def room(self) -> list[int]:
        """Pages that could be had now, of each owner."""
        idle = self.state.idle_pages
        return [a.num_free + idle[a.owner] for a in self.state.allocators]

    def allocate(self, beside: PageRefs) -> bytes:
        """Take a page beside each of these of the full component, on its owner; packed.

        Evicts what is missing there. Raises NoRoom and changes nothing else.
        """
        owners: list[int] = []
        needs = [len(beside)]
        if self.num_owners > 1:
            owners = owners_of(beside).tolist()
            needs = [owners.count(owner) for owner in range(self.num_owners)]
        victims: list[int] = []
        for allocator, need in zip(self.state.allocators, needs, strict=True):
            idle = self.state.idle_pages[allocator.owner]
            if need > allocator.num_free + idle:
                raise NoRoom(
                    f"{need} window pages asked of owner {allocator.owner}, {allocator.num_free} "
                    f"free and {idle} evictable"
                )
        for allocator, need in zip(self.state.allocators, needs, strict=True):
            if need > allocator.num_free:
                victims += self.tails.victims(need - allocator.num_free, allocator.owner)
        if victims:
            self._drop(victims)
        return take_shares(owners, self._take) if owners else self._take(0, len(beside))

    def fitting(self, beside: PageRefs) -> int:
        """How many of these of the full component, from the first on, `allocate` has room for."""
        limit, room = len(beside), self.room
        if self.num_owners == 1:
            return min(limit, room[0])
        owners = owners_of(beside)
        for owner, pages in enumerate(room):
            own = np.flatnonzero(owners == owner)
            if len(own) > pages:
                limit = min(limit, int(own[pages]))
        return limit

    def _take(self, owner: int, num_pages: int) -> bytes:
        return cast(bytes, self._log.append(window_commands.window_alloc(owner, num_pages)))

    def free(self, refs: bytes) -> None:
        """Give back pages that are not in the tree."""
        if refs:
            self._log.append(window_commands.window_free(refs))
            self._note_freed(refs)

    def attach(self, node: Node, first_page: int, refs: bytes) -> None:
        """A request's own pages revive tombstones, from the node's `first_page` on; locked."""
        self._log.append(window_commands.window_attach(node.id, first_page, refs))

    def lock(self, pages: Sequence[int]) -> None:
        """Keep pages of the tree from eviction."""
        if pages:
            self._log.append(window_commands.window_lock(array("q", pages).tobytes()))
            self.tails.locked(pages)

    def unlock(self, pages: Sequence[int]) -> None:
        """Undo one `lock`, or an `attach`."""
        if not pages:
            return
        packed = array("q", pages).tobytes()
        idle = cast("list[int]", self._log.append(window_commands.window_unlock(packed)))
        self.tails.unlocked(idle)
        lost = [page for page in idle if self.state.home[page].detached]
        if lost:  # of a tree that was flushed: nobody can ever find them
            self._evict(lost)

    def hold(self, slots: bytes) -> None:
        """Keep host slots from being used again while they are read or written."""
        if slots:
            self._log.append(window_commands.window_host_hold(slots))

    def release(self, slots: bytes) -> None:
        """Undo one `hold`."""
        if slots:
            self._log.append(window_commands.window_host_release(slots))

    def evict(self, num_pages: int) -> int:
        """Evict up to `num_pages` unlocked pages; returns how many."""
        victims = self.tails.victims(num_pages)
        if victims:
            self._drop(victims)
        return len(victims)

    def _drop(self, victims: list[int]) -> None:
        self.evicted_pages += len(victims)
        packed = array("q", victims).tobytes()
        self._log.append(window_commands.window_evict(packed))
        self._note_freed(packed)

    def forget(self) -> None:
        """Drop all that nobody locks, uncounted, and every tail: a flush."""
        before = self.evicted_pages
        self.tails.forget()
        self.evict(self.evictable_pages)
        self.evicted_pages = before

    def leave(self, victims: list[tuple[Node, int]]) -> list[tuple[Node, Node | None]]:
        """Last pages of nodes are about to leave the device: their window state goes with them.

        Returns the nodes and their parents, for `turn_back` afterwards.
        """
        for node, num_pages in victims:
            refs = node.extra[0].refs
            gone = alive(refs[len(refs) - num_pages * REF_BYTES :])
            if gone:
                self.tails.gone(gone)
                self._note_freed(array("q", gone).tobytes())
        return [(node, node.parent) for node, _ in victims]

    def turn_back(self, ends: list[tuple[Node, Node | None]]) -> None:
        """They have left: what they hung on, or what is left of them, may be a leaf now."""
        for node, parent in ends:
            is_here = node.parent is not None and node.refs
            end = node if is_here else node.parent or parent
            page = ABSENT if end is None else path_end(end)
            if page != ABSENT:
                self.tails.turn_back(page)

    def stats(self) -> WindowStats:
        """A snapshot of all counters."""
        return WindowStats(
            tokens=self.config.tokens,
            layers=self.config.layers,
            checkpoint_pages=self.config.checkpoint,
            total_pages=self.total_pages,
            free_pages=self.free_pages,
            evictable_pages=self.evictable_pages,
            locked_pages=self.total_pages - self.free_pages - self.evictable_pages,
            evicted_pages_total=self.evicted_pages,
        )

    def take_freed(self) -> bytes:
        """Packed refs of all window pages freed since the last call, if they are recorded."""
        freed = b"".join(self._freed)
        self._freed.clear()
        return freed

    def _evict(self, pages: list[int]) -> None:
        self.tails.gone(pages)
        packed = array("q", pages).tobytes()
        self._log.append(window_commands.window_evict(packed))
        self._note_freed(packed)

    def _note_freed(self, refs: bytes) -> None:
        if self._record_freed:
            self._freed.append(refs)
