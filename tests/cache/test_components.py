"""The place for a second component: a ref or a tombstone per page."""

from __future__ import annotations

from array import array

from phloem.cache.components import ABSENT, FULL, ExtraState
from tests.cache.build import make, run_of, serve


def places(state: ExtraState) -> list[int]:
    return array("q", state.refs).tolist()


def test_full_alone_costs_a_node_nothing():
    cache = make(4)
    serve(cache, run_of(0, 40))
    assert all(node.extra == () for node in cache.state.tree.nodes.values())
    assert cache.state.tree.components == (FULL,)


def test_a_component_is_split_joined_lengthened_and_trimmed_page_by_page():
    """A place that is lost, or goes to the wrong part, turns this red; so does a host place."""
    state = ExtraState(array("q", [70, 71, 72, ABSENT]).tobytes())
    state.host = array("q", [ABSENT, 1, ABSENT, ABSENT]).tobytes()
    upper = state.split(16)
    assert (places(upper), upper.host_list()) == ([70, 71], [ABSENT, 1])
    assert (places(state), state.host_list()) == ([72, ABSENT], [ABSENT, ABSENT])
    state.host = b""
    state.grow(2)
    assert (places(state), state.host) == ([72, ABSENT, ABSENT, ABSENT], b"")
    state.join([upper, state])
    assert places(state) == [70, 71, 72, ABSENT, ABSENT, ABSENT]
    assert state.host_list() == [ABSENT, 1, ABSENT, ABSENT, ABSENT, ABSENT]
    state.grow(1)
    state.cut(24)
    assert (places(state), state.host_list()) == ([70, 71, 72], [ABSENT, 1, ABSENT])
