"""A node of the radix tree: a run of whole pages that always occur together.

All pages of a node have the same residences:

    refs   host      on the device alone; on the device and the host; on the host alone
    ----   ----      evicting a page from the device makes the second the third ("demote"),
     x               loading it or computing it again makes the third the second ("adopt")
     x      x
            x        parents of device pages are on the device

Further components (`extra`) are there or not page by page.
"""

from __future__ import annotations

from array import array

import numpy as np

from phloem.cache.chain import KEY_BYTES
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
        "host",
        "id",
        "key",
        "last_access",
        "locks",
        "namespace",
        "parent",
        "refs",
        "stored",
    )

    def __init__(
        self, node_id: int, parent: Node | None, namespace: bytes, key: bytes, refs: bytes
    ) -> None:
        self.id = node_id
        self.parent = parent
        self.namespace = namespace
        self.key = key  # packed tokens, a multiple of the page
        self.refs = refs  # packed int64, one per page; empty: not on the device
        self.host = b""  # packed int64 slots of the host arena, one per page; empty: not there
        self.stored = False  # known to be in storage
        self.chain = b""  # packed content keys, one per page
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.hits = 0
        self.last_access = 0
        self.detached = False
        self.extra: tuple[ExtraState, ...] = ()

    @property
    def num_pages(self) -> int:
        return len(self.chain) // KEY_BYTES

    @property
    def residence(self) -> tuple[bool, bool, bool]:
        """On the device, on the host, in storage."""
        return bool(self.refs), bool(self.host), self.stored

    def host_list(self) -> list[int]:
        """The host slots as ints."""
        return array("q", self.host).tolist()

    def ref_list(self) -> list[int]:
        """The refs as ints."""
        return array("q", self.refs).tolist()

    def __repr__(self) -> str:
        return f"Node({self.id}, {self.num_pages} pages, {self.locks} locks)"
