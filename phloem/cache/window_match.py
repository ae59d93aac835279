"""What is cached of a prompt where layers have windows: not one length but a set of them.

    full     |=== device ===|=== host alone ===|      `full_pages`, then what the host alone has
    window   ..|==|.....|==|....|==|                  alive on the device, or on the host
                  ^        ^       ^
                  valid lengths    a loadable one: its tail, or its full pages, are on the host

`num_pages` is the longest valid length on the device, so that code which knows no windows stays
right; the rest of what is there is offered beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
import numpy.typing as npt

from phloem.cache.components import ABSENT_BYTES, absent_pages
from phloem.cache.match import Match
from phloem.cache.node import REF_BYTES, REF_DTYPE, Node
from phloem.cache.window import WindowConfig
from phloem.core.tokens import TOKEN_BYTES

__all__ = ["WindowMatch", "runs_of"]


def runs_of(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """(start, stop) of every run of True in (n,), in order."""
    padded = np.zeros(len(mask) + 2, np.bool_)
    padded[1:-1] = mask
    edges = np.flatnonzero(padded[1:] != padded[:-1]).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


class WindowMatch(Match):
    """A match on a tree with windows. `full_node`: where its part on the device ends."""

    __slots__ = (
        "_loadable",
        "_valid",
        "config",
        "full_node",
        "full_node_pages",
        "host_full_pages",
        "page_size",
        "tail_pages",
    )

    def __init__(
        self,
        namespace: bytes,
        tokens: bytes,
        end: int,
        found: tuple[Node, int, int],
        page_bytes: int,
        epoch: int,
        config: WindowConfig,
    ) -> None:
        super().__init__(namespace, tokens, end, found, page_bytes, epoch)
        self.config = config
        self.page_size = page_bytes // TOKEN_BYTES
        self.tail_pages = config.tail_pages(self.page_size)
        self._valid: list[int] | None = None
        self._loadable: list[int] | None = None
        self.full_node, self.full_node_pages = self.node, self.node_pages
        self.host_full_pages = self.host_pages  # on the host alone in the full component
        if not self._tail_is_alive():
            self.end_at(self._longest(self.window_refs() >= 0))
        if not config.host_pages and self.tail_pages:
            self.host_pages = 0  # no tail can be loaded
        elif self.num_pages < self.full_pages + self.host_full_pages:
            self.host_pages = self._longest(self._window_anywhere()) - self.num_pages

    @property
    def valid_lengths(self) -> Sequence[int]:
        """All lengths in pages after which one can go on with what the device holds, ascending."""
        if self._valid is None:
            self._valid = self._lengths(self.window_refs() >= 0)
        return self._valid

    @property
    def loadable_lengths(self) -> Sequence[int]:
        """The same with what can be loaded from the host; the valid ones are among them."""
        if self._loadable is None:
            self._loadable = self._lengths(self._window_anywhere())
        return self._loadable

    def restart_start(self) -> int:
        """The position from which to compute so that all of `full_pages` is of use.

        That is the longest valid length, or, if it is later, the last position from which the tail
        of `full_pages` can be made without any window state (see `WindowConfig.deep_start`).
        """
        deep = self.config.deep_start(self.full_pages, self.page_size)
        return max(deep, self.num_pages * self.page_size)

    def window_refs(self) -> npt.NDArray[np.int64]:
        """The window component's refs (full_pages,), ABSENT where there is none."""
        node: Node | None = self.full_node
        parts: list[bytes] = []
        size = self.full_node_pages * REF_BYTES
        while node is not None and node.parent is not None:
            refs = node.extra[0].refs
            parts.append(refs if size == len(refs) else refs[:size])
            node = node.parent
            size = len(node.chain)
        parts.reverse()
        return np.frombuffer(b"".join(parts), REF_DTYPE)

    def window_slots(self) -> npt.NDArray[np.int64]:
        """Host slots of window state (full pages on device and host,), ABSENT where none is."""
        step: Node | None = self.host_node or self.full_node
        pages = self.full_node_pages if self.host_node is None else self.host_node_pages
        parts: list[bytes] = []
        while step is not None and step.parent is not None:
            parts.append(step.extra[0].host[: pages * REF_BYTES] or absent_pages(pages))
            step = step.parent
            pages = step.num_pages
        parts.reverse()
        return np.frombuffer(b"".join(parts), REF_DTYPE)

    def path_end(self) -> tuple[Node, int, int]:
        known = self.full_pages + self.host_full_pages
        if self.host_node is None:
            return self.full_node, self.full_node_pages, known
        return self.host_node, self.host_node_pages, known

    def packed_host_slots(self) -> bytes:
        """Host slots of the pages that are on the host alone in the full component."""
        node = self.host_node
        if node is None:
            return b""
        parts = [node.host[: self.host_node_pages * REF_BYTES]]
        while node.parent is not None and node.parent is not self.full_node:
            node = node.parent
            parts.append(node.host)
        parts.reverse()
        return b"".join(parts)

    def tail_refs(self, num_pages: int) -> bytes:
        """Packed window refs of the tail of the first `num_pages` pages, ABSENT where none is."""
        left = min(self.tail_pages, num_pages)
        parts: list[bytes] = []
        node, pages = self.cut(num_pages)
        while left > 0:
            start = max(0, pages - left)
            parts.append(node.extra[0].refs[start * REF_BYTES : pages * REF_BYTES])
            left -= pages - start
            if left > 0:
                assert node.parent is not None, "the tail is longer than the match"
                node = node.parent
                pages = node.num_pages
        parts.reverse()
        return b"".join(parts)

    def ending_at(self, num_pages: int) -> WindowMatch:
        """The same match, cut or prolonged to `num_pages` full pages on the device."""
        if num_pages == self.num_pages:
            return self
        other = copy(self)
        other.end_at(num_pages)
        return other

    def end_at(self, num_pages: int) -> None:
        """Move the end to after `num_pages` full pages on the device."""
        self.node, self.node_pages = self.cut(num_pages)
        self.num_pages = num_pages
        self.num_tokens = num_pages * self.page_size

    def cut(self, num_pages: int) -> tuple[Node, int]:
        """The node in which the first `num_pages` device pages end, and how many of its pages."""
        node, pages, left = self.full_node, self.full_node_pages, self.full_pages
        while left - pages >= num_pages and node.parent is not None:
            left -= pages
            node = node.parent
            pages = node.num_pages
        return node, pages - (left - num_pages)

    def _tail_is_alive(self) -> bool:
        """Whether the whole device part is a valid length: the way of most hits."""
        return ABSENT_BYTES not in self.tail_refs(self.full_pages)

    def _window_anywhere(self) -> npt.NDArray[np.bool_]:
        there = self.window_refs() >= 0
        if self.config.host_pages:
            on_host = self.window_slots() >= 0
            on_host[: len(there)] |= there
            return on_host
        return np.pad(there, (0, self.host_full_pages))

    def _longest(self, there: npt.NDArray[np.bool_]) -> int:
        """The last of `_lengths`, without the others."""
        if not self.tail_pages:
            return len(there)
        for start, stop in reversed(runs_of(there)):
            if not start or stop - start >= self.tail_pages:
                return stop
        return 0

    def _lengths(self, there: npt.NDArray[np.bool_]) -> list[int]:
        """After how many pages one can go on, given where window state is (num_pages,)."""
        if not self.tail_pages:
            return list(range(len(there) + 1))
        out = [0]
        for start, stop in runs_of(there):
            out.extend(range(start + self.tail_pages if start else 1, stop + 1))
        return out
