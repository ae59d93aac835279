"""Which unlocked pages go first: the leader's business alone, behind a small protocol.

A new policy is a new class and a line in EVICTION_POLICIES.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

from phloem.cache.chain import KEY_BYTES
from phloem.cache.node import Node
from phloem.core.errors import ConfigError

__all__ = ["EVICTION_POLICIES", "EvictionPolicy", "LruPolicy", "make_eviction_policy"]


class EvictionPolicy(Protocol):
    """Follows which nodes are unlocked, and names victims among them, children before parents."""

    def unlocked(self, nodes: Iterable[Node]) -> None:
        """Nobody locks these any longer; they come lowest first."""
        ...

    def locked(self, nodes: Iterable[Node]) -> None:
        """Somebody locks these now, or they are gone: evicted, or merged into the node below."""
        ...

    def victims(self, num_pages: int) -> list[tuple[Node, int]]:
        """Nodes and how many pages each loses: `num_pages` in all, or everything that there is.

        A node that loses less than all its pages loses its tail, and is the last victim.
        """
        ...

    def replaced(self, victim: Node, rest: Node) -> None:
        """The next victim lost its tail: what is left of it, `rest`, is in its place."""
        ...

    def oldest(self) -> Iterable[Node]:
        """All unlocked nodes, the next victim first."""
        ...

    def order(self) -> list[Node]:
        """The same as a list (for checks)."""
        ...


class LruPolicy:
    """The least recently released page first, and of one path the last page first.

    Why a plain list of all unlocked nodes is enough. A path is unlocked from its end upwards, and a
    node is unlocked only after all below it; so in order of unlocking every node comes after its
    whole subtree, and the head of the list is always a leaf. Each step is O(1).
    """

    __slots__ = ("_nodes",)

    def __init__(self) -> None:
        self._nodes: OrderedDict[Node, None] = OrderedDict()

    def unlocked(self, nodes: Iterable[Node]) -> None:
        mine = self._nodes
        for node in nodes:
            mine[node] = None

    def locked(self, nodes: Iterable[Node]) -> None:
        mine = self._nodes
        for node in nodes:
            del mine[node]

    def victims(self, num_pages: int) -> list[tuple[Node, int]]:
        out: list[tuple[Node, int]] = []
        if num_pages <= 0:
            return out
        for node in self._nodes:
            pages = len(node.chain) // KEY_BYTES
            if pages >= num_pages:
                out.append((node, num_pages))
                break
            out.append((node, pages))
            num_pages -= pages
        return out

    def replaced(self, victim: Node, rest: Node) -> None:
        del self._nodes[victim]
        self._nodes[rest] = None
        self._nodes.move_to_end(rest, last=False)

    def oldest(self) -> Iterable[Node]:
        return self._nodes

    def order(self) -> list[Node]:
        return list(self._nodes)


EVICTION_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LruPolicy}


def make_eviction_policy(name: str) -> EvictionPolicy:
    """A fresh policy by its name. Raises ConfigError if there is none of that name."""
    factory = EVICTION_POLICIES.get(name)
    if factory is None:
        known = ", ".join(sorted(EVICTION_POLICIES))
        raise ConfigError(f"unknown eviction policy {name!r}; known: {known}")
    return factory()
