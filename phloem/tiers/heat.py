"""Heat: how often a page was used, remembered across its eviction.

A page is named by its content key, which is a hint here and decides nothing but a copy.
"""

from __future__ import annotations

from collections import OrderedDict

from phloem.cache.chain import KEY_BYTES
from phloem.cache.node import Node

__all__ = ["Heat"]


class Heat:
    """Counts uses by the content key of a node's last page; the coldest memory is forgotten."""

    __slots__ = ("_capacity", "_uses", "threshold")

    def __init__(self, threshold: int, capacity: int = 1 << 18) -> None:
        self.threshold = threshold
        self._capacity = capacity
        self._uses: OrderedDict[bytes, int] = OrderedDict()

    def warm(self, node: Node) -> None:
        """The path down to `node` was used once more."""
        step: Node | None = node
        while step is not None and step.parent is not None:
            key = step.chain[-KEY_BYTES:]
            uses = self._uses.pop(key, 0)
            self._uses[key] = uses + 1
            step = step.parent
        while len(self._uses) > self._capacity:
            self._uses.popitem(last=False)

    def is_hot(self, node: Node) -> bool:
        """Whether the node has been used often enough to be worth a copy."""
        return max(node.hits, self._uses.get(node.chain[-KEY_BYTES:], 0)) >= self.threshold
