"""What must hold of a cache at any moment between two calls (DESIGN section 4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from phloem.cache.chain import chain_keys, unpack_keys
from phloem.cache.host_invariants import host_violations
from phloem.cache.node import REF_BYTES, Node
from phloem.cache.prefix_cache import PrefixCache
from phloem.cache.replica_invariants import replica_violations
from phloem.cache.reservation import Reservation
from phloem.cache.tree import RadixTree
from phloem.cache.window_invariants import window_violations
from phloem.core.refs import owner_of, slot_of

__all__ = ["check_invariants", "violations"]


def check_invariants(cache: PrefixCache, *, idle: bool = False) -> None:
    """Raise AssertionError naming every rule that is broken. `idle`: no request runs."""
    found = violations(cache, idle=idle)
    if found:
        raise AssertionError("; ".join(found[:20]))


def violations(cache: PrefixCache, *, idle: bool = False) -> list[str]:
    """Every broken rule, in words."""
    out: list[str] = []
    for rule in _RULES:
        out.extend(rule(cache))
    out.extend(host_violations(cache, idle=idle))
    out.extend(window_violations(cache, idle=idle))
    out.extend(replica_violations(cache))
    if idle:
        if cache.leader.reservations:
            out.append(f"{len(cache.leader.reservations)} reservations are open at idle")
        if cache.locked_pages:
            out.append(f"{cache.locked_pages} pages are locked at idle")
    return out


def _nodes(tree: RadixTree) -> list[Node]:
    return [node for node in tree.nodes.values() if node is not tree.root]


def _child_key(tree: RadixTree, node: Node) -> bytes:
    page = node.key[: tree.page_bytes]
    return node.namespace + page if node.parent is tree.root else page


def _shape(cache: PrefixCache) -> Iterator[str]:
    """Parents and children agree."""
    tree = cache.state.tree
    for node in tree.nodes.values():
        for key, child in node.children.items():
            if child.parent is not node or tree.nodes.get(child.id) is not child:
                yield f"{child} is a child of {node}, which is not its parent"
            if key != _child_key(tree, child):
                yield f"{child} is filed under a wrong first page"
            if child.namespace != node.namespace and node is not tree.root:
                yield f"{child} changes the namespace"
            if child.last_access > node.last_access and node is not tree.root:
                yield f"{child} was used after its parent"


def _edges(cache: PrefixCache) -> Iterator[str]:
    """Every node hangs on a node, and holds whole pages."""
    tree = cache.state.tree
    for node in _nodes(tree):
        parent = node.parent
        if parent is None or tree.nodes.get(parent.id) is not parent:
            yield f"{node} hangs on nothing"
            continue
        linked = parent.children.get(_child_key(tree, node)) is node
        if linked == (node.detached and parent is tree.root):
            yield f"{node} is {'still' if linked else 'not'} among its parent's children"
        if not node.key or len(node.key) % tree.page_bytes:
            yield f"{node} holds no whole pages"
        elif len(node.key) // tree.page_bytes != (len(node.refs or node.host) // REF_BYTES):
            yield f"{node} has tokens for {len(node.key) // tree.page_bytes} pages"
        if node.detached and not node.locks:
            yield f"{node} is detached and not locked"


def _locks(cache: PrefixCache) -> Iterator[str]:
    """A node's locks are those of the reservations that end at or below it."""
    tree = cache.state.tree
    expected: Counter[int] = Counter()
    for reservation in cache.leader.reservations:
        node: Node | None = reservation.node if reservation.num_shared_pages else None
        while node is not None and node is not tree.root:
            expected[node.id] += 1
            node = node.parent
    for backup in cache.leader.backups:
        node = backup.node
        while node is not None and node is not tree.root:
            expected[node.id] += 1
            node = node.parent
    for node in _nodes(tree):
        if node.locks != expected[node.id]:
            yield f"{node} should have {expected[node.id]} locks"


def _pages(cache: PrefixCache) -> Iterator[str]:
    """Every slot is in exactly one place: free, in one node, one request's own, or a replica."""
    places: Counter[int] = Counter(replica for _, replica in cache.state.replicas.pairs())
    for node in _nodes(cache.state.tree):
        places.update(node.ref_list())
    for reservation in cache.leader.reservations:
        places.update(reservation.refs[reservation.num_shared_pages :].tolist())
    for ref, count in places.items():
        if count > 1:
            yield f"page {ref} is in {count} places"
        owner = owner_of(ref)
        allocators = cache.state.allocators
        if owner >= len(allocators) or not allocators[owner].is_used(slot_of(ref)):
            yield f"page {ref} is in use but free"
    for allocator in cache.state.allocators:
        free = allocator.free_slots()
        if len(set(free)) != len(free) or any(allocator.is_used(slot) for slot in free):
            yield f"owner {allocator.owner}: the free list is wrong"
        if len(free) + allocator.capacity - allocator.num_touched != allocator.num_free:
            yield f"owner {allocator.owner}: the free list is too long or too short"


