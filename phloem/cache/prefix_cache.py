"""The prefix cache as the scheduler sees it: match, reserve, commit, abort, evict.

match(tokens) --> Match --reserve--> Reservation --commit--> ... --close-->
 (asks)                 (locks, allocates)     (tree grows)      (unlocks, frees)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from phloem.cache.eviction import make_eviction_policy
from phloem.cache.ghosts import Ghosts
from phloem.cache.host_ledger import HostTier
from phloem.cache.leader import Leader
from phloem.cache.match import Match
from phloem.cache.node import REF_BYTES, REF_DTYPE
from phloem.cache.placement import Replicate, make_placement, placed_pools
from phloem.cache.replica_policy import ReplicaConfig
from phloem.cache.reservation import Reservation
from phloem.cache.state import CacheState
from phloem.cache.window import WindowConfig
from phloem.cache.window_admission import WindowAdmission, plan_admission
from phloem.cache.window_match import WindowMatch
from phloem.core.errors import ConfigError, NoRoom
from phloem.core.refs import NO_REFS, PageRefs
from phloem.core.stats import CacheStats, WindowStats

__all__ = ["PrefixCache"]

MAX_GHOSTS = 1 << 16
MAX_OWNERS = 64  # of replicas: a bit each
NO_HOST = HostTier()


class PrefixCache:
    """Pages of all requests, past and running, by their tokens.

    Every change is a command in `leader.log`; `state` is what a follower has a copy of.

    `num_pages`: those of each rank's pool; `placement` says which rank owns which page (see
    `cache.placement`). `self.num_pages` are the pools that pages are taken from, in order of their
    owners: with `replicates` a single one, of which each of `num_ranks` ranks holds a copy.
    """

    def __init__(
        self,
        *,
        page_size: int,
        num_pages: tuple[int, ...],
        host: HostTier = NO_HOST,
        placement: str = "striped",
        eviction: str = "lru",
        enabled: bool = True,
        record_freed: bool = False,
        window: WindowConfig | None = None,
    ) -> None:
        if page_size < 1:
            raise ConfigError(f"page_size must be at least 1, got {page_size}")
        if not num_pages or min(num_pages) < 1:
            raise ConfigError(f"num_pages must be at least 1 for each rank, got {num_pages}")
        if window is not None and len(window.pages) != len(num_pages):
            raise ConfigError(f"{len(num_pages)} owners of pages, {len(window.pages)} of windows")
        policy = make_placement(placement)
        self.num_ranks = len(num_pages)
        self.replicates = isinstance(policy, Replicate)
        num_pages, window = placed_pools(policy, num_pages, window)
        self.page_size = page_size
        self.num_pages = num_pages
        self.enabled = enabled
        self.total_pages = sum(num_pages)
        if host.pages < 0:
            raise ConfigError(f"host pages must not be negative, got {host.pages}")
        self.window = window
        self.state = CacheState(
            page_size,
            num_pages,
            host_pages=host.pages,
            window=window,
        )
        self.leader = Leader(
            self.state,
            policy=make_eviction_policy(eviction),
            placement=policy,
            ghosts=Ghosts(min(self.total_pages + host.pages, MAX_GHOSTS)),
            record_freed=record_freed,
            exclusive_host=host.exclusive,
            window=window,
        )
        self._tree = self.state.tree
        self._page_bytes = self._tree.page_bytes

    @property
    def may_keep_replicas(self) -> bool:
        """Whether there are several owners of pages, and not too many."""
        return 1 < len(self.num_pages) <= MAX_OWNERS

    def keep_replicas(self, config: ReplicaConfig) -> None:
        """From now on pages that other ranks read often are copied to them, into free pages.

        Raises ConfigError where that cannot be.
        """
        if not self.may_keep_replicas:
            raise ConfigError(f"replicas need 2 to {MAX_OWNERS} owners, not {len(self.num_pages)}")
        self.leader.keep_replicas(config)

    def match(self, namespace: bytes, tokens: bytes, max_pages: int | None = None) -> Match:
        """The longest committed prefix of whole pages. Changes nothing, locks nothing.

        With windows, a WindowMatch: the longest valid length, and what else can be made of it.
        """
        page_bytes = self._page_bytes
        end = len(tokens) // page_bytes * page_bytes
        if max_pages is not None:
            end = min(end, max_pages * page_bytes)
        tree = self._tree
        found = tree.find(namespace, tokens, end if self.enabled else 0)
        if self.window is None:
            return Match(namespace, tokens, end, found, page_bytes, tree.epoch)
        return WindowMatch(
            namespace, tokens, end, found, page_bytes, tree.epoch, config=self.window
        )

    def touch(self, match: Match) -> None:
        """Somebody waits for what matched: of all that is unlocked it goes last."""
        if match.num_pages:
            self.leader.touch(match.node)

    def can_reserve(self, match: Match, num_new_pages: int, *, restart: bool = False) -> bool:
        """Whether `reserve` would succeed now."""
        match, num_new_pages = self._refresh(match, num_new_pages)
        if isinstance(match, WindowMatch):
            way = plan_admission(match, load_pages=0, restart=restart)
            num_new_pages -= way.match.num_pages - match.num_pages
            match = way.match
        return self._has_room(match, num_new_pages)

    def _has_room(self, match: Match, num_new_pages: int) -> bool:
        leader = self.leader
        room = self.state.free_pages + leader.evictable_pages
        if num_new_pages > room:
            return False
        return num_new_pages <= room - leader.unlocked_on_path(match)

    def reserve(
        self,
        match: Match,
        num_new_pages: int,
        *,
        share: bool = True,
        load_pages: int = 0,
        restart: bool = False,
    ) -> Reservation:
        """Lock what matched and allocate `num_new_pages` more, evicting others' if needed.

        The table covers match.num_pages + num_new_pages pages. If the tree has changed since the
        match, it is matched again: then fewer or more of them are cached, and the rest is new (and
        where more are cached than the table was to cover, it covers those).
        With share=False nothing that is computed is ever offered to others. Up to `load_pages` of
        the new pages are to be loaded from the host: see `Reservation.load_slots`.
        With windows, `restart` uses all of `match.full_pages`, and computes window state for them
        from `Reservation.start` on; a load ends at one of `match.loadable_lengths`.
        Raises NoRoom, and the cache is unchanged.
        """
        tree, state, leader = self._tree, self.state, self.leader
        if match.epoch != tree.epoch:
            load_end = match.num_pages + load_pages
            match, num_new_pages = self._refresh(match, num_new_pages)
            load_pages = max(0, load_end - match.num_pages)
        way: WindowAdmission | None = None
        if leader.window is not None:
            assert isinstance(match, WindowMatch), "the match is of another cache"
            way = plan_admission(match, load_pages=load_pages, restart=restart)
            way.check_room(leader.window)
            num_new_pages -= way.match.num_pages - match.num_pages
            match, load_pages = way.match, way.load_pages
        if num_new_pages > state.free_pages and not self._has_room(match, num_new_pages):
            raise NoRoom(
                f"{num_new_pages} pages asked, {state.free_pages} free and {self.evictable_pages} "
                f"evictable, {leader.unlocked_on_path(match)} of them in this request's own prefix"
            )
        if leader.ghosts.keys:
            leader.recall(match)
        if leader.ages is not None:
            leader.note_hit(match, load_pages, leader.ages)
        slots = self._take_host_slots(match, load_pages) if load_pages else b""
        node, num_cached = match.node, match.num_pages
        packed = match.packed_refs()
        if num_cached:
            if match.node_pages * REF_BYTES < len(node.refs):
                node = leader.split(node, match.node_pages)
            leader.lock(node, tree.root)
        shares = share and self.enabled
        if num_new_pages > 0:
            packed += leader.allocate(num_new_pages)
        table = np.frombuffer(packed, REF_DTYPE)
        lease = None
        if way is not None and leader.window is not None:
            lease = way.lease(leader.window, table, shares=shares)
        reservation = Reservation(
            leader, match.namespace, node, table, num_cached, shares, slots, lease
        )
        leader.reservations.add(reservation)
        return reservation

    def window_room(self) -> Sequence[int]:
        """Window pages that could be had now, of each owner."""
        ledger = self.leader.window
        return () if ledger is None else ledger.room

    def window_slack(self) -> int:
        """Window pages that could be had now without giving up any tail."""
        ledger = self.leader.window
        return 0 if ledger is None else ledger.free_pages + ledger.tails.num_leftovers

    def evict_window(self, num_pages: int) -> int:
        """Evict up to `num_pages` window pages that nobody locks; returns how many were."""
        return 0 if self.leader.window is None else self.leader.window.evict(num_pages)

    def take_freed_window(self) -> PageRefs:
        """The same as `take_freed`, of window pages."""
        packed = b"" if self.leader.window is None else self.leader.window.take_freed()
        return np.frombuffer(packed, REF_DTYPE) if packed else NO_REFS

    def evict(self, num_pages: int) -> int:
        """Evict up to `num_pages` pages that nobody locks; returns how many were."""
        return self.leader.evict(num_pages)

    def flush(self) -> int:
        """Forget everything; returns how many pages are still held by running requests.

        Those are freed when they are released, and nothing computed before the flush is ever
        found by a later match.
        """
        return self.leader.flush()

    def take_freed(self) -> PageRefs:
        """Refs freed since the last call, in order (n,); always empty unless record_freed."""
        packed = self.leader.take_freed()
        return np.frombuffer(packed, REF_DTYPE) if packed else NO_REFS

    @property
    def version(self) -> int:
        """Grows whenever what a match can find changes."""
        return self._tree.version

    @property
    def free_pages(self) -> int:
        """Pages that can be had without evicting anything: those that hold replicas, too."""
        return self.state.free_pages

    @property
    def evictable_pages(self) -> int:
        return self.leader.evictable_pages

    @property
    def locked_pages(self) -> int:
        """Held by running requests: locked in the tree, or their own."""
        return self.total_pages - self.free_pages - self.evictable_pages

    def stats(self) -> CacheStats:
        """A snapshot of all counters."""
        host, replicas = self.leader.host, self.leader.replicas
        return CacheStats(
            page_size=self.page_size,
            total_pages=self.total_pages,
            free_pages=self.free_pages - self.state.replicas.num_pages,
            evictable_pages=self.evictable_pages,
            locked_pages=self.locked_pages,
            nodes=len(self._tree.nodes) - 1,
            evicted_pages_total=self.leader.evicted_pages,
            evicted_then_requested_pages_total=self.leader.ghosts.recalled_pages,
            demoted_pages_total=self.leader.demoted_pages,
            unbacked_pages_total=self.leader.unbacked_pages,
            host_total_pages=host.capacity,
            host_free_pages=host.free_pages,
            host_pages=self._tree.host_pages,
            host_evicted_pages_total=host.evicted_pages,
            window=self._window_stats(),
            replicas=None if replicas is None else replicas.stats(),
        )

    def _window_stats(self) -> WindowStats | None:
        leader = self.leader
        if leader.window is None or leader.window_host is None:
            return None
        return replace(
            leader.window.stats(),
            host_total_pages=leader.window_host.capacity,
            host_free_pages=leader.window_host.free_pages,
            host_pages=leader.window_host.num_pages,
            host_evicted_pages_total=leader.window_host.evicted_pages,
        )

    def _take_host_slots(self, match: Match, num_pages: int) -> bytes:
        """Hold the first host pages of a match; eviction may take them from the tree, not away."""
        slots = match.packed_host_slots()[: num_pages * REF_BYTES]
        self.leader.host.hold(slots)
        if match.host_node is not None:
            self.leader.host.touch(match.host_node)
        return slots

    def _refresh(self, match: Match, num_new_pages: int) -> tuple[Match, int]:
        """The match as of now, and how many new pages the same table then needs."""
        if match.epoch == self._tree.epoch:
            return match, num_new_pages
        wanted = match.num_pages + num_new_pages
        fresh = self.match(match.namespace, match.tokens, match.end // self._page_bytes)
        return fresh, max(0, wanted - fresh.num_pages)
