"""The prefix cache: one radix tree of pages, matched, reserved, committed and evicted."""

from __future__ import annotations

from phloem.cache.ages import Ages
from phloem.cache.eviction import EVICTION_POLICIES, EvictionPolicy
from phloem.cache.host_ledger import HostTier
from phloem.cache.invariants import check_invariants
from phloem.cache.match import Match
from phloem.cache.prefix_cache import PrefixCache
from phloem.cache.replica_policy import ReplicaConfig
from phloem.cache.reservation import PagesChanged, Reservation
from phloem.cache.state import CacheState
from phloem.cache.window import WindowConfig
from phloem.cache.window_match import WindowMatch

__all__ = [
    "EVICTION_POLICIES",
    "Ages",
    "CacheState",
    "EvictionPolicy",
    "HostTier",
    "Match",
    "PagesChanged",
    "PrefixCache",
    "ReplicaConfig",
    "Reservation",
    "WindowConfig",
    "WindowMatch",
    "check_invariants",
]
