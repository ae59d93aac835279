"""How a request begins on a tree with windows: where it starts, what it locks, what it loads.

    way       cached (full)     start        window state
    hit       valid length v    v            the tail of v, locked
    load      up to l           l            the tail of l, locked or loaded into own pages
    restart   all of L          v            the tail of v; what is computed before L revives
    deep      all of L          before L     none; made anew from `start` on, right from L - T on

The tails that are wanted afterwards: where a repeat of this prompt and its continuation would go
on, and where the path was known further than it was of use (others branch off there).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass

from phloem.cache.components import ABSENT
from phloem.cache.window_lease import LeaseStart, WindowLease
from phloem.cache.window_ledger import WindowLedger
from phloem.cache.window_match import WindowMatch
from phloem.core.errors import NoRoom
from phloem.core.refs import PageRefs, owner_of
from phloem.core.tokens import TOKEN_BYTES

__all__ = ["WindowAdmission", "plan_admission"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowAdmission:
    """What a reservation on a match does. `match` ends where its locked full pages end."""

    match: WindowMatch
    begin: LeaseStart
    held: tuple[int, ...]  # the tail of the start, by refs; ABSENT: to be loaded
    load_slots: tuple[int, ...] = ()  # from these
    load_pages: int = 0  # of the full component

    def check_room(self, ledger: WindowLedger) -> None:
        """Raise NoRoom if the pages to be loaded have no room, whichever rank they will lie on."""
        missing = len(self.load_slots)
        if not missing:
            return
        room = ledger.room
        locks = ledger.state.locks
        for page in self.held:
            if page != ABSENT and page not in locks:
                room[owner_of(page)] -= 1
        if missing > min(room):
            raise NoRoom(
                f"{missing} window pages to be loaded, {ledger.free_pages} free and "
                f"{ledger.evictable_pages} evictable"
            )

    def lease(self, ledger: WindowLedger, table: PageRefs, *, shares: bool) -> WindowLease:
        """Lock, and take pages for, what `check_room` has found room for.

        `table`: the request's pages of the full component, which all have an owner by now.
        """
        return WindowLease(
            ledger, self.begin, self.held, self.load_slots, table=table, shares=shares
        )


def plan_admission(match: WindowMatch, *, load_pages: int, restart: bool) -> WindowAdmission:
    """The way that was asked for; without load and restart, a hit of the longest valid length.

    A load of `load_pages` beyond the match ends at the last loadable length within them.
    """
    lengths = match.loadable_lengths if load_pages else (match.num_pages,)
    end = lengths[bisect_right(lengths, match.num_pages + load_pages) - 1]
    if end > match.num_pages:
        return _load(match, end)
    if restart and match.full_pages > match.num_pages:
        return _restart(match)
    return _go_on(match, match.num_pages, match.num_pages)


def _go_on(match: WindowMatch, length: int, cached: int) -> WindowAdmission:
    low = max(0, length - match.tail_pages)
    begin = LeaseStart(
        start=length, committed=length, low=low, right_from=0, ends=_wanted(match, length)
    )
    held = tuple(array("q", match.tail_refs(length)))
    return WindowAdmission(match=match.ending_at(cached), begin=begin, held=held)


def _restart(match: WindowMatch) -> WindowAdmission:
    start = match.restart_start() // match.page_size
    if start == match.num_pages:
        return _go_on(match, start, match.full_pages)
    begin = LeaseStart(
        start=start,
        committed=start,
        low=start,
        right_from=match.full_pages - match.tail_pages,
        ends=_wanted(match, start),
    )
    return WindowAdmission(match=match.ending_at(match.full_pages), begin=begin, held=())


def _load(match: WindowMatch, length: int) -> WindowAdmission:
    low = max(0, length - match.tail_pages)
    cached = min(length, match.full_pages)
    here = match.window_refs()[low:cached].tolist()
    here += [ABSENT] * (length - low - len(here))
    slots = match.window_slots()[low:length].tolist()
    begin = LeaseStart(
        start=length,
        committed=match.num_pages,
        low=low,
        right_from=0,
        ends=_wanted(match, match.num_pages),
    )
    return WindowAdmission(
        match=match.ending_at(cached),
        begin=begin,
        held=tuple(here),
        load_slots=tuple(s for s, ref in zip(slots, here, strict=True) if ref == ABSENT),
        load_pages=length - cached,
    )


def _wanted(match: WindowMatch, start: int) -> frozenset[int]:
    size = match.page_size
    num_tokens = len(match.tokens) // TOKEN_BYTES
    ends = {(num_tokens - 1) // size, num_tokens // size}
    ends |= {match.full_pages, match.full_pages + match.host_full_pages}
    return frozenset(end for end in ends if end > start)
