"""A node of the radix tree: a run of whole pages that always occur together."""

from __future__ import annotations

from array import array

import numpy as np

from phloem.cache.components import ExtraState

__all__ = ["REF_BYTES", "REF_DTYPE", "Node"]

REF_BYTES = 8
REF_DTYPE = np.dtype(np.int64)  # made once: converting the type costs as much as the array


class Node:
    """One edge and its end. Only `RadixTree` writes to it.

    `locks` counts the reservations at or below the node, so a parent's count is never below a
    child's. `last_access` is log time: of the last unlock that passed.
    """

    __slots__ = (
        "chain",
        "children",
        "detached",
        "extra",
        "hits",
        "id",
        "key",
        "last_access",
        "locks",
        "namespace",
        "parent",
        "refs",
    )

    def __init__(
        self, node_id: int, parent: Node | None, namespace: bytes, key: bytes, refs: bytes
    ) -> None:
        self.id = node_id
        self.parent = parent
        self.namespace = namespace
        self.key = key  # packed tokens, a multiple of the page
        self.refs = refs  # packed int64, one per page
        self.chain = b""  # packed content keys, one per page
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.hits = 0
        self.last_access = 0
        self.detached = False
        self.extra: tuple[ExtraState, ...] = ()

    @property
    def num_pages(self) -> int:
        return len(self.refs) // REF_BYTES

    def ref_list(self) -> list[int]:
        """The refs as ints."""
        return array("q", self.refs).tolist()

    def __repr__(self) -> str:
        return f"Node({self.id}, {self.num_pages} pages, {self.locks} locks)"
