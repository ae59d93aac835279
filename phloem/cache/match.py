"""What is cached of a prompt: the answer to a question, owning nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phloem.cache.node import REF_BYTES, REF_DTYPE, Node
from phloem.core.refs import NO_REFS, PageRefs
from phloem.core.tokens import TOKEN_BYTES

__all__ = ["Match"]


class Match:
    """The longest committed prefix, as of `epoch`. Holds no lock: it may be out of date later.

    `num_pages` are on the device; `host_pages` further ones only on the host.

    `node` is the last device node reached and `node_pages` how many of its pages match, `host_node`
    and `host_node_pages` the same of the host part; `end` is how far (in bytes of `tokens`) the
    question went. For the cache, all of these are opaque to callers.
    """

    __slots__ = (
        "end",
        "epoch",
        "full_pages",
        "host_node",
        "host_node_pages",
        "host_pages",
        "namespace",
        "node",
        "node_pages",
        "num_pages",
        "num_tokens",
        "tokens",
    )

    def __init__(
        self,
        namespace: bytes,
        tokens: bytes,
        end: int,
        found: tuple[Node, int, int],
        page_bytes: int,
        epoch: int,
    ) -> None:
        self.namespace = namespace
        self.tokens = tokens
        self.end = end
        node, self.node_pages, matched = found
        self.node = node
        self.host_node: Node | None = None
        self.host_node_pages = self.host_pages = 0
        if not node.refs and node.parent is not None:
            self._take_off_host_part()
            matched -= self.host_pages * page_bytes
        self.num_tokens = matched // TOKEN_BYTES
        self.num_pages = self.full_pages = matched // page_bytes
        self.epoch = epoch

    def _take_off_host_part(self) -> None:
        """What lies on the host alone is the lower end of the path."""
        self.host_node, self.host_node_pages = self.node, self.node_pages
        step, pages = self.node, self.node_pages
        while not step.refs and step.parent is not None:
            self.host_pages += pages
            step = step.parent
            pages = step.num_pages
        self.node, self.node_pages = step, pages

    @property
    def valid_lengths(self) -> Sequence[int]:
        """All lengths in pages after which one can go on with what the device holds, ascending."""
        return range(self.num_pages + 1)

    @property
    def loadable_lengths(self) -> Sequence[int]:
        """The same with what can be loaded from the host."""
        return range(self.num_pages + self.host_pages + 1)

    def path_end(self) -> tuple[Node, int, int]:
        """The last node of what is known of the prompt on any tier, how many of its pages match,
        and how many pages that makes from the start.
        """
        known = self.num_pages + self.host_pages
        if self.host_node is None:
            return self.node, self.node_pages, known
        return self.host_node, self.host_node_pages, known

    def packed_refs(self) -> bytes:
        """The refs of the matched pages in order, packed. Valid while the match is."""
        node: Node | None = self.node
        size = self.node_pages * REF_BYTES
        if not size or node is None:
            return b""
        refs = node.refs if size == len(node.refs) else node.refs[:size]
        node = node.parent
        if node is None or node.parent is None:  # right below the root
            return refs
        parts = [refs]
        while node is not None:
            parts.append(node.refs)
            node = node.parent
        parts.reverse()
        return b"".join(parts)

    def packed_host_slots(self) -> bytes:
        """Host slots of the pages that are on the host alone, in order, packed."""
        node = self.host_node
        if node is None:
            return b""
        parts = [node.host[: self.host_node_pages * REF_BYTES]]
        while node.parent is not None and node.parent is not self.node:
            node = node.parent
            parts.append(node.host)
        parts.reverse()
        return b"".join(parts)

    def refs(self) -> PageRefs:
        """The pages, int64 (num_pages,), read-only. Valid while the match is."""
        packed = self.packed_refs()
        return np.frombuffer(packed, REF_DTYPE) if packed else NO_REFS