def _owners(cache: PrefixCache) -> Iterator[str]:
    """Free + evictable + locked + replicas = pool size, for each owner."""
    evictable, locked = Counter[int](), Counter[int]()
    for node in _nodes(cache.state.tree):
        owners = map(owner_of, node.ref_list())
        (locked if node.locks else evictable).update(owners)
    for reservation in cache.leader.reservations:
        locked.update(map(owner_of, reservation.refs[reservation.num_shared_pages :].tolist()))
    for allocator in cache.state.allocators:
        owner, copies = allocator.owner, cache.state.replicas.count(allocator.owner)
        parts = (allocator.num_free, evictable[owner], locked[owner], copies)
        if sum(parts) != allocator.capacity:
            yield (
                f"owner {owner}: {parts[0]} free + {parts[1]} evictable + {parts[2]} locked pages "
                f"+ {copies} replicas are not {allocator.capacity}"
            )
    running = [r.refs for r in cache.leader.reservations if not r.closed and r.num_pages]
    ends = Counter(owner_of(int(refs[-1])) for refs in running)
    for owner, count in enumerate(cache.leader.ends):
        if len(cache.leader.ends) > 1 and count != ends[owner]:
            yield f"owner {owner}: {count} requests count as ending there, {ends[owner]} do"
    if sum(cache.state.room()) != cache.free_pages:
        yield f"{cache.free_pages} pages count as free, the allocators say otherwise"


def _tables(cache: PrefixCache) -> Iterator[str]:
    """The shared part of a page table is the tree's path, page by page."""
    for reservation in cache.leader.reservations:
        if reservation.closed and not reservation.is_loading:
            yield "a closed reservation is still listed"
        shared = reservation.num_shared_pages
        committed = reservation.num_committed_pages
        restarted = reservation.window is not None  # then what is shared may be computed again
        if not (restarted or shared <= committed) or committed > reservation.num_pages:
            yield "a reservation has committed more pages than it has"
        if reservation.refs[:shared].tolist() != _path_refs(reservation):
            yield f"a page table differs from the tree above {reservation.node}"


def _path_refs(reservation: Reservation) -> list[int]:
    parts: list[list[int]] = []
    node: Node | None = reservation.node if reservation.num_shared_pages else None
    while node is not None:
        parts.append(node.ref_list())
        node = node.parent
    return [ref for part in reversed(parts) for ref in part]


def _counters(cache: PrefixCache) -> Iterator[str]:
    """Sums kept on the way equal sums made now."""
    tree = cache.state.tree
    nodes = _nodes(tree)
    total = sum(len(node.refs) // REF_BYTES for node in nodes)
    locked = sum(len(node.refs) // REF_BYTES for node in nodes if node.locks)
    if tree.total_pages != total:
        yield f"the tree counts {tree.total_pages} pages, it has {total}"
    if tree.locked_pages != locked:
        yield f"the tree counts {tree.locked_pages} locked pages, it has {locked}"
    own = sum(r.num_pages - r.num_shared_pages for r in cache.leader.reservations)
    if cache.locked_pages != locked + own:
        yield f"{cache.locked_pages} pages count as locked, {locked} + {own} are"
    if cache.free_pages + cache.evictable_pages + cache.locked_pages != cache.total_pages:
        yield "free + evictable + locked is not the pool"
    if cache.leader.log.position != cache.state.now:
        yield "the log and the state disagree about the time"


def _order(cache: PrefixCache) -> Iterator[str]:
    """The policy knows exactly the unlocked nodes, and no parent before its child."""
    order = cache.leader.policy.order()
    place = {node.id: index for index, node in enumerate(order)}
    unlocked = {node.id for node in _nodes(cache.state.tree) if node.refs and not node.locks}
    if len(place) != len(order) or set(place) != unlocked:
        yield "the eviction policy's nodes are not the unlocked ones"
        return
    for node in order:
        parent = node.parent
        if parent is not None and place.get(parent.id, len(order)) < place[node.id]:
            yield f"{node} would go after its parent"


def _keys(cache: PrefixCache) -> Iterator[str]:
    """Content keys follow from the tokens."""
    tree = cache.state.tree
    for node in _nodes(tree):
        parent = node.parent
        if parent is None or (parent is not tree.root and not parent.chain):
            continue
        seed = tree.chain_key(parent, parent.num_pages, node.namespace)
        if unpack_keys(node.chain) != chain_keys(tree.hasher, seed, node.key, tree.page_bytes):
            yield f"{node} has wrong content keys"


def _extras(cache: PrefixCache) -> Iterator[str]:
    """Further components have a place for every page."""
    tree = cache.state.tree
    for node in _nodes(tree):
        if len(node.extra) != len(tree.components) - 1:
            yield f"{node} has {len(node.extra)} further components"
        for state in node.extra:
            if len(state.refs) != len(node.chain):
                yield f"{node} has {len(state.refs) // REF_BYTES} places of a component"


_RULES = (_shape, _edges, _locks, _pages, _owners, _tables, _counters, _order, _keys, _extras)
