"""Which unlocked pages go first: the leader's business alone, behind a small protocol.

A new policy is a new class and a line in EVICTION_POLICIES.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

from phloem.cache.node import REF_BYTES, Node
from phloem.core.errors import ConfigError

__all__ = ["EVICTION_POLICIES", "EvictionPolicy", "LruPolicy", "make_eviction_policy"]


class EvictionPolicy(Protocol):
    """Follows which nodes are unlocked, and names victims among them, children before parents."""

    def unlocked(self, nodes: Iterable[Node]) -> None:
        """Nobody locks these any longer; they come lowest first."""
        ...

    def locked(self, nodes: Iterable[Node]) -> None:
        """Somebody locks these now, or they were merged into the node below them."""
        ...

    def evicted(self, node_ids: Iterable[int]) -> None:
        """These victims are gone."""
        ...

    def victims(self, num_pages: int) -> list[int]:
        """Node ids and page counts in turn, `num_pages` in all or everything that there is.

        Only the last victim may lose less than all its pages: it loses its tail.
        """
        ...

    def order(self) -> list[Node]:
        """All unlocked nodes, the next victim first (for checks)."""
        ...


class LruPolicy:
    """The least recently released page first, and of one path the last page first.

    Why a plain list of all unlocked nodes is enough. A path is unlocked from its end upwards, and a
    node is unlocked only after all below it; so in order of unlocking every node comes after its
    whole subtree, and the head of the list is always a leaf. Each step is O(1).
    """

    __slots__ = ("_nodes",)

    def __init__(self) -> None:
        self._nodes: OrderedDict[int, Node] = OrderedDict()

    def unlocked(self, nodes: Iterable[Node]) -> None:
        mine = self._nodes
        for node in nodes:
            mine[node.id] = node

    def locked(self, nodes: Iterable[Node]) -> None:
        mine = self._nodes
        for node in nodes:
            del mine[node.id]

    def evicted(self, node_ids: Iterable[int]) -> None:
        mine = self._nodes
        for node_id in node_ids:
            del mine[node_id]

    def victims(self, num_pages: int) -> list[int]:
        out: list[int] = []
        for node in self._nodes.values():
            if num_pages <= 0:
                break
            pages = min(len(node.refs) // REF_BYTES, num_pages)
            out.append(node.id)
            out.append(pages)
            num_pages -= pages
        return out

    def order(self) -> list[Node]:
        return list(self._nodes.values())


EVICTION_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LruPolicy}


def make_eviction_policy(name: str) -> EvictionPolicy:
    """A fresh policy by its name. Raises ConfigError if there is none of that name."""
    factory = EVICTION_POLICIES.get(name)
    if factory is None:
        known = ", ".join(sorted(EVICTION_POLICIES))
        raise ConfigError(f"unknown eviction policy {name!r}; known: {known}")
    return factory()
