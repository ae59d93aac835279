"""Device to host, window state: whole tails, as soon as they are there, under every policy.

Window state leaves the device when a request has moved past it, or when a small pool wants the
room: long before its full pages do. So a tail is copied when a prompt has been computed and when a
request ends, also by `write_back`: then a prefix whose full pages are still on the device can be
gone on from after a load of one tail.

    path    0 ...... [tail] ............ [tail] ...... [T pages] end
                      of a branch point   of an end     of this end
                      or checkpoint:      before it:    copied
                      copied              copied then

What is to be copied is settled when the path is used, and each page of it is copied once: a host
that is too small for all tails of a path would otherwise push out the first ones for the last for
ever. Pages are named by their refs: the nodes around them may be cut and joined while they wait.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from phloem.cache import PrefixCache
from phloem.cache.components import ABSENT
from phloem.cache.node import Node
from phloem.cache.window_host import WindowHost
from phloem.core.transfer import TransferKind, TransferResult
from phloem.tiers.flights import Flights
from phloem.tiers.window_path import WindowPath

__all__ = ["WindowBackups"]

MAX_PAGES = 64  # of one transfer
MAX_TRIES = 4
STARTS_PER_PASS = 32


@dataclass(slots=True)
class _Copying:
    """Pages of one path that want copies, in order; those of its end last."""

    pages: list[int]
    tries: int = 0


class WindowBackups:
    """Decides and follows BACKUP_HOST transfers of the window component.

    `on_backed_up(slot)`: a copy, and what lies above it on its path, has arrived on the host.
    """

    def __init__(
        self,
        cache: PrefixCache,
        host: WindowHost,
        flights: Flights,
        on_backed_up: Callable[[int], None],
    ) -> None:
        ledger = cache.leader.window
        assert ledger is not None, "the cache has no windows"
        self._ledger = ledger
        self._host = host
        self._flights = flights
        self._on_backed_up = on_backed_up
        self._max_pages = max(1, min(MAX_PAGES, host.capacity // 4))
        self._queue: deque[_Copying] = deque()
        self._busy: set[int] = set()  # pages in a transfer, or of a path in the queue
        self._blocked_at = -1  # transfers that had ended when the host had no room
        self.dropped: Counter[str] = Counter()  # pages by reason

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def used(self, node: Node) -> None:
        """A request has computed its prompt, or has ended: soon its tail may be gone."""
        pages = self._missing(WindowPath.down_to(node))
        too_many = max(0, len(pages) - self._host.capacity)
        self.dropped["window_host_full"] += too_many
        pages = pages[too_many:]
        if pages:
            self._busy.update(pages)
            self._go_on(_Copying(pages))

    def pump(self) -> None:
        """Start what can be started now."""
        if len(self._flights) and self._flights.num_ended == self._blocked_at:
            return  # nothing has changed since there was no room
        self._blocked_at = -1
        for _ in range(min(STARTS_PER_PASS, len(self._queue))):
            if not self._go_on(self._queue.popleft()):
                break

    def _go_on(self, copying: _Copying) -> bool:
        """Begin the next copies of a path; False if the host has no room now."""
        pages = self._next(copying)
        if not pages:
            return True
        backup = self._host.begin_backup(self._ledger.state.home[pages[-1]], pages)
        if backup is None:
            self._try_again(copying, "window_host_full")
            self._blocked_at = self._flights.num_ended
            return False
        count = copying.pages.index(pages[-1]) + 1
        now, later = copying.pages[:count], copying.pages[count:]

        def on_end(result: TransferResult) -> None:
            done = bool(result.done.all())
            self._host.end_backup(backup, done=done)
            if not done:
                self._try_again(copying, "window_copy_failed")
                return
            self._busy.difference_update(now)
            if later:
                self._queue.append(_Copying(later, copying.tries))
            else:
                self._on_backed_up(backup.window_slots[-1])

        self._flights.submit(
            TransferKind.BACKUP_HOST,
            on_end,
            component=1,
            device=array("q", pages).tobytes(),
            host=array("q", backup.window_slots).tobytes(),
        )
        return True

    def _next(self, copying: _Copying) -> list[int]:
        """The next pages of a path that are there and have no copy, a transfer's worth."""
        homes = self._ledger.state.home
        gone = [page for page in copying.pages if page not in homes]
        self._busy.difference_update(gone)
        self.dropped["window_left_before_copied"] += len(gone)
        copying.pages = [page for page in copying.pages if page in homes]
        there = [page for page in copying.pages if not homes[page].detached]
        if not there:
            self._busy.difference_update(copying.pages)
            return []
        path = WindowPath.down_to(homes[there[-1]])
        missing = set(path.refs[~path.on_host].tolist())
        wanted = [page for page in there if page in missing]
        if not wanted:
            self._busy.difference_update(copying.pages)
        return wanted[: self._max_pages]

    def _missing(self, path: WindowPath) -> list[int]:
        """Pages of the path's tails that have no copy and are to get one, in order.

        Of tails inside the path only those count that others may go on from, or that are kept every
        so many tokens; but a repeat of a prompt that ends on a page's border goes on a page before.
        """
        alive = (path.refs >= 0).nonzero()[0]
        refs, slots = path.refs[alive].tolist(), path.slots[alive].tolist()
        wanted: set[int] = set()
        for page, ref in zip(alive.tolist(), refs, strict=True):
            tail = self._ledger.tails.ending_at(ref)
            if tail is not None and (not tail.passed or page >= len(path) - 2):
                wanted.update(tail.pages)
        pairs = [pair for pair in zip(refs, slots, strict=True) if pair[0] in wanted]
        self._host.touch(slot for _, slot in pairs if slot != ABSENT)
        return [ref for ref, slot in pairs if slot == ABSENT and ref not in self._busy]

    def _try_again(self, copying: _Copying, reason: str) -> None:
        copying.tries += 1
        if copying.tries >= MAX_TRIES:
            self._give_up(copying, reason)
        else:
            self._queue.append(copying)

    def _give_up(self, copying: _Copying, reason: str) -> None:
        self._busy.difference_update(copying.pages)
        self.dropped[reason] += len(copying.pages)
