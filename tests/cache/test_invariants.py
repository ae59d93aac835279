"""The checker itself: each rule is broken by hand, and must be named."""

from __future__ import annotations

from array import array

import pytest

from phloem.cache import PrefixCache, Reservation, check_invariants
from phloem.cache.invariants import violations
from phloem.cache.node import Node
from tests.cache.build import make, run_of, serve, start


@pytest.fixture
def busy() -> tuple[PrefixCache, Reservation]:
    """Two branches below a head, one of them in use, with a page not yet committed."""
    cache = make(4, 32)
    head = run_of(0, 8)
    serve(cache, head + run_of(100, 12))
    tokens = head + run_of(200, 12)
    reservation = start(cache, tokens)
    reservation.commit(tokens[: 4 * 16])
    assert violations(cache) == []
    return cache, reservation


def node_of(cache: PrefixCache, *, locked: bool, leaf: bool) -> Node:
    for node in cache.state.tree.nodes.values():
        if node.id and bool(node.locks) == locked and bool(node.children) != leaf:
            return node
    raise LookupError


def refs(*numbers: int) -> bytes:
    return array("q", numbers).tobytes()


def one_lock_too_few(cache, reservation):
    reservation.node.locks -= 1


def one_lock_too_many(cache, reservation):
    node_of(cache, locked=True, leaf=False).locks += 1


def a_page_in_two_places(cache, reservation):
    node = node_of(cache, locked=False, leaf=True)
    node.refs = reservation.node.refs[:8] + node.refs[8:]


def a_page_in_use_and_free(cache, reservation):
    cache.state.allocators[0].free(node_of(cache, locked=False, leaf=True).refs[:8])
    cache.state.free_pages += 1


def a_page_nowhere(cache, reservation):
    cache.state.allocators[0].alloc(1)
    cache.state.free_pages -= 1


def a_table_that_differs(cache, reservation):
    node = reservation.node
    node.refs = node.refs[8:] + node.refs[:8]


def a_child_of_nobody(cache, reservation):
    node_of(cache, locked=False, leaf=True).parent = cache.state.tree.root


def a_wrong_first_page(cache, reservation):
    node = node_of(cache, locked=False, leaf=True)
    node.key = run_of(900, 4) + node.key[16:]


def half_a_page(cache, reservation):
    node = node_of(cache, locked=False, leaf=True)
    node.key = node.key[:-4]


def a_counter_off_by_one(cache, reservation):
    cache.state.tree.total_pages += 1


def a_locked_counter_off_by_one(cache, reservation):
    cache.state.tree.locked_pages -= 1


def a_node_that_cannot_be_evicted(cache, reservation):
    cache.leader.policy.locked([node_of(cache, locked=False, leaf=True)])


def a_locked_node_that_can_be_evicted(cache, reservation):
    cache.leader.policy.unlocked([reservation.node])


def a_child_younger_than_its_parent(cache, reservation):
    reservation.node.last_access += 1000


def a_wrong_content_key(cache, reservation):
    node = node_of(cache, locked=False, leaf=True)
    node.chain = bytes(8) + node.chain[8:]


def a_change_behind_the_logs_back(cache, reservation):
    cache.state.now += 1


def a_component_too_many(cache, reservation):
    reservation.node.extra = ()
    cache.state.tree.components *= 2


BREAKS = {
    one_lock_too_few: "should have 1 locks",
    one_lock_too_many: "should have 1 locks",
    a_page_in_two_places: "is in 2 places",
    a_page_in_use_and_free: "is in use but free",
    a_page_nowhere: "replicas are not 32",
    a_table_that_differs: "page table differs",
    a_child_of_nobody: "not its parent",
    a_wrong_first_page: "wrong first page",
    half_a_page: "no whole pages",
    a_counter_off_by_one: "counts 8 pages, it has 7",
    a_locked_counter_off_by_one: "counts 3 locked pages, it has 4",
    a_node_that_cannot_be_evicted: "not the unlocked ones",
    a_locked_node_that_can_be_evicted: "not the unlocked ones",
    a_child_younger_than_its_parent: "used after its parent",
    a_wrong_content_key: "wrong content keys",
    a_change_behind_the_logs_back: "disagree about the time",
    a_component_too_many: "further components",
}


@pytest.mark.parametrize("damage", BREAKS, ids=lambda damage: damage.__name__)
def test_the_checker_names_what_is_broken(busy, damage):
    cache, reservation = busy
    damage(cache, reservation)
    with pytest.raises(AssertionError, match=BREAKS[damage]):
        check_invariants(cache)


def test_idle_means_that_nobody_holds_a_page(busy):
    cache, reservation = busy
    with pytest.raises(AssertionError, match="1 reservations are open at idle"):
        check_invariants(cache, idle=True)
    reservation.close()
    check_invariants(cache, idle=True)
