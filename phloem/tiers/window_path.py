"""What a path of the tree holds of window state, page by page, on the device and on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phloem.cache.components import ABSENT, absent_pages
from phloem.cache.node import REF_BYTES, REF_DTYPE, Node

__all__ = ["WindowPath"]

_Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WindowPath:
    """Refs and host slots of the pages from the beginning of a prompt on, (n,) both, ABSENT where
    there is none; `nodes` are those of the path, root first, with the first page of each."""

    refs: _Places
    slots: _Places
    nodes: tuple[tuple[Node, int], ...]

    @classmethod
    def down_to(cls, node: Node, num_pages: int | None = None) -> WindowPath:
        """The path to the end of `node`, or of its first `num_pages` pages."""
        nodes: list[Node] = []
        step: Node | None = node
        while step is not None and step.parent is not None:
            nodes.append(step)
            step = step.parent
        nodes.reverse()
        counts = [each.num_pages for each in nodes]
        if counts and num_pages is not None:
            counts[-1] = num_pages
        refs, slots = [], []
        for each, count in zip(nodes, counts, strict=True):
            state, size = each.extra[0], count * REF_BYTES
            refs.append(state.refs[:size] or absent_pages(count))
            slots.append(state.host[:size] or absent_pages(count))
        firsts = np.cumsum([0, *counts])[:-1].tolist()
        return cls(_places(refs), _places(slots), tuple(zip(nodes, firsts, strict=True)))

    def __len__(self) -> int:
        return len(self.refs)

    @property
    def on_host(self) -> npt.NDArray[np.bool_]:
        there: npt.NDArray[np.bool_] = self.slots != ABSENT
        return there

    @property
    def anywhere(self) -> npt.NDArray[np.bool_]:
        """On the device or on the host."""
        there: npt.NDArray[np.bool_] = self.on_host | (self.refs != ABSENT)
        return there

    def place_of(self, page: int) -> tuple[Node, int]:
        """The node that has the path's page, and which of its own pages it is."""
        for node, first in reversed(self.nodes):
            if first <= page:
                return node, page - first
        raise IndexError(f"page {page} of a path of {len(self)}")


def _places(parts: list[bytes]) -> _Places:
    return np.frombuffer(b"".join(parts), REF_DTYPE)
