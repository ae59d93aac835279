"""Does the suite notice? Each test breaks one thing in the cache and expects the walk to go red."""

from __future__ import annotations

from array import array

import pytest

from phloem.cache import PrefixCache
from phloem.cache.eviction import LruPolicy
from phloem.cache.leader import Leader
from phloem.cache.match import Match
from phloem.cache.reservation import PagesChanged, Reservation
from phloem.cache.tree import RadixTree
from tests.cache.world import Walk, World


def drop_one_lock(patch: pytest.MonkeyPatch) -> None:
    original = RadixTree.lock

    def lock(self, node, above):
        return original(self, node.parent if node.parent is not above else node, above)

    patch.setattr(RadixTree, "lock", lock)
    ignore_lost_unlocks(patch)


def never_lock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leader, "lock", lambda self, node, above: None)
    ignore_lost_unlocks(patch)


def ignore_lost_unlocks(patch: pytest.MonkeyPatch) -> None:
    """Let a missing lock do its harm instead of tripping the counter's own assertion."""

    def unlock(self, node, now):
        idle = []
        while node is not self.root and node is not None:
            if node.locks:
                node.locks -= 1
                if not node.locks:
                    idle.append(node)
                    self.locked_pages -= node.num_pages
            node = node.parent
        return idle, b""

    patch.setattr(RadixTree, "unlock", unlock)


def forget_locks_in_split(patch: pytest.MonkeyPatch) -> None:
    original = RadixTree.split

    def split(self, node, num_pages):
        upper = original(self, node, num_pages)
        if upper.locks:
            self.locked_pages -= upper.num_pages
            upper.locks = 0
        return upper

    patch.setattr(RadixTree, "split", split)


def shift_one_page_in_split(patch: pytest.MonkeyPatch) -> None:
    original = RadixTree.split

    def split(self, node, num_pages):
        node.refs = node.refs[8:] + node.refs[:8]
        return original(self, node, num_pages)

    patch.setattr(RadixTree, "split", split)


def swap_two_refs_in_insert(patch: pytest.MonkeyPatch) -> None:
    original = RadixTree.insert

    def insert(self, parent, namespace, tokens, refs, now):
        swapped = array("q", refs)
        if len(swapped) > 1:
            swapped[0], swapped[1] = swapped[1], swapped[0]
        return original(self, parent, namespace, tokens, swapped.tobytes(), now)

    patch.setattr(RadixTree, "insert", insert)


def join_in_reverse(patch: pytest.MonkeyPatch) -> None:
    original = RadixTree.merge

    def merge(self, node, num_ancestors):
        upper = node.parent
        node.refs, upper.refs = upper.refs, node.refs
        return original(self, node, num_ancestors)

    patch.setattr(RadixTree, "merge", merge)


def free_duplicates_but_keep_the_table(patch: pytest.MonkeyPatch) -> None:
    def repoint(self, first, packed):
        stop = first + len(packed) // 8
        self.leader.free(self.refs[first:stop].tobytes())

    patch.setattr(Reservation, "_repoint", repoint)


def do_not_tell_the_worker(patch: pytest.MonkeyPatch) -> None:
    original = Reservation.commit
    patch.setattr(Reservation, "commit", lambda self, tokens: original(self, tokens) and None)


def tell_the_worker_one_page_late(patch: pytest.MonkeyPatch) -> None:
    original = Reservation.commit

    def commit(self, tokens):
        changed = original(self, tokens)
        return changed and PagesChanged(changed.first_page + 1, changed.refs[:-1])

    patch.setattr(Reservation, "commit", commit)


def keep_duplicates(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leader, "free", lambda self, refs: None)


def serve_before_it_is_computed(patch: pytest.MonkeyPatch) -> None:
    original = PrefixCache.reserve

    def reserve(self, match, num_new_pages, *, share=True):
        reservation = original(self, match, num_new_pages, share=share)
        pages = min(reservation.num_pages, len(match.tokens) // (4 * self.page_size))
        reservation.commit(match.tokens[: pages * 4 * self.page_size])
        return reservation

    patch.setattr(PrefixCache, "reserve", reserve)


def share_across_namespaces(patch: pytest.MonkeyPatch) -> None:
    original = RadixTree.find
    patch.setattr(RadixTree, "find", lambda self, _ns, *rest: original(self, b"a", *rest))


def trust_the_first_page(patch: pytest.MonkeyPatch) -> None:
    def common_pages(self, edge, tokens, offset, end):
        return min(len(edge), end - offset) // self.page_bytes

    patch.setattr(RadixTree, "common_pages", common_pages)


def evict_what_was_used_last(patch: pytest.MonkeyPatch) -> None:
    def victims(self, num_pages):
        for node in reversed(self.order()):
            if not node.children:
                return [(node, min(node.num_pages, num_pages))] if num_pages else []
        return []

    patch.setattr(LruPolicy, "victims", victims)


def evict_one_page_too_many(patch: pytest.MonkeyPatch) -> None:
    original = Leader.evict
    patch.setattr(Leader, "evict", lambda self, num_pages: original(self, num_pages + 1))


def believe_a_stale_match(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "_refresh", lambda self, match, new: (match, new))


def keep_old_pages_at_flush(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixTree, "detach", lambda self: None)


def share_what_was_computed_before_a_flush(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reservation, "stop_sharing", lambda self: None)


def lose_a_ref(patch: pytest.MonkeyPatch) -> None:
    original = Match.packed_refs

    def packed_refs(self):
        refs = original(self)
        return refs[8:16] + refs[8:] if len(refs) > 16 else refs

    patch.setattr(Match, "packed_refs", packed_refs)


MUTATIONS = [
    drop_one_lock,
    never_lock,
    forget_locks_in_split,
    shift_one_page_in_split,
    swap_two_refs_in_insert,
    join_in_reverse,
    free_duplicates_but_keep_the_table,
    do_not_tell_the_worker,
    tell_the_worker_one_page_late,
    keep_duplicates,
    serve_before_it_is_computed,
    share_across_namespaces,
    trust_the_first_page,
    evict_what_was_used_last,
    evict_one_page_too_many,
    believe_a_stale_match,
    keep_old_pages_at_flush,
    share_what_was_computed_before_a_flush,
    lose_a_ref,
]


def take_walks() -> None:
    for seed in range(8):
        cache = PrefixCache(page_size=4, num_pages=(24,), record_freed=True)
        Walk(World(cache, invariants=False, follow=False), seed).run(400)


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_suite_notices(mutate, monkeypatch):
    """The naive world alone must see it, without the invariants checker."""
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KeyError, RuntimeError)):
        take_walks()


def test_the_same_walks_are_green_without_a_mutation():
    take_walks()
