"""Components: kinds of cached state with a life of their own on the same tokens.

The first component is the spine: it is present on every page of every node, and its state lies in
the node itself (`Node.refs`, `Node.locks`). Further components keep theirs in `Node.extra`, in the
order of the tree's component list, and may be absent page by page (ABSENT: a tombstone). Who locks
such a page, and how often, is known by its ref (`cache/window_state.py`), so nodes are split,
joined and lengthened without regard to it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ABSENT", "ABSENT_BYTES", "FULL", "Component", "ExtraState", "absent_pages"]

ABSENT = -1
# No packed ref has eight such bytes in a row, aligned or not: its uppermost byte is an owner's.
ABSENT_BYTES = b"\xff" * 8


@dataclass(frozen=True, slots=True)
class Component:
    """What the tree must know of a component: how many last tokens later ones may read."""

    name: str
    retention: int | None  # None: all of them


FULL = Component("full", None)


def absent_pages(num_pages: int) -> bytes:
    """`num_pages` places with nothing in them."""
    return ABSENT_BYTES * num_pages


class ExtraState:
    """One further component's state on one node: a ref or ABSENT per page, on device and host.

    `host` is empty where no page of the node is on the host.
    """

    __slots__ = ("host", "refs")

    def __init__(self, refs: bytes, host: bytes = b"") -> None:
        self.refs = refs
        self.host = host

    @classmethod
    def absent(cls, num_pages: int) -> ExtraState:
        """The state of a node of `num_pages` pages that has nothing of this component."""
        return cls(absent_pages(num_pages))

    def split(self, num_bytes: int) -> ExtraState:
        """Cut off and return the upper part, `num_bytes` of refs."""
        upper = ExtraState(self.refs[:num_bytes], self.host[:num_bytes])
        self.refs = self.refs[num_bytes:]
        self.host = self.host[num_bytes:]
        return upper

    def grow(self, num_pages: int) -> None:
        """More pages at the end, with nothing in them."""
        self.refs += absent_pages(num_pages)
        if self.host:
            self.host += absent_pages(num_pages)

    def cut(self, num_bytes: int) -> None:
        """Keep the first `num_bytes` of refs alone."""
        self.refs = self.refs[:num_bytes]
        self.host = self.host[:num_bytes]

    def join(self, run: Sequence[ExtraState]) -> None:
        """Become the whole of `run`, in order."""
        if any(part.host for part in run):
            parts = [part.host or ABSENT_BYTES * (len(part.refs) // 8) for part in run]
            self.host = b"".join(parts)
        self.refs = b"".join([part.refs for part in run])

    def ref_list(self) -> list[int]:
        """The refs as ints, ABSENT where there is none."""
        return array("q", self.refs).tolist()

    def host_list(self) -> list[int]:
        """The host slots as ints, ABSENT where there is none."""
        return array("q", self.host).tolist()
