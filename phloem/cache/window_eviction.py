"""Which window pages go first: the leader's business alone.

A prefix can be gone on from only where the last T pages before its end, its *tail*, are alive in
the window component; a page is of use through the tails it belongs to, and only with all of them.

    order     what                                            why
    1         pages of no tail                                of use only by chance
    2         tails kept every so many tokens (checkpoints)   nobody has ever gone on from there
    3         tails of prompt and sequence ends inside a run  somebody has gone on already
    4         tails of leaves and of branch points            somebody will

In a class the tail goes first that was used longest ago; the use of one refreshes none above it.
Of a tail go the pages that no other tail needs, one after another, before the next tail is touched.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable

from phloem.cache.components import ABSENT
from phloem.cache.node import REF_BYTES, Node
from phloem.cache.window_state import WindowState

__all__ = ["Tail", "TailClass", "Tails", "path_end"]


class TailClass(enum.IntEnum):
    """What goes earlier is lower."""

    CHECKPOINT = 0
    INTERIOR = 1
    END = 2


class Tail:
    """The last pages of a prefix, by their refs; the last one names it."""

    __slots__ = ("is_end", "kind", "pages")

    def __init__(self, pages: tuple[int, ...], *, is_end: bool) -> None:
        self.pages = pages
        self.is_end = is_end  # some prompt or sequence ended here, or somebody branched off
        self.kind = TailClass.CHECKPOINT


class Tails:
    """Follows which pages of the tree nobody locks, and which tails want them."""

    __slots__ = ("_classes", "_leftovers", "_needs", "_state", "_tails")

    def __init__(self, state: WindowState) -> None:
        self._state = state
        self._tails: dict[int, Tail] = {}  # by their last page
        self._needs: dict[int, int] = {}  # page -> how many tails it belongs to
        self._leftovers: OrderedDict[int, None] = OrderedDict()  # unlocked pages of no tail
        self._classes: tuple[OrderedDict[int, None], ...] = tuple(OrderedDict() for _ in TailClass)

    def want(self, pages: tuple[int, ...], *, is_end: bool) -> None:
        """These pages of the tree are the tail of a prefix, and it is being used."""
        if not pages:
            return
        tail = self._tails.get(pages[-1])
        if tail is None:
            tail = self._tails[pages[-1]] = Tail(pages, is_end=is_end)
            for page in pages:
                self._needs[page] = self._needs.get(page, 0) + 1
                self._leftovers.pop(page, None)
        else:
            assert tail.pages == pages, "one page ends two prefixes"
            tail.is_end = tail.is_end or is_end
            del self._classes[tail.kind][pages[-1]]
        tail.kind = self.kind_of(tail)
        self._classes[tail.kind][pages[-1]] = None

    def reconsider(self, page: int, *, used: bool) -> None:
        """What follows `page` has changed: if a tail ends there, it may be of another class."""
        tail = self._tails.get(page)
        if tail is None:
            return
        kind = self.kind_of(tail)
        if kind is not tail.kind:
            del self._classes[tail.kind][page]
            tail.kind = kind
            self._classes[kind][page] = None
            self._classes[kind].move_to_end(page, last=used)

    def locked(self, pages: Iterable[int]) -> None:
        """Somebody locks these pages."""
        for page in pages:
            self._leftovers.pop(page, None)

    def unlocked(self, pages: Iterable[int]) -> None:
        """Nobody locks these pages now."""
        for page in pages:
            if page not in self._needs:
                self._leftovers[page] = None

    def gone(self, pages: Iterable[int]) -> None:
        """These pages leave the tree, with the tails that end there."""
        pages = list(pages)
        for page in pages:
            if page in self._tails:
                self._drop(page)
        for page in pages:
            assert page not in self._needs, f"window page {page} leaves before a tail that needs it"
            self._leftovers.pop(page, None)

    def victims(self, num_pages: int) -> list[int]:
        """Take the next `num_pages` unlocked pages, or all that there are, off the lists."""
        out: list[int] = []
        while len(out) < num_pages:
            if not self._leftovers and not self._give_up_a_tail():
                break
            while self._leftovers and len(out) < num_pages:
                out.append(self._leftovers.popitem(last=False)[0])
        return out

    def ending_at(self, page: int) -> Tail | None:
        """The tail whose last page this is."""
        return self._tails.get(page)

    def is_wanted(self, page: int) -> bool:
        """Whether some tail needs the page."""
        return page in self._needs

    def in_order(self) -> list[tuple[TailClass, Tail]]:
        """All tails, the next to be given up first (for checks)."""
        return [(kind, self._tails[page]) for kind in TailClass for page in self._classes[kind]]

    def leftovers(self) -> list[int]:
        """Unlocked pages of no tail, the next victim first (for checks)."""
        return list(self._leftovers)

    def _give_up_a_tail(self) -> bool:
        for members in self._classes:
            if members:
                self._drop(next(iter(members)))
                return True
        return False

    def _drop(self, last: int) -> None:
        tail = self._tails.pop(last)
        del self._classes[tail.kind][last]
        locks, needs = self._state.locks, self._needs
        for page in tail.pages:
            needs[page] -= 1
            if not needs[page]:
                del needs[page]
                if page not in locks:
                    self._leftovers[page] = None

    def kind_of(self, tail: Tail) -> TailClass:
        """Its class by what the tree says now."""
        last = tail.pages[-1]
        node = self._state.home[last]
        if node.extra[0].refs.endswith(last.to_bytes(REF_BYTES, "little")):
            children = sum(1 for child in node.children.values() if child.refs)
            if children != 1:
                return TailClass.END
        return TailClass.INTERIOR if tail.is_end else TailClass.CHECKPOINT


def path_end(node: Node) -> int:
    """The ref, or ABSENT, of a node's last page in the window component."""
    if not node.extra:
        return ABSENT
    return int.from_bytes(node.extra[0].refs[-REF_BYTES:], "little", signed=True)
