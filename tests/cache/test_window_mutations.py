"""Does the walk notice? Each test breaks one thing about windows and expects it to go red."""

from __future__ import annotations

from collections import Counter

import pytest

from phloem.cache.window import WindowConfig
from phloem.cache.window_eviction import Tails
from phloem.cache.window_lease import WindowLease
from phloem.cache.window_ledger import WindowLedger
from phloem.cache.window_match import WindowMatch, runs_of
from phloem.cache.window_state import WindowState
from phloem.core.refs import owner_of
from tests.cache import test_window_match
from tests.cache.test_window_walk import take_a_walk


def never_lock(patch):
    patch.setattr(WindowLedger, "lock", lambda self, pages: None)
    unlock = WindowState._unlock

    def forgiving(self, command):  # let the missing lock do its harm
        for ref in memoryview(command[1]).cast("q"):
            self.locks.setdefault(ref, 1)
        return unlock(self, command)

    patch.setattr(WindowState, "_unlock", forgiving)


def a_tail_one_page_short(patch):
    original = WindowConfig.tail_pages
    patch.setattr(WindowConfig, "tail_pages", lambda self, size: max(0, original(self, size) - 1))


def a_window_without_the_token_itself(patch):
    patch.setattr(WindowConfig, "tail_pages", lambda self, size: -(-self.tokens // size))


def let_go_of_the_tail_of_what_is_committed(patch):
    def advance(self, position):
        low = (position - self._ledger.config.tokens + 1) // self._ledger.page_size
        if min(low, self.end) > self._low:
            self._let_go(min(low, self.end))

    patch.setattr(WindowLease, "advance", advance)


def let_go_one_page_early(patch):
    original = WindowLease.advance
    patch.setattr(
        WindowLease, "advance", lambda self, at: original(self, at + self._ledger.page_size)
    )


def never_let_go(patch):
    patch.setattr(WindowLease, "advance", lambda self, position: None)


def start_a_restart_one_layer_too_late(patch):
    original = WindowConfig.deep_start

    def deep_start(self, pages, size):
        fewer = WindowConfig(tokens=self.tokens, layers=max(1, self.layers - 1), pages=self.pages)
        return original(fewer, pages, size)

    patch.setattr(WindowConfig, "deep_start", deep_start)


def commit_what_a_restart_got_wrong(patch):
    original = WindowLease.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self._right_from = 0

    patch.setattr(WindowLease, "__init__", init)


def keep_copies_of_what_the_tree_has(patch):
    patch.setattr(WindowLedger, "free", lambda self, refs: None)


def free_a_page_that_joined(patch):
    def join(self, node, end, pages):
        own = self._own.copy()
        original(self, node, end, pages)
        self._own[: len(own)] = own

    original = WindowLease._join_tree
    patch.setattr(WindowLease, "_join_tree", join)


def attach_one_page_further(patch):
    original = WindowState._attach

    def attach(self, command):
        op, node, first, refs = command
        room = self.tree.nodes[node].num_pages
        further = first + 1 if first + 1 + len(refs) // 8 <= room else first
        original(self, (op, node, further, refs))

    patch.setattr(WindowState, "_attach", attach)


def keep_window_state_of_evicted_pages(patch):
    patch.setattr(WindowState, "leave_device", lambda self, node, pages: None)


def lose_track_in_a_split(patch):
    patch.setattr(WindowState, "moved", lambda self, nodes, to: None)


def evict_locked_pages(patch):
    original = Tails._drop

    def drop(self, tail):
        pages = [page for page in tail.pages if self._needs[page] == 1]
        original(self, tail)
        for page in pages:
            self._leftovers[owner_of(page)][page] = None

    patch.setattr(Tails, "_drop", drop)


def match_up_to_the_first_tombstone(patch):
    def longest(self, there):
        return int(there.argmin()) if not there.all() else len(there)

    patch.setattr(WindowMatch, "_longest", longest)


def match_a_run_that_is_too_short(patch):
    def longest(self, there):
        return max((stop for _, stop in runs_of(there)), default=0)

    patch.setattr(WindowMatch, "_longest", longest)


def ignore_tombstones(patch):
    patch.setattr(WindowMatch, "_tail_is_alive", lambda self: True)


def evict_one_page_too_many(patch):
    original = WindowLedger.evict
    patch.setattr(WindowLedger, "evict", lambda self, pages: original(self, pages + 1))


MUTATIONS = [
    never_lock,
    a_tail_one_page_short,
    a_window_without_the_token_itself,
    let_go_of_the_tail_of_what_is_committed,
    let_go_one_page_early,
    never_let_go,
    start_a_restart_one_layer_too_late,
    commit_what_a_restart_got_wrong,
    keep_copies_of_what_the_tree_has,
    free_a_page_that_joined,
    attach_one_page_further,
    keep_window_state_of_evicted_pages,
    lose_track_in_a_split,
    evict_locked_pages,
    ignore_tombstones,
    evict_one_page_too_many,
]


def take_walks():
    seen = Counter()
    for seed, page_size, window, pages in (
        (1, 1, 8, 12),
        (2, 4, 8, 24),
        (6, 4, 17, 24),
        (4, 16, 9, 20),
        (9, 4, 5, 30),
        (7, 1, 4, 30),
    ):
        walk = take_a_walk(page_size, window, seed, steps=200, max_pages=pages, invariants=False)
        seen += walk.world.seen
    return seen


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_walk_notices(mutate, monkeypatch):
    """The naive world alone must see it, without the invariants checker."""
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        take_walks()


def test_the_same_walks_are_green_without_a_mutation():
    seen = take_walks()
    assert (seen["hits"] > 80, seen["restarts"] > 15, seen["deep"] > 5) == (True, True, True), seen


@pytest.mark.parametrize(
    "mutate",
    [
        match_up_to_the_first_tombstone,
        match_a_run_that_is_too_short,
        a_tail_one_page_short,
        a_window_without_the_token_itself,
        ignore_tombstones,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_o31_notices(mutate, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        test_window_match.test_o31_every_pattern_of_tombstones(1, test_window_match.LENGTHS[0])
