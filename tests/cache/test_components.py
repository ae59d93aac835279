"""The place for a second component: a ref or a tombstone per page, and locks of its own."""

from __future__ import annotations

from array import array

from phloem.cache import check_invariants
from phloem.cache.components import ABSENT, FULL, Component, ExtraState
from tests.cache.build import NS, cached, make, run_of, serve, start

WINDOW = Component("window", 8)


def places(state: ExtraState) -> list[int]:
    return array("q", state.refs).tolist()


def test_full_alone_costs_a_node_nothing():
    cache = make(4)
    serve(cache, run_of(0, 40))
    assert all(node.extra == () for node in cache.state.tree.nodes.values())
    assert cache.state.tree.components == (FULL,)


def test_new_pages_have_a_place_for_each_component():
    cache = make(4, components=(FULL, WINDOW))
    tokens = run_of(0, 40)
    with start(cache, tokens) as reservation:
        for end in range(4, 41, 4):
            reservation.commit(tokens[: 4 * end])
            check_invariants(cache)
        assert places(reservation.node.extra[0]) == [ABSENT] * 10


def test_a_component_is_split_joined_and_trimmed_with_its_pages():
    cache = make(4, components=(FULL, WINDOW))
    tokens = run_of(0, 24)
    serve(cache, tokens)
    (node,) = cache.match(NS, tokens).node.parent.children.values()
    node.extra[0].refs = array("q", [70, 71, 72, ABSENT, 74, 75]).tobytes()
    with cache.reserve(cache.match(NS, tokens[: 4 * 8]), 0) as reservation:
        assert places(reservation.node.extra[0]) == [70, 71]
        assert places(node.extra[0]) == [72, ABSENT, 74, 75]
        check_invariants(cache)
    serve(cache, tokens + run_of(500, 4))
    joined = cache.match(NS, tokens).node
    assert places(joined.extra[0]) == [70, 71, 72, ABSENT, 74, 75, ABSENT]
    cache.evict(3)
    assert places(joined.extra[0]) == [70, 71, 72, ABSENT]
    check_invariants(cache, idle=True)
    assert cached(cache, tokens) == 16


def test_locks_of_a_component_stay_below_the_spines():
    cache = make(4, components=(FULL, WINDOW))
    tokens = run_of(0, 24)
    with start(cache, tokens) as reservation:
        reservation.commit(tokens)
        state = reservation.node.extra[0]
        state.refs = array("q", range(6)).tobytes()
        state.locks = 1
        check_invariants(cache)
        with cache.reserve(cache.match(NS, tokens[: 4 * 8]), 0) as other:
            assert other.node.extra[0].locks == 1  # a split leaves both parts theirs
            check_invariants(cache)
        state.locks = 0
        other.node.extra[0].locks = 0
