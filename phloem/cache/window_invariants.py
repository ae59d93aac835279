"""What must hold of window state at any moment between two calls (DESIGN sections 4 and 6)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from phloem.cache.components import ABSENT
from phloem.cache.node import Node
from phloem.cache.prefix_cache import PrefixCache
from phloem.cache.window_host_invariants import window_host_violations
from phloem.cache.window_ledger import WindowLedger
from phloem.core.refs import owner_of, slot_of

__all__ = ["window_violations"]


def window_violations(cache: PrefixCache, *, idle: bool) -> list[str]:
    """Every broken rule of the window component, in words."""
    ledger = cache.leader.window
    if ledger is None:
        return []
    out: list[str] = []
    for rule in (_places, _pages, _locks, _beside, _owners):
        out.extend(rule(cache, ledger))
    out.extend(_tables(cache))
    out.extend(_tails(ledger))
    out.extend(window_host_violations(cache, idle=idle))
    if idle and ledger.state.locks:
        out.append(f"{len(ledger.state.locks)} window pages are locked at idle")
    if idle and ledger.free_pages + ledger.evictable_pages != ledger.total_pages:
        out.append("window pages are held at idle")
    return out


def _nodes(cache: PrefixCache) -> list[Node]:
    tree = cache.state.tree
    return [node for node in tree.nodes.values() if node is not tree.root]


def _places(cache: PrefixCache, ledger: WindowLedger) -> Iterator[str]:
    """A page lies where its home says, on a node that is on the device in the full component."""
    found: dict[int, Node] = {}
    for node in _nodes(cache):
        for ref in node.extra[0].ref_list():
            if ref == ABSENT:
                continue
            if ref in found:
                yield f"window page {ref} is in two places"
            if not node.refs:
                yield f"{node} has window state on the device and no full state there"
            found[ref] = node
    if found != ledger.state.home:
        yield "window pages are not at home"


def _pages(cache: PrefixCache, ledger: WindowLedger) -> Iterator[str]:
    """Every slot is in exactly one place: free, in the tree, or one request's own."""
    places: Counter[int] = Counter(ledger.state.home.keys())
    for reservation in cache.leader.reservations:
        if reservation.window is not None:
            places.update(reservation.window.own_pages())
    for ref, count in places.items():
        if count > 1:
            yield f"window page {ref} is in {count} places"
        if not ledger.state.allocators[owner_of(ref)].is_used(slot_of(ref)):
            yield f"window page {ref} is in use but free"
    free = sum(allocator.num_free for allocator in ledger.state.allocators)
    if free != ledger.free_pages:
        yield f"{ledger.free_pages} window pages count as free, {free} are"
    if len(places) + free != ledger.total_pages:
        yield f"{len(places)} used + {free} free window pages are not {ledger.total_pages}"


def _locks(cache: PrefixCache, ledger: WindowLedger) -> Iterator[str]:
    """A page's locks are those of the leases that share it; the full state below is locked too."""
    expected: Counter[int] = Counter()
    for reservation in cache.leader.reservations:
        if reservation.window is not None:
            expected.update(reservation.window.shared_pages())
    for backup in cache.leader.backups:
        expected.update(backup.window_pages)
    if expected != Counter(ledger.state.locks):
        yield "locks of window pages are not those of the leases"
    for ref, count in ledger.state.locks.items():
        node = ledger.state.home.get(ref)
        if node is None:
            yield f"window page {ref} is locked and not in the tree"
        elif count > node.locks:
            yield f"{node} has fewer locks than its window page {ref}"


def _beside(cache: PrefixCache, _ledger: WindowLedger) -> Iterator[str]:
    """A page has the owner of its full page.

    But for a request's own page where another request has committed the full page first: that one
    took its place in the table, and neither is written any more.
    """
    for node in _nodes(cache):
        for full, ref in zip(node.ref_list(), node.extra[0].ref_list(), strict=False):
            if ref != ABSENT and owner_of(ref) != owner_of(full):
                yield f"window page {ref} of {node} has another owner than page {full}"
    for reservation in cache.leader.reservations:
        lease = reservation.window
        if lease is None:
            continue
        first = max(lease.low, reservation.num_committed_pages)
        table, full = lease.refs.tolist(), reservation.refs.tolist()
        for page in range(first, len(table)):
            if owner_of(table[page]) != owner_of(full[page]):
                yield f"page {page} of a window table has another owner than the full page"


def _owners(cache: PrefixCache, ledger: WindowLedger) -> Iterator[str]:
    """Free + evictable + locked = pool size, for each owner."""
    used, idle = Counter[int](), Counter[int]()
    for ref in ledger.state.home:
        (used if ref in ledger.state.locks else idle)[owner_of(ref)] += 1
    for reservation in cache.leader.reservations:
        if reservation.window is not None:
            used.update(map(owner_of, reservation.window.own_pages()))
    for allocator in ledger.state.allocators:
        owner = allocator.owner
        if ledger.state.idle_pages[owner] != idle[owner]:
            yield f"owner {owner}: {ledger.state.idle_pages[owner]} window pages count as evictable"
        if allocator.num_free + idle[owner] + used[owner] != allocator.capacity:
            yield f"owner {owner}: free + evictable + locked window pages are not the pool"


def _tables(cache: PrefixCache) -> Iterator[str]:
    """What a lease shares is the tree's, page by page; it holds a run that ends where it says."""
    for reservation in cache.leader.reservations:
        lease = reservation.window
        if lease is None:
            yield "a reservation has no window side"
            continue
        table = lease.refs.tolist()
        if any(ref != ABSENT for ref in table[: lease.low]) or ABSENT in table[lease.low :]:
            yield "a lease does not hold exactly the run that it says"
        path: list[int] = []
        node: Node | None = reservation.node if reservation.num_shared_pages else None
        while node is not None:
            path[:0] = node.extra[0].ref_list() if node.extra else []
            node = node.parent
        own = set(lease.own_pages())
        for page in range(lease.low, len(table)):
            if table[page] not in own and path[page : page + 1] != [table[page]]:
                yield f"page {page} of a window table is neither its own nor the tree's"


def _tails(ledger: WindowLedger) -> Iterator[str]:
    """Tails consist of pages of the tree; the unlocked pages of none are the leftovers."""
    needs: set[int] = set()
    names = set()
    for tail in ledger.tails.tails():
        if tail.kind is not ledger.tails.kind_of(tail):
            yield f"the tail of {tail.pages[-1]} has another class by now"
        if not set(tail.pages) <= ledger.state.home.keys():
            yield f"the tail of {tail.pages[-1]} has pages that are not in the tree"
        if tail.pages[-1] in names:
            yield f"two tails end with {tail.pages[-1]}"
        names.add(tail.pages[-1])
        needs.update(tail.pages)
    left = ledger.state.home.keys() - needs - ledger.state.locks.keys()
    if set(ledger.tails.leftovers()) != left:
        yield "the leftovers are not the unlocked pages of no tail"
    wanted = {page for page in ledger.state.home if ledger.tails.is_wanted(page)}
    if wanted != needs:
        yield "the pages that tails need are counted wrong"
