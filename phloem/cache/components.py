"""Components: kinds of cached state with a life of their own on the same tokens.

The first component is the spine: it is present on every page of every node, and its state lies in
the node itself (`Node.refs`, `Node.locks`). Further components keep theirs in `Node.extra`, in the
order of the tree's component list, and may be absent page by page (ABSENT: a tombstone).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

__all__ = ["ABSENT", "FULL", "Component", "ExtraState"]

ABSENT = -1


@dataclass(frozen=True, slots=True)
class Component:
    """What the tree must know of a component: how many last tokens later ones may read."""

    name: str
    retention: int | None  # None: all of them


FULL = Component("full", None)


class ExtraState:
    """One further component's state on one node: a ref or ABSENT per page, and its locks."""

    __slots__ = ("locks", "refs")

    def __init__(self, refs: bytes, locks: int = 0) -> None:
        self.refs = refs
        self.locks = locks

    @classmethod
    def absent(cls, num_pages: int) -> ExtraState:
        """The state of a node of `num_pages` pages that has nothing of this component."""
        return cls(array("q", [ABSENT]).tobytes() * num_pages)

    def split(self, num_bytes: int) -> ExtraState:
        """Cut off and return the upper part, `num_bytes` of refs; both keep the locks."""
        upper = ExtraState(self.refs[:num_bytes], self.locks)
        self.refs = self.refs[num_bytes:]
        return upper
