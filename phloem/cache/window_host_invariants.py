"""What must hold of the host copies of window state at any moment between two calls."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator

from phloem.cache.components import ABSENT
from phloem.cache.node import REF_BYTES, Node
from phloem.cache.prefix_cache import PrefixCache
from phloem.cache.window_host import WindowHost
from phloem.replica import HostPool

__all__ = ["window_host_violations"]


def window_host_violations(cache: PrefixCache, *, idle: bool) -> list[str]:
    """Every broken rule, in words."""
    state, host = cache.state.window, cache.leader.window_host
    if state is None or host is None:
        return []
    found: dict[int, Node] = {}
    out = list(_copies(cache, found))
    if found != state.host_home:
        out.append("host copies of windows are not at home")
    if sorted(host.order()) != sorted(found):
        out.append("the host's order of eviction does not know the window copies that there are")
    out.extend(_slots(state.host, found, host))
    out.extend(_loads(cache, state.host))
    if idle and (state.host.num_limbo or state.host.num_held or host.reserved):
        out.append("host slots of windows are held at idle")
    return out


def _copies(cache: PrefixCache, found: dict[int, Node]) -> Iterator[str]:
    """Nodes of the tree have a place for every page, or none at all; fills `found`."""
    for node in cache.state.tree.nodes.values():
        if node is cache.state.tree.root:
            continue
        copies = node.extra[0].host
        if copies and len(copies) != len(node.chain):
            yield f"{node} has {len(copies) // REF_BYTES} host places of windows"
        for slot in node.extra[0].host_list():
            if slot == ABSENT:
                continue
            if node.detached:
                yield f"{node} is detached and has window state on the host"
            if slot in found:
                yield f"window host slot {slot} is in two places"
            found[slot] = node


def _slots(pool: HostPool, found: dict[int, Node], host: WindowHost) -> Iterator[str]:
    """Every slot is in exactly one place: free, on a node, a transfer's, or in limbo."""
    places = Counter(found.keys())
    for slots in host.reserved:
        places.update(array("q", slots))
    for slot, count in places.items():
        if count > 1:
            yield f"window host slot {slot} is in {count} places"
        if not pool.is_used(slot) or pool.in_limbo(slot):
            yield f"window host slot {slot} is in use but free"
    if len(places) + pool.num_limbo + pool.num_free != pool.capacity:
        yield f"{len(places)} used + {pool.num_limbo} limbo + {pool.num_free} free window slots"


def _loads(cache: PrefixCache, pool: HostPool) -> Iterator[str]:
    """What is loaded from is not free."""
    for reservation in cache.leader.reservations:
        for slot in array("q", reservation.window_loads[1]):
            if not pool.is_used(slot):
                yield f"window host slot {slot} is loaded from and free"
