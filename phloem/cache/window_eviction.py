"""Which window pages go first: the leader's business alone.

A prefix can be gone on from only where the last T pages before its end, its *tail*, are alive in
the window component; a page is of use through the tails it belongs to, and only with all of them.

    order     what                                            why
    1         pages of no tail                                of use only by chance
    2         tails kept every so many tokens (checkpoints)   nobody has ever gone on from there
    3         ends that a session has passed twice            it goes on from a later one
    4         the last end above a leaf                       agents go back one turn and try again
              leaves and branch points                        somebody will go on from there

In a class the tail goes first that was used longest ago; the use of one refreshes none above it.
Of a tail go the pages that no other tail needs, one after another, before the next tail is touched.

The two kinds of 4 are weighed against each other: a tail is worth the *clock* at its last use and
its weight on top, the least worth goes, and the clock is what that was worth ("greedy dual"). So a
leaf stays END_WEIGHT times as long, be there few tails or many.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable

from phloem.cache.components import ABSENT
from phloem.cache.node import REF_BYTES, Node
from phloem.cache.window_state import WindowState
from phloem.core.refs import owner_of

__all__ = ["Tail", "TailClass", "Tails", "path_end"]


# Points of hits lost against unlimited room on a recorded trace of 16 sessions, with room for 24
# tails: 0.5 with weight 1, 0.9 with 4, 2.1 with infinite. Tokens computed by 20 sessions that only
# grow, in random order, same room (least possible: 3,498): 8,458; 4,682; 3,498.
END_WEIGHT = 4


class TailClass(enum.IntEnum):
    """What somebody may want a tail for."""

    CHECKPOINT = 0
    INTERIOR = 1
    END = 2


class Tail:
    """The last pages of a prefix, by their refs; the last one names it.

    `before`: the last end above it, until somebody goes on from this one; then that is passed.
    """

    __slots__ = ("before", "clock", "is_end", "kind", "owners", "pages", "passed", "rank")

    def __init__(self, pages: tuple[int, ...], *, is_end: bool) -> None:
        self.pages = pages
        self.owners = tuple(set(map(owner_of, pages)))  # each has it in its lists
        self.is_end = is_end  # some prompt or sequence ended here, or somebody branched off
        self.before: Tail | None = None
        self.passed = False
        self.kind = TailClass.CHECKPOINT
        self.rank = _CHECKPOINT
        self.clock = 0  # when it was last used


_CHECKPOINT, _PASSED, _LAST, _END = _RANKS = range(4)


class Tails:
    """Follows which pages of the tree nobody locks, and which tails want them."""

    __slots__ = ("_clock", "_leftovers", "_needs", "_ranks", "_state", "_tails")

    def __init__(self, state: WindowState) -> None:
        self._state = state
        self._tails: dict[int, Tail] = {}  # by their last page
        self._needs: dict[int, int] = {}  # page -> how many tails it belongs to
        # Unlocked pages of no tail, of each owner.
        self._leftovers: tuple[OrderedDict[int, None], ...] = tuple(
            OrderedDict() for _ in state.allocators
        )
        # Of each owner: the tails that have pages there, by rank. Which go first is the same for
        # all; but a tail without a page there would be given up for nothing.
        self._ranks: tuple[tuple[OrderedDict[Tail, None], ...], ...] = tuple(
            tuple(OrderedDict() for _ in _RANKS) for _ in state.allocators
        )
        self._clock = 0

    def want(
        self, pages: tuple[int, ...], *, is_end: bool, before: Tail | None = None
    ) -> Tail | None:
        """These pages of the tree are the tail of a prefix, and it is being used.

        `before`: the last end above it that the user knows.
        """
        if not pages:
            return None
        tail = self._tails.get(pages[-1])
        if tail is None:
            tail = self._tails[pages[-1]] = Tail(pages, is_end=is_end)
            for page in pages:
                self._needs[page] = self._needs.get(page, 0) + 1
                self._leftovers[owner_of(page)].pop(page, None)
        else:
            assert tail.pages == pages, "one page ends two prefixes"
            tail.is_end = tail.is_end or is_end
            tail.passed = False
            self._unfile(tail)
        if before is not None and before is not tail:
            tail.before = before
        self._file(tail)
        return tail

    def go_on(self, page: int) -> None:
        """Somebody has gone on from the end at `page`: the one above it is passed."""
        tail = self._tails.get(page)
        if tail is None:
            return
        before, tail.before = tail.before, None
        if before is not None and self._tails.get(before.pages[-1]) is before:
            before.passed = True
            self._reconsider(before)
        self._reconsider(tail)

    def turn_back(self, page: int) -> None:
        """What followed `page` has left the device: it may be the end of a leaf again."""
        tail = self._tails.get(page)
        if tail is not None and self._reconsider(tail):
            for owner in tail.owners:  # it was not used just now
                self._ranks[owner][tail.rank].move_to_end(tail, last=False)

    def locked(self, pages: Iterable[int]) -> None:
        """Somebody locks these pages."""
        for page in pages:
            self._leftovers[owner_of(page)].pop(page, None)

    def unlocked(self, pages: Iterable[int]) -> None:
        """Nobody locks these pages now."""
        for page in pages:
            if page not in self._needs:
                self._leftovers[owner_of(page)][page] = None

    def gone(self, pages: Iterable[int]) -> None:
        """These pages leave the tree, with the tails that end there."""
        pages = list(pages)
        for page in pages:
            if page in self._tails:
                self._drop(self._tails[page])
        for page in pages:
            assert page not in self._needs, f"window page {page} leaves before a tail that needs it"
            self._leftovers[owner_of(page)].pop(page, None)

    def forget(self) -> None:
        """Nobody wants anything any more."""
        for tail in self.tails():
            self._drop(tail)

    def victims(self, num_pages: int, owner: int | None = None) -> list[int]:
        """Take the next `num_pages` unlocked pages of an owner, or all there are, off the lists.

        None: of one owner after another. A tail that is given up for one owner's pages leaves those
        of the others as leftovers: they stay where they are until somebody needs their room.
        """
        out: list[int] = []
        owners = range(len(self._leftovers)) if owner is None else (owner,)
        for each in owners:
            pages = self._leftovers[each]
            while len(out) < num_pages and (pages or self._give_up_a_tail(each)):
                while pages and len(out) < num_pages:
                    out.append(pages.popitem(last=False)[0])
        return out

    def ending_at(self, page: int) -> Tail | None:
        """The tail whose last page this is."""
        return self._tails.get(page)

    def is_wanted(self, page: int) -> bool:
        """Whether some tail needs the page."""
        return page in self._needs

    def tails(self) -> list[Tail]:
        """All tails, by rank (for checks)."""
        return list(
            dict.fromkeys(tail for r in _RANKS for ranks in self._ranks for tail in ranks[r])
        )

    @property
    def num_leftovers(self) -> int:
        """Unlocked pages of no tail: nobody misses them."""
        return sum(map(len, self._leftovers))

    def leftovers(self) -> list[int]:
        """Unlocked pages of no tail, of each owner the next victim first (for checks)."""
        return [page for pages in self._leftovers for page in pages]

    def kind_of(self, tail: Tail) -> TailClass:
        """Its class by what the tree says now."""
        last = tail.pages[-1]
        node = self._state.home[last]
        if path_end(node) == last:
            children = sum(1 for child in node.children.values() if child.refs)
            if children != 1:
                return TailClass.END
        return TailClass.INTERIOR if tail.is_end else TailClass.CHECKPOINT

    def _file(self, tail: Tail) -> None:
        """Put a tail at the end of its rank: it is used now."""
        tail.kind = self.kind_of(tail)
        tail.rank = _rank(tail)
        tail.clock = self._clock
        for owner in tail.owners:
            self._ranks[owner][tail.rank][tail] = None

    def _unfile(self, tail: Tail) -> None:
        for owner in tail.owners:
            del self._ranks[owner][tail.rank][tail]

    def _reconsider(self, tail: Tail) -> bool:
        """Move a tail to the end of another rank, if it belongs there by now."""
        tail.kind = self.kind_of(tail)
        if _rank(tail) == tail.rank:
            return False
        self._unfile(tail)
        self._file(tail)
        return True

    def _give_up_a_tail(self, owner: int) -> bool:
        """Drop the tail that goes first of those with pages of `owner`; False if there is none."""
        heads = [next(iter(rank), None) for rank in self._ranks[owner]]
        first = heads[_CHECKPOINT] or heads[_PASSED]
        if first is None:
            worth = [
                (head.clock + weight, head.rank, head)
                for head, weight in ((heads[_LAST], 1), (heads[_END], END_WEIGHT))
                if head is not None
            ]
            if not worth:
                return False
            value, _, first = min(worth)
            self._clock = max(self._clock, value)
        self._drop(first)
        return True

    def _drop(self, tail: Tail) -> None:
        del self._tails[tail.pages[-1]]
        self._unfile(tail)
        tail.before = None
        locks, needs = self._state.locks, self._needs
        for page in tail.pages:
            needs[page] -= 1
            if not needs[page]:
                del needs[page]
                if page not in locks:
                    self._leftovers[owner_of(page)][page] = None


def _rank(tail: Tail) -> int:
    if tail.kind is TailClass.CHECKPOINT:
        return _CHECKPOINT
    if tail.kind is TailClass.END:
        return _END
    return _PASSED if tail.passed else _LAST


def path_end(node: Node) -> int:
    """The ref, or ABSENT, of a node's last page in the window component."""
    if not node.extra:
        return ABSENT
    return int.from_bytes(node.extra[0].refs[-REF_BYTES:], "little", signed=True)
