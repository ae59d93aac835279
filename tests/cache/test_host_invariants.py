"""The checker of the host tier: each rule is broken by hand, and must be named."""

from __future__ import annotations

import pytest

from phloem.cache import HostTier, PrefixCache, check_invariants
from phloem.cache.host_ledger import Backup
from phloem.cache.node import Node
from tests.cache.build import NS, run_of, serve


@pytest.fixture
def cache() -> PrefixCache:
    """Two branches below a head: one on both tiers, one on the host alone; a backup in flight."""
    cache = PrefixCache(page_size=4, num_pages=(32,), record_freed=True, host=HostTier(pages=64))
    head = run_of(0, 8)
    for first in (100, 200, 300):
        serve(cache, head + run_of(first, 12))
    for first in (100, 200):
        node = end_of(cache, head + run_of(first, 12))
        pages = sum(n.num_pages for n in path(node) if not n.host)
        backup = cache.leader.begin_backup(node, pages)
        assert backup is not None
        cache.leader.end_backup(backup, done=True, demote=first == 100)
    node = end_of(cache, head + run_of(300, 12))
    assert cache.leader.begin_backup(node, node.num_pages) is not None
    check_invariants(cache)
    return cache


def end_of(cache: PrefixCache, tokens: bytes) -> Node:
    return cache.state.tree.find(NS, tokens, len(tokens))[0]


def path(node: Node) -> list[Node]:
    return [] if node.parent is None else [node, *path(node.parent)]


def alone(cache: PrefixCache) -> Node:
    return next(n for n in cache.state.tree.nodes.values() if n.host and not n.refs)


def both(cache: PrefixCache) -> Node:
    return next(n for n in cache.state.tree.nodes.values() if n.host and n.refs)


def in_flight(cache: PrefixCache) -> Backup:
    return next(iter(cache.leader.backups))


def a_slot_in_two_places(cache):
    both(cache).host = alone(cache).host[:8] + both(cache).host[8:]


def a_slot_in_use_and_free(cache):
    cache.state.host.free(alone(cache).host[:8])


def a_slot_nowhere(cache):
    cache.state.host.alloc(1)


def a_slot_in_use_and_in_limbo(cache):
    slots = alone(cache).host[:8]
    cache.state.host.hold(slots)
    cache.state.host.free(slots)


def half_a_node(cache):
    alone(cache).host = alone(cache).host[:-8]


def a_node_nowhere(cache):
    alone(cache).host = b""


def a_child_without_its_parent(cache):
    node = next(n for n in cache.state.tree.nodes.values() if n.refs and n.children)
    node.refs = b""


def a_lock_on_the_host(cache):
    alone(cache).locks = 1


def a_wrong_count(cache):
    cache.state.tree.host_pages += 1


def a_node_the_policy_does_not_know(cache):
    cache.leader.host.policy.locked([alone(cache)])


def a_backup_without_a_lock(cache):
    node = in_flight(cache).node
    while node.parent is not None:
        node.locks = 0
        node = node.parent


def a_backup_to_slots_of_others(cache):
    del cache.leader.host.reserved[in_flight(cache).slots]


BREAKS = {
    a_slot_in_two_places: "is in 2 places",
    a_slot_in_use_and_free: "is in use but free",
    a_slot_nowhere: "free host slots",
    a_slot_in_use_and_in_limbo: "is in use but free",
    half_a_node: "is on the host in part",
    a_node_nowhere: "is nowhere",
    a_child_without_its_parent: "is on the device and its parent is not",
    a_lock_on_the_host: "is locked and not on the device",
    a_wrong_count: "the tree counts",
    a_node_the_policy_does_not_know: "does not know the nodes on the host alone",
    a_backup_without_a_lock: "which is not locked, is in flight",
    a_backup_to_slots_of_others: "slots that are not its own",
}


@pytest.mark.parametrize("damage", BREAKS, ids=lambda damage: damage.__name__)
def test_the_checker_names_what_is_broken(cache: PrefixCache, damage):
    damage(cache)
    with pytest.raises(AssertionError, match=BREAKS[damage]):
        check_invariants(cache)


def test_idle_means_that_nothing_is_in_flight(cache: PrefixCache):
    with pytest.raises(AssertionError, match="host slots are held at idle"):
        check_invariants(cache, idle=True)
    cache.leader.end_backup(in_flight(cache), done=False)
    check_invariants(cache, idle=True)
