"""What must hold of the host tier at any moment between two calls (DESIGN sections 4 and 5)."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator

from phloem.cache.node import REF_BYTES, Node
from phloem.cache.prefix_cache import PrefixCache

__all__ = ["host_violations"]


def host_violations(cache: PrefixCache, *, idle: bool) -> list[str]:
    """Every broken rule of the host tier, in words."""
    out: list[str] = []
    for rule in (_residence, _slots, _order, _transfers):
        out.extend(rule(cache))
    pool = cache.state.host
    if idle and (pool.num_limbo or pool.num_held or cache.leader.host.reserved):
        out.append(f"host slots are held at idle: {pool.num_held}, in limbo: {pool.num_limbo}")
    return out


def _nodes(cache: PrefixCache) -> list[Node]:
    tree = cache.state.tree
    return [node for node in tree.nodes.values() if node is not tree.root]


def _residence(cache: PrefixCache) -> Iterator[str]:
    """A node is somewhere, whole; what is on the device has its parent there."""
    for node in _nodes(cache):
        for name, pages in (("device", node.refs), ("host", node.host)):
            if pages and len(pages) != len(node.chain):
                yield f"{node} is on the {name} in part"
        if not node.refs and not node.host:
            yield f"{node} is nowhere"
        parent = node.parent
        if node.refs and parent is not cache.state.tree.root and parent and not parent.refs:
            yield f"{node} is on the device and its parent is not"
        if node.locks and not node.refs:
            yield f"{node} is locked and not on the device"
        if node.detached and node.host:
            yield f"{node} is detached and on the host"


def _slots(cache: PrefixCache) -> Iterator[str]:
    """Every host slot is in exactly one place: free, in one node, a transfer's, or in limbo."""
    pool = cache.state.host
    places: Counter[int] = Counter()
    for node in _nodes(cache):
        places.update(node.host_list())
    attached = sum(places.values())
    if cache.state.tree.host_pages != attached:
        yield f"the tree counts {cache.state.tree.host_pages} host pages, not {attached}"
    for slots in cache.leader.host.reserved:
        places.update(array("q", slots))
    for slot, count in places.items():
        if count > 1:
            yield f"host slot {slot} is in {count} places"
        if not pool.is_used(slot) or pool.in_limbo(slot):
            yield f"host slot {slot} is in use but free"
    if len(places) + pool.num_limbo + pool.num_free != pool.capacity:
        yield f"{len(places)} used + {pool.num_limbo} limbo + {pool.num_free} free host slots"


def _order(cache: PrefixCache) -> Iterator[str]:
    """The host's policy knows exactly the nodes on the host alone, no parent before its child."""
    order = cache.leader.host.policy.order()
    place = {node.id: index for index, node in enumerate(order)}
    alone = {node.id for node in _nodes(cache) if not node.refs}
    if len(place) != len(order) or set(place) != alone:
        yield "the host's eviction policy does not know the nodes on the host alone"
        return
    for node in order:
        parent = node.parent
        if parent is not None and place.get(parent.id, len(order)) < place[node.id]:
            yield f"{node} would leave the host after its parent"


def _transfers(cache: PrefixCache) -> Iterator[str]:
    """Transfers in flight refer to live, locked nodes and to slots that are theirs."""
    for backup in cache.leader.backups:
        node = backup.node
        if cache.state.tree.nodes.get(node.id) is not node or not node.locks:
            yield f"a backup of {node}, which is not locked, is in flight"
        if backup.slots and backup.slots not in cache.leader.host.reserved:
            yield f"a backup of {node} writes to slots that are not its own"
        if len(backup.refs) != backup.num_pages * REF_BYTES:
            yield f"a backup of {node} has another number of sources than of destinations"
    for reservation in cache.leader.reservations:
        for slot in array("q", reservation.load_slots):
            if not cache.state.host.is_used(slot):
                yield f"host slot {slot} is loaded from and free"
