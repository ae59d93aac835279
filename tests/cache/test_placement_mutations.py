"""Do the walks notice? Each test breaks one thing about owners and expects them to go red."""

from __future__ import annotations

import numpy as np
import pytest

from phloem.cache import PrefixCache, leader, placement
from phloem.cache.placement import Striped
from phloem.cache.window_eviction import Tails
from phloem.cache.window_lease import WindowLease
from phloem.cache.window_ledger import WindowLedger
from phloem.cache.window_state import WindowState
from tests.cache.test_window_walk import take_a_host_walk, take_a_walk
from tests.cache.world import Walk, World


def no_other_rank_is_asked(patch):
    patch.setattr(placement, "num_displaced", lambda num_pages, free, start, step: 0)


def a_stripe_at_any_price(patch):
    patch.setattr(Striped, "price", lambda self, num_pages: 1 << 30 if num_pages > 1 else 0)
    patch.setattr(leader, "num_displaced", lambda num_pages, free, start, step: 1 << 30)


def window_pages_anywhere(patch):
    original = WindowLedger.allocate
    patch.setattr(
        WindowLedger, "allocate", lambda self, beside: original(self, np.zeros_like(beside))
    )


def room_is_a_sum(patch):
    """As with one owner: whether all ranks together have room."""

    def fitting(self, beside):
        return min(len(beside), sum(self.room))

    patch.setattr(WindowLedger, "fitting", fitting)


def victims_of_any_owner(patch):
    original = Tails.victims
    patch.setattr(Tails, "victims", lambda self, num_pages, owner=None: original(self, num_pages))


def idle_pages_are_not_counted_down(patch):
    original = WindowState._lock

    def lock(self, command):
        before = list(self.idle_pages)
        original(self, command)
        self.idle_pages[:] = before

    patch.setattr(WindowState, "_lock", lock)


def join_the_tree_wherever_it_lies(patch):
    """What another request has committed first on another rank gets this one's window page."""
    original = WindowLease._attach

    def attach(self, *args):
        self._ledger.num_owners = 1
        original(self, *args)
        self._ledger.num_owners = len(self._ledger.state.allocators)

    patch.setattr(WindowLease, "_attach", attach)


def loads_go_to_rank_0(patch):
    original = WindowLease.__init__

    def init(self, *args, table, **kwargs):
        original(self, *args, table=np.zeros_like(table), **kwargs)

    patch.setattr(WindowLease, "__init__", init)


FULL = [no_other_rank_is_asked, a_stripe_at_any_price]
WINDOW = [
    window_pages_anywhere,
    room_is_a_sum,
    victims_of_any_owner,
    idle_pages_are_not_counted_down,
    join_the_tree_wherever_it_lies,
]


def full_walks():
    for seed in range(3):
        cache = PrefixCache(page_size=4, num_pages=(10,) * 4, record_freed=True)
        Walk(World(cache, invariants=False), seed).run(300)


def window_walks():
    for seed in range(2):
        for name in ("striped", "contiguous"):
            ranks = {"owners": 4, "placement": name}
            take_a_walk(4, 8, seed, steps=200, max_pages=30, invariants=False, **ranks)


def host_walks():
    for seed in range(3):
        take_a_host_walk(4, 17, seed, steps=300, owners=2)


@pytest.mark.parametrize("mutate", FULL, ids=lambda mutate: mutate.__name__)
def test_walk_notices(mutate, monkeypatch):
    """The naive world alone must see it, without the invariants checker."""
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        full_walks()


@pytest.mark.parametrize("mutate", WINDOW, ids=lambda mutate: mutate.__name__)
def test_window_walk_notices(mutate, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        window_walks()


def test_host_walk_notices(monkeypatch):
    loads_go_to_rank_0(monkeypatch)
    with pytest.raises(AssertionError):
        host_walks()


def test_the_same_walks_are_green_without_a_mutation():
    full_walks()
    window_walks()
    host_walks()
