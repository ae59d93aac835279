"""What must hold of replicas at any moment between two calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from phloem.core.refs import owner_of

if TYPE_CHECKING:
    from phloem.cache.prefix_cache import PrefixCache

__all__ = ["replica_violations"]


def replica_violations(cache: PrefixCache) -> Iterator[str]:
    """Every broken rule, in words."""
    replicas = cache.state.replicas
    alive = {ref for node in cache.state.tree.nodes.values() for ref in node.ref_list()}
    seen: Counter[tuple[int, int]] = Counter()
    for page, replica in replicas.pairs():
        owner = owner_of(replica)
        seen[page, owner] += 1
        if page not in alive:
            yield f"replica {replica} has outlived page {page}"
        if owner == owner_of(page):
            yield f"page {page} has a replica on its own rank"
        if replicas.replica(page, owner) != replica:
            yield f"replica {replica} is not found under its page {page}"
    for (page, owner), count in seen.items():
        if count > 1:
            yield f"rank {owner} has {count} replicas of page {page}"
    if replicas.num_pages != seen.total():
        yield f"{replicas.num_pages} replicas are counted, there are {seen.total()}"
    ledger = cache.leader.replicas
    if ledger is None:
        if replicas.num_pages:
            yield "there are replicas, and nobody keeps them"
        return
    yield from ledger.violations()
